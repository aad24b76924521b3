"""Writes the shards of one rank while training continues.

Training never waits for the disk, and rarely for the copy of the state. Tensors that do not change
before the next ``optimizer.step()`` are copied by a thread during the next forward and backward
pass; only that step waits for the rest of the copy. The buffer of the copy is reused, because the
first write to newly allocated memory takes many times longer than the copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvd_elastic.checkpoint.shards import ShardInfo, write_shard
from hvd_elastic.checkpoint.stream import Content, Position
from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import CheckpointError, HvdElasticError

log = logging.getLogger(__name__)


@dataclass
class _Job:
    """A shard that is being copied and written."""

    content: Content
    progress: dict[str, Any]
    shard: ShardInfo
    buffer: np.ndarray[Any, Any]
    copied: threading.Event = field(default_factory=threading.Event)
    blocked_s: float = 0.0


class CheckpointWriter:
    """Copies and writes the shards of one rank, one at a time, in a thread.

    All functions are called in that thread.

    Args:
        finish: called with a written shard, to describe it in the spool.
        on_done: called with each finished shard and the time that training waited for it [s].
        on_error: called with the error when a shard was not written.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        finish: Callable[[ShardInfo], object],
        on_done: Callable[[ShardInfo, float], None],
        on_error: Callable[[HvdElasticError], None],
    ) -> None:
        self._folder = Path(folder)
        self._finish = finish
        self._on_done = on_done
        self._on_error = on_error
        self._buffer: np.ndarray[Any, Any] = np.empty(0, np.uint8)
        self._pinned = False
        self._thread: threading.Thread | None = None
        self._job: _Job | None = None

    @property
    def busy(self) -> bool:
        """Return whether a shard is being written, or its buffer is being allocated."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, content: Content, size: int) -> None:
        """Allocate a buffer for ``size`` bytes of ``content`` in the thread; see :attr:`busy`."""
        if not self.busy and not self._fits(content, size):
            self._start(lambda: self._make_buffer(content, size))

    def start_shard(
        self,
        content: Content,
        progress: Position,
        shard: ShardInfo,
        lasting: set[int],
        began: float,
    ) -> None:
        """Start to copy and write a shard of the current state.

        Args:
            shard: part of the state to write.
            lasting: indices of tensors that do not change before :meth:`settle`; all others are
                copied before this method returns.
            began: when training began to wait for this call [monotonic s].
        """
        self.flush()
        size = shard.end - shard.begin
        if not self._fits(content, size) and not self._make_buffer(content, size):
            return
        job = self._job = _Job(content, progress.as_state(), shard, self._buffer[:size])
        copy_rest = content.begin_copy(shard.begin, shard.end, job.buffer, lasting)
        self._start(lambda: self._work(job, copy_rest))
        job.blocked_s = time.monotonic() - began

    def settle(self) -> None:
        """Wait until the state is copied; after this, all tensors may change."""
        job = self._job
        if job is not None and not job.copied.is_set():
            began = time.monotonic()
            job.copied.wait()
            job.blocked_s += time.monotonic() - began

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until no shard is being written; return False if ``timeout_s`` passes first."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def _fits(self, content: Content, size: int) -> bool:
        return self._buffer.size >= size and self._pinned == content.pinned

    def _make_buffer(self, content: Content, size: int) -> bool:
        try:
            self._buffer, self._pinned = content.make_buffer(size), content.pinned
        except MemoryError as error:
            self._on_error(
                CheckpointError(
                    f"no checkpoint was written: there is no memory for a copy of {size} bytes "
                    f"({error}). More ranks, or hosts with more memory, make it smaller"
                )
            )
            return False
        return True

    def _start(self, work: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=work, name="hvd_elastic checkpoint", daemon=True)
        self._thread.start()

    def _work(self, job: _Job, copy_rest: Callable[[], str | None]) -> None:
        shard = job.shard
        try:
            try:
                changed = copy_rest()
            finally:
                job.copied.set()
            if changed is not None:
                raise CheckpointError(
                    f"the checkpoint of step {shard.step} was not written: {changed} was changed "
                    "between two steps, while it was copied. Change parameters in or after "
                    "optimizer.step(), not before it"
                )
            head = job.content.head(job.progress, shard.world) if shard.index == 0 else []
            shard = replace(
                shard,
                header=sum(memoryview(piece).nbytes for piece in head),
                not_finite=job.content.not_finite(
                    shard.begin, shard.end, job.buffer, own=shard.index == 0
                ),
            )

            def write(file: HashingWriter) -> None:
                for piece in (*head, job.buffer):
                    file.write(piece)

            written = write_shard(self._folder, shard, write)
            self._finish(written)
        except HvdElasticError as error:
            self._tell(self._on_error, error)
        except Exception as error:  # training must continue without this checkpoint
            log.debug("writing a checkpoint failed", exc_info=True)
            wrapped = CheckpointError(
                f"the checkpoint of step {shard.step} was not written to {self._folder}: "
                f"{type(error).__name__}: {error}"
            )
            self._tell(self._on_error, wrapped)
        else:
            self._tell(self._on_done, written, job.blocked_s)
        finally:
            self._job = None

    @staticmethod
    def _tell(callback: Callable[..., None], *result: Any) -> None:
        try:
            callback(*result)
        except Exception:
            log.exception("the callback for a checkpoint failed")
