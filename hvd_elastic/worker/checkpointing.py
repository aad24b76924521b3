"""Decides when the ranks take a checkpoint, and writes this rank's share of it.

Each rank knows when a checkpoint is due: one interval after the last one, or after the rank began.
The first request is reduced together with the gradients of a step, so all ranks learn of it in the
same step and copy the state at the same step boundary, without a message of its own. A checkpoint
uses two step boundaries: at the first every rank allocates the buffer; all copy at the next one at
which no rank is still allocating or writing the checkpoint before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from hvd_elastic.checkpoint.manifests import complete_checkpoint, warning_of_not_finite
from hvd_elastic.checkpoint.shards import ShardInfo, describe_shard, find_shards
from hvd_elastic.checkpoint.stream import Content, new_shard
from hvd_elastic.checkpoint.writer import CheckpointWriter
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.wire import messages as msg
from hvd_elastic.worker.worker import Worker

_KEPT = 3  # checkpoints that a run without a leader keeps
_SPOOLED = 2
"""Checkpoints that a host keeps for the leader: the one being fetched, and the next."""
_PATIENCE_S = 60.0
"""Age at which a shard no longer counts as waiting for the leader: by then the leader will not
fetch it, because another rank's shard is missing, for example."""
_LOOK_S = 0.25  # seconds between two readings of the spool, which lists a folder


class Checkpointing:
    """Schedules, copies and writes the checkpoints of one training process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._every_s = worker.options.checkpoint_every_s or worker.sink.checkpoint_every_s
        self._spool = os.environ.get("HVD_ELASTIC_SPOOL") if worker.link is not None else None
        self._folder = self._spool or worker.sink.checkpoint_folder
        self._writer: CheckpointWriter | None = None
        self._due = float("inf")
        self._asked = False
        self._room_agreed = False
        self._agreed = (False, False, False)
        self._failed = ""
        self._was_not_finite = False
        self._looked_at = 0.0
        self._is_behind = False

    # -- agreeing --------------------------------------------------------------------------

    def wishes(self) -> list[bool]:
        """Return what this rank sends with a step: checkpoint due, requested, rank busy."""
        if self._writer is None:
            return [False, False, False]
        if self._worker.link is not None and self._worker.link.take_checkpoint_request():
            self._asked = True
        due = time.monotonic() >= self._due
        return [due, self._asked, self._writer.busy or self._behind()]

    def _behind(self) -> bool:
        """Return whether the leader fetches checkpoints more slowly than they are written."""
        now = time.monotonic()
        if self._spool is None or now < self._due:
            return False
        if now >= self._looked_at + _LOOK_S:
            self._looked_at = now
            waiting = {
                shard.step
                for shard in find_shards(self._spool)
                if (shard.life, shard.generation) == (self._worker.life, self._worker.generation)
                and time.time() - shard.created < _PATIENCE_S
            }
            self._is_behind = len(waiting) >= _SPOOLED
        return self._is_behind

    def agree(self, wishes: Sequence[bool]) -> None:
        """Store the wishes of all ranks combined, for the next step boundary."""
        due, asked, busy = wishes
        self._agreed = (due, asked, busy)

    def step_boundary(self) -> None:
        """Do between two steps what the ranks agreed on in the last one."""
        due, asked, busy = self._agreed
        self._agreed = (False, False, False)
        if asked:
            self.take_checkpoint(wait=True)
            self.answer()
        elif due and not busy:
            if self._room_agreed:
                self.take_checkpoint()
            else:
                self._make_room()

    def schedule(self) -> None:
        """Begin a generation; the first checkpoint of a process is due one interval later."""
        self._room_agreed = False
        self._agreed = (False, False, False)
        if not self._every_s or not self._folder:
            return
        if self._writer is None:
            self._writer = CheckpointWriter(
                self._folder, finish=self._finish, on_done=self._done, on_error=self._error
            )
        if self._due == float("inf"):
            self._due = time.monotonic() + self._every_s

    # -- taking ----------------------------------------------------------------------------

    def _share(self, *, alone: bool = False) -> tuple[Content, ShardInfo | None]:
        """Return the present state and this rank's shard of it; ``alone``: all in one shard."""
        worker, state = self._worker, self._worker.state
        assert state is not None
        rank, size = (0, 1) if alone else (worker.rank, worker.size)
        content = state.content(copy_own=rank == 0)
        if self._spool is None:
            # Without a leader nothing collects shards of several hosts, so rank 0 writes all.
            if rank:
                return content, None
            size = 1
        shard = new_shard(
            content,
            worker.progress,
            rank,
            size,
            worker.generation,
            worker.life,
            world=worker.size,
        )
        return content, shard

    def _make_room(self) -> None:
        self._room_agreed = True
        if self._writer is not None and self._worker.state is not None:
            content, shard = self._share()
            if shard is not None:
                self._writer.prepare(content, shard.end - shard.begin)

    def broken(self) -> None:
        """Hand a request of the broken step back to the link: it has not been answered."""
        if self._asked and self._worker.link is not None:
            self._asked = False
            self._worker.link.give_back_checkpoint_request()

    def answer(self) -> None:
        """Report that this rank has written its part of the requested checkpoint."""
        self._worker.sink.send(msg.CheckpointAnswered())

    def take_checkpoint(self, *, wait: bool = False, alone: bool = False) -> None:
        """Copy this rank's share of the present state and write it.

        Args:
            wait: return only when it is written.
            alone: write the whole state, because the other ranks are gone or do the same.
        """
        state = self._worker.state
        if self._writer is None or state is None:
            return
        self._room_agreed = self._asked = False
        self._due = time.monotonic() + self._every_s
        self._writer.flush()
        began = time.monotonic()
        content, shard = self._share(alone=alone)
        if shard is not None:
            lasting = state.lasting() if state.waits_before_step() else set()
            self._writer.start_shard(content, self._worker.progress, shard, lasting, began)
            if wait:
                self._writer.flush()

    def settle(self) -> None:
        """Wait until the state of the checkpoint in progress has been copied."""
        if self._writer is not None:
            self._writer.settle()

    def close(self) -> None:
        """Wait until the checkpoint in progress is written, and stop the writer."""
        if self._writer is not None:
            self._writer.flush()
            self._writer = None

    # -- in the writer's thread ------------------------------------------------------------

    def _finish(self, shard: ShardInfo) -> None:
        if self._spool is not None:
            describe_shard(shard, _SPOOLED + 1)
        else:
            info = complete_checkpoint(shard.path.parent, [shard], _KEPT)
            if info.not_finite and not self._was_not_finite:
                self._worker.warn(warning_of_not_finite(info))
            self._was_not_finite = bool(info.not_finite)

    def _done(self, shard: ShardInfo, blocked_s: float) -> None:
        self._failed = ""
        self._worker.sink.send(
            msg.CheckpointWritten(
                shard=shard.manifest(),
                step=shard.step,
                epoch=shard.epoch,
                examples=shard.examples,
                path=str(shard.path),
                bytes=shard.bytes,
                seconds=shard.seconds,
                blocked_s=blocked_s,
            )
        )

    def _error(self, error: HvdElasticError) -> None:
        message = f"no checkpoint was written: {error}"
        if self._spool is not None:
            self._worker.sink.send(msg.CheckpointFailed(message))
        elif not self._failed:  # a disk that stays full is reported once
            self._worker.warn(message)
        self._failed = message
