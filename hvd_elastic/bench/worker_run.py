"""An elastic run in the background whose workers measure something and report it as metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hvd_elastic.errors import RunError
from hvd_elastic.leader.probe import end_run, start_detached
from hvd_elastic.records.json_lines import EventFollower

if TYPE_CHECKING:
    from typing_extensions import Self

PATIENCE_S = 600.0
"""How long the start of training at a size may take [s]."""
_POLL_S = 0.1
Say = Callable[[str], None]
_Found = TypeVar("_Found")


class WorkerRun:
    """A run for the length of a block.

    Args:
        hostfile: path of the hostfile.
        command: command of a worker.
        slots: number of workers at first.
        options: further options of ``hvd-elastic run``.

    Raises:
        UsageError: ``hvd-elastic run`` rejected its options.
        RunError: the run could not be started.
    """

    def __init__(
        self, hostfile: Path, command: Sequence[str], slots: int, options: Sequence[str]
    ) -> None:
        words = [*options, "--np", str(slots), "--min-np", "1"]
        self._folder = start_detached(hostfile, command, words, "the benchmark")
        self._follower = EventFollower(self._folder.events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        end_run(self._folder, "the benchmark is over")

    def scale(self, slots: int) -> None:
        """Have it train on so many slots."""
        self._folder.ask_leader("scale", {"np": slots})

    def wait(
        self, look: Callable[[Mapping[str, Any]], _Found | None], what: str, patience_s: float
    ) -> _Found:
        """Return the first thing that ``look`` finds in an event.

        Raises:
            RunError: the run has ended, or ``what`` did not come within ``patience_s``.
        """
        deadline = time.monotonic() + patience_s
        logs = f"its logs: hvd-elastic logs {self._folder.run_id}"
        while True:
            alive = self._folder.leader_alive()
            for event in self._follower.poll():
                if event["kind"] == "run_finished":
                    ended = f"{event.get('status')}: {event.get('message')}"
                    raise RunError(f"the benchmark {ended}; {logs}")
                found = look(event)
                if found is not None:
                    return found
            if not alive:
                leader_log = self._folder.leader_log
                raise RunError(f"the leader of the benchmark ended early; see {leader_log}")
            if time.monotonic() > deadline:
                raise RunError(f"no {what} within {patience_s:.0f} s; {logs}")
            time.sleep(_POLL_S)
