"""Runs a training briefly at a few sizes, so that its step time can be predicted for others."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.records.json_lines import EventFollower
from hvd_elastic.records.run_folder import RunFolder

_POLL_S = 0.2
"""Time between two readings of the run's events [s]; short beside the time at each size."""
_PATIENCE_S = 600.0
"""How long a size may take until it trains [s]: scripts may load much before the first step."""


def sizes_to_probe(hosts: Sequence[Host]) -> list[int]:
    """Return the numbers of processes that are most informative to measure.

    On one host these are one, two and all slots; on two hosts, the fewest processes that use both
    and all slots.

    >>> sizes_to_probe([Host("a", slots=8), Host("b", slots=4), Host("c", slots=8)])
    [1, 2, 8, 9, 12]
    """
    first = hosts[0].slots
    both = first + (hosts[1].slots if len(hosts) > 1 else 0)
    return sorted({size for size in (1, 2, first, first + 1, both) if size <= both})


def probe(
    hostfile: Path,
    hosts: Sequence[Host],
    command: Sequence[str],
    for_s: float,
    options: Sequence[str],
    tell: Callable[[str], None],
) -> RunFolder:
    """Train for a while at each of :func:`sizes_to_probe`, then end the run.

    Args:
        hostfile, hosts: path of the hostfile, and its hosts.
        command: training command.
        for_s: training time over all sizes together [s].
        options: further options of ``hvd-elastic run``.
        tell: called with a line of text for each size.

    Returns:
        The run folder, with the events that were measured.

    Raises:
        UsageError: ``hvd-elastic run`` rejected its options.
        RunError: the run could not be started, or ended before it was measured at every size.
    """
    sizes = sizes_to_probe(hosts)
    folder = start_detached(hostfile, command, [*options, "--np", str(sizes[0])], "the probe")
    follower = EventFollower(folder.events)
    try:
        for size in sizes:
            tell(f"probing: {size} of {sizes[-1]} processes")
            if size != sizes[0]:
                folder.ask_leader("scale", {"np": size})
            _wait_for_size(folder, follower, size)
            _train(folder, follower, for_s / len(sizes))
    finally:
        end_run(folder, "the probe is over")
    return folder


def end_run(folder: RunFolder, reason: str) -> None:
    """Have a run end, and wait until its leader has."""
    if folder.leader_alive():
        folder.ask_leader("stop", {"reason": reason})
        deadline = time.monotonic() + _PATIENCE_S
        while folder.leader_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def start_detached(
    hostfile: Path, command: Sequence[str], options: Sequence[str], what: str
) -> RunFolder:
    """Start a run in the background, without checkpoints.

    Args:
        hostfile: path of the hostfile.
        command: training command.
        options: further options of ``hvd-elastic run``.
        what: what is started, for the message.

    Raises:
        UsageError: ``hvd-elastic run`` rejected its options.
        RunError: the run could not be started.
    """
    words = ["run", "--detach", "--hostfile", str(hostfile), "--checkpoint-every", "0", *options]
    started = subprocess.run(
        [sys.executable, "-m", "hvd_elastic.cli.app", *words, "--", *command],
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if started.returncode:
        kind = UsageError if started.returncode == UsageError.exit_status else RunError
        raise kind(f"{what} could not be started; see above")
    return RunFolder.open(started.stdout.split()[0])


def _wait_for_size(folder: RunFolder, follower: EventFollower, size: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        alive = folder.leader_alive()
        for event in follower.poll():
            if event["kind"] == "rescale_finished" and event.get("size") == size:
                return
            _raise_if_over(folder, event)
        if not alive:
            raise RunError(f"the leader of the probe ended early; see {folder.leader_log}")
        if time.monotonic() > deadline:
            raise RunError(
                f"the probe did not come to train on {size} processes within {_PATIENCE_S:g} s; "
                f"see: hvd-elastic status {folder.run_id}"
            )
        time.sleep(_POLL_S)


def _train(folder: RunFolder, follower: EventFollower, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for event in follower.poll():
            _raise_if_over(folder, event)
        time.sleep(_POLL_S)


def _raise_if_over(folder: RunFolder, event: dict[str, object]) -> None:
    if event["kind"] == "run_finished":
        raise RunError(
            f"the probe {event.get('status')} before it had measured enough: "
            f"{event.get('message')}. Give it a longer training (more epochs), or a shorter "
            f"--probe-for; its logs: hvd-elastic logs {folder.run_id}"
        )
