"""Fetches checkpoints and saved files from the hosts, and ends the run when none is awaited."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from hvd_elastic.checkpoint.checkpoint_collector import CheckpointCollector
from hvd_elastic.checkpoint.place import CheckpointStore
from hvd_elastic.checkpoint.saved_collector import SavedFileCollector
from hvd_elastic.checkpoint.sender import CheckpointSender
from hvd_elastic.checkpoint.spool_collector import Callbacks, Collector
from hvd_elastic.control.commands import Finish
from hvd_elastic.leader.agents.connection import AgentConnection
from hvd_elastic.leader.led_run import LedRun
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.wire import messages as msg

_LEAST_RESERVE_S = 10.0
"""Part of a preempted host's remaining time kept for a last checkpoint and for leaving [s]."""


class Fetching:
    """Fetches what the hosts of a run have written.

    Args:
        run: what all parts of the leader share; its loop ends when nothing is awaited.
        on_checkpoint: called when no more checkpoint is being fetched.

    Attributes:
        sender: sends a checkpoint to a host, for a restart.
    """

    def __init__(
        self,
        run: LedRun,
        store: CheckpointStore,
        *,
        on_checkpoint: Callable[[], None],
        resumed: bool,
    ) -> None:
        self._run = run
        self._ended: Finish | None = None
        """How training ended; None: it has not."""
        self._ended_at = 0.0
        self.checkpoints = CheckpointCollector(
            store,
            copies=run.spec.checkpoint_copies,
            resumed=resumed,
            by_host=lambda: run.agents.by_host,
            call=Callbacks(run.loop.post, run.journal.emit, run.journal.warn, on_checkpoint),
        )
        self.sender = CheckpointSender(
            store,
            self.checkpoints,
            agents=lambda: run.agents.by_host,
            post=run.loop.post,
            warn=run.journal.warn,
        )
        self.saved = SavedFileCollector(
            run.folder.saved,
            life=lambda: run.fence.identity.leader,
            agents=lambda: run.agents.usable,
            call=Callbacks(
                run.loop.post, run.journal.emit, run.journal.warn, self.end_loop_if_complete
            ),
        )

    @property
    def reserve_s(self) -> float:
        """Part of a preempted host's remaining time to keep for its last checkpoint [s]."""
        return max(_LEAST_RESERVE_S, 2 * self.checkpoints.newest_s)

    def expect_checkpoint(self, past: RunSummary) -> None:
        """Prevent training from starting afresh if a checkpoint exists or may exist elsewhere."""
        if past.checkpoints:
            self.checkpoints.expected = f"that of step {past.checkpoints[-1].step} was written"
        elif self._run.folder.began_elsewhere:
            self.checkpoints.expected = "it was led by another machine, which may have written one"

    def offered(self, agent: AgentConnection, hello: msg.AgentHello) -> None:
        """Handle the hello of an agent, which lists what is in its host's spool."""
        self.checkpoints.offered(agent.host.name, agent, hello.spooled)
        self.saved.offered(agent.host.name, agent, hello.saved)

    def release_fetched_hosts(self) -> None:
        """Let hosts go from which all is fetched, and the run end if all is; called often."""
        self.checkpoints.fetch_due()
        self.saved.tell_lost()
        self.saved.fetch_due()
        self._run.agents.release(self.saved.holds)
        self.end_loop_if_complete()

    def training_ended(self, finish: Finish) -> None:
        """End the loop as soon as all is fetched, since training has ended."""
        self._ended, self._ended_at = finish, time.monotonic()
        self.end_loop_if_complete()

    def end_loop_if_complete(self) -> None:
        """End the loop if training has ended and nothing is to be waited for."""
        if self._ended is None:
            return
        needed: list[Collector[Any, Any]] = [self.saved]
        if self._ended.status != "failed":
            needed.append(self.checkpoints)
        if not any(each.is_awaited(self._ended_at) for each in needed):
            self._run.loop.stop()

    def with_missing(self, finish: Finish) -> Finish:
        """Return how the run ends, given which files of its hosts could not be fetched."""
        missing = self.saved.missing()
        if finish.status == "succeeded" and self._run.spec.checkpoint_every_s:
            reached = self._run.progress.reached.step
            missing = "; ".join(filter(None, (self.checkpoints.missing(reached), missing)))
        if not missing:
            return finish
        if finish.status == "succeeded":
            return Finish("failed", f"training has ended, and {missing}")
        return replace(finish, message=f"{finish.message}; {missing}")

    def empty_spools(self, *, succeeded: bool) -> None:
        """Let all hosts delete their spools, except for what may be needed."""
        self.checkpoints.empty_spools(
            succeeded=succeeded, searched_in_vain=self.sender.searched_in_vain
        )
        self.saved.empty_spools()
