"""Run a user's training in the background, until something was measured in it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.input.rate import RESULT_VARIABLE, SECONDS_VARIABLE, InputRate
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import ReadEvent, RescaleFinished, RunFinished
from hvd_elastic.signals import delayed_signals, ended_by_signals

if TYPE_CHECKING:
    from typing_extensions import Self


PATIENCE_S = 600.0
"""How long the start of training at a size may take [s]: scripts may load much before it."""
_POLL_S = 0.1
Say = Callable[[str], None]
_Found = TypeVar("_Found")


class BackgroundRun:
    """A run without checkpoints, for the length of a block.

    Args:
        options: further options of ``hvd-elastic run``.
        name: what it is called in messages.
        advice: what to do if training ends before it was measured.

    Raises:
        UsageError: ``hvd-elastic run`` rejected its options.
        RunError: the run could not be started.
    """

    def __init__(
        self,
        hostfile: Path,
        command: Sequence[str],
        slots: int,
        options: Sequence[str],
        name: str,
        advice: str = "",
    ) -> None:
        self._name = name
        self._advice = advice
        words = ["run", "--detach", "--hostfile", str(hostfile), "--checkpoint-every", "0"]
        self._words = [*words, *options, "--np", str(slots), "--", *command]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as block:
            block.enter_context(ended_by_signals())
            with delayed_signals():  # a run that is being started could not be ended
                self.folder = self._start()
                block.callback(self._end)
            self._block = block.pop_all()
        self._follower = self.folder.follow_events()
        self._logs = f"its logs: hvd-elastic logs {self.folder.run_id}"
        return self

    def __exit__(self, *error: object) -> None:
        self._block.close()

    def _start(self) -> RunFolder:
        started = subprocess.run(
            [sys.executable, "-m", "hvd_elastic.cli.app", *self._words],
            stdout=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if started.returncode:
            kind = UsageError if started.returncode == UsageError.exit_status else RunError
            raise kind(f"{self._name} could not be started; see above")
        return RunFolder.open(started.stdout.split()[0])

    def _end(self) -> None:
        """End the run, and wait until its leader has ended."""
        if not self.folder.leader_alive():
            return
        with contextlib.suppress(RunError):  # it may just end, and an error is told already
            self.folder.ask_leader("stop", {"reason": f"{self._name} is over"})
        deadline = time.monotonic() + PATIENCE_S
        while self.folder.leader_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def scale(self, slots: int) -> None:
        """Have it train on so many slots."""
        self.folder.ask_leader("scale", {"np": slots})

    def wait(
        self, look: Callable[[ReadEvent], _Found | None], what: str, patience_s: float
    ) -> _Found:
        """Return the first thing that ``look`` finds in an event.

        Raises:
            RunError: the run has ended, or ``what`` did not come within ``patience_s``.
        """
        deadline = time.monotonic() + patience_s
        while True:
            alive = self.folder.leader_alive()
            for event in self._events():
                found = look(event)
                if found is not None:
                    return found
            if not alive:
                leader_log = self.folder.leader_log
                raise RunError(f"the leader of {self._name} ended early; see {leader_log}")
            if time.monotonic() > deadline:
                raise RunError(f"no {what} within {patience_s:.0f} s; {self._logs}")
            time.sleep(_POLL_S)

    def train(self, seconds: float) -> None:
        """Let it train.

        Raises:
            RunError: the run has ended.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in self._events():
                pass
            time.sleep(_POLL_S)

    def _events(self) -> Iterator[ReadEvent]:
        for event in self._follower.poll():
            if isinstance(event, RunFinished):
                raise RunError(
                    f"{self._name} {event.status} before it had measured enough: "
                    f"{event.message}{self._advice}; {self._logs}"
                )
            yield event


_ADVICE = ". Give it a longer training (more epochs), or a shorter --probe-for"


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
    say: Say,
) -> RunFolder:
    """Train for a while at each of :func:`sizes_to_probe`, then end the run.

    Args:
        for_s: training time over all sizes together [s].
        options: further options of ``hvd-elastic run``.
        say: called with a line of text for each size.

    Returns:
        The run folder, with the events that were measured.

    Raises:
        UsageError: ``hvd-elastic run`` rejected its options.
        RunError: the run could not be started, or ended before it was measured at every size.
    """
    sizes = sizes_to_probe(hosts)
    with BackgroundRun(hostfile, command, sizes[0], options, "the probe", _ADVICE) as run:
        for size in sizes:
            say(f"probing: {size} of {sizes[-1]} processes")
            if size != sizes[0]:
                run.scale(size)

            def look(event: ReadEvent, size: int = size) -> bool | None:
                return (isinstance(event, RescaleFinished) and event.size == size) or None

            run.wait(look, f"training on {size} processes", PATIENCE_S)
            run.train(for_s / len(sizes))
    return run.folder


def measure_input(command: Sequence[str], seconds: float) -> InputRate:
    """Run a training script that reads its batches and does not train.

    Args:
        command: training command; its output goes to stderr.
        seconds: time to read for [s].

    Raises:
        RunError: the command cannot be started, or ended before it had read batches.
    """
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-bench-") as folder:
        result = Path(folder, "rate.json")
        launched = ("HVD_ELASTIC_", "HOROVOD_", "OMPI_")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(launched)
        }
        environment |= {SECONDS_VARIABLE: str(seconds), RESULT_VARIABLE: str(result)}
        try:
            ended = subprocess.run([*command], env=environment, stdout=sys.stderr, check=False)
        except OSError as error:
            raise RunError(f"{command[0]!r} cannot be started: {error.strerror}") from error
        rate = InputRate.read(result)
    if rate is None:
        raise RunError(
            f"the script ended with status {ended.returncode} before it had read batches. Give a "
            "script that iterates hvd.DataLoader (or hvd.dataset) in its training function, with "
            "its arguments"
        )
    return rate
