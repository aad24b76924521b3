"""Measures how training on synthetic data scales, by rescaling one elastic run.

The run begins at the largest size, so that all workers start at once, and shrinks from size to
size. Rank 0 times its steps (:mod:`hvd_elastic.bench.step_timer`) and reports them as metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_elastic.bench.scaling import Scaling, Settings, check_prices, scaling_of
from hvd_elastic.bench.step_timer import PREFIX
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import count
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.probe import end_run, start_detached
from hvd_elastic.records.json_lines import EventFollower
from hvd_elastic.records.run_folder import RunFolder

_POLL_S = 0.1
_PATIENCE_S = 600.0
"""How long the first steps at a size may take [s], beside the time that is measured."""
Say = Callable[[str], None]


def measure_synthetic(
    hostfile: Path,
    hosts: Sequence[Host],
    sizes: Sequence[int],
    settings: Settings,
    seconds: float,
    options: Sequence[str],
    say: Say,
) -> Scaling:
    """Train on synthetic data at each size, and return the figures.

    Args:
        hostfile, hosts: path of the hostfile, and its hosts.
        sizes: numbers of slots.
        settings: what to train.
        seconds: time to measure each size for [s].
        options: further options of ``hvd-elastic run``.
        say: called with a line of progress.

    Raises:
        UsageError: a size is above the slots of the hostfile, or some hosts only have a price.
        RunError: training failed; names the cause.
    """
    slots = sum(host.slots for host in hosts)
    order = sorted(set(sizes), reverse=True)
    if order[0] > slots:
        raise UsageError(f"--np {order[0]}: {hostfile} has {count(slots, 'slot')} in all")
    check_prices(hosts)
    say(f"starting {count(order[0], 'process')}")
    folder = start_detached(
        hostfile,
        settings.command(seconds),
        [*options, "--np", str(order[0]), "--min-np", "1"],
        "the benchmark",
    )
    follower = EventFollower(folder.events)
    found: dict[int, tuple[int, Mapping[str, Any]]] = {}
    try:
        for size in order:
            if size != order[0]:
                folder.ask_leader("scale", {"np": size})
            say(f"{count(size, 'slot')}: measuring for {seconds:g} s")
            found[size] = _figures(folder, follower, size, _PATIENCE_S + 10 * seconds)
            rate = size * settings.batch_size / found[size][1]["step_s"]
            say(f"{count(size, 'slot')}: {rate:.1f} examples/s")
    finally:
        end_run(folder, "the benchmark is over")
    return scaling_of(settings, hosts, found)


def _figures(
    folder: RunFolder, follower: EventFollower, size: int, patience_s: float
) -> tuple[int, Mapping[str, Any]]:
    """Wait for the figures of a size; return the number of hosts, and the figures."""
    deadline = time.monotonic() + patience_s
    hosts = 1
    while True:
        alive = folder.leader_alive()
        for event in follower.poll():
            if event["kind"] == "rescale_started":
                hosts = len(event["hosts"])
            if event["kind"] == "run_finished":
                raise RunError(
                    f"the benchmark {event.get('status')}: {event.get('message')}; its logs: "
                    f"hvd-elastic logs {folder.run_id}"
                )
            if event["kind"] == "metrics" and event.get(PREFIX + "size") == size:
                figures = {
                    name.removeprefix(PREFIX): value
                    for name, value in event.items()
                    if name.startswith(PREFIX)
                }
                return hosts, figures
        if not alive:
            raise RunError(f"the leader of the benchmark ended early; see {folder.leader_log}")
        if time.monotonic() > deadline:
            raise RunError(
                f"no figures of {count(size, 'slot')} within {patience_s:.0f} s; its logs: "
                f"hvd-elastic logs {folder.run_id}"
            )
        time.sleep(_POLL_S)
