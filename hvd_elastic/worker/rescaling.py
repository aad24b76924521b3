"""Takes a training process from one generation of ranks to the next."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from hvd_elastic.run_events import Restored
from hvd_elastic.wire import messages as msg
from hvd_elastic.worker.checkpointing import Checkpointing
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.metrics import Metrics
from hvd_elastic.worker.progress import Progress
from hvd_elastic.worker.rollback import Rollback
from hvd_elastic.worker.state_parts import StateParts
from hvd_elastic.worker.step import Step
from hvd_elastic.worker.worker import RunRank, Worker


class WorkerLeaves(SystemExit):  # ends the script well, as sys.exit() does
    """The leader needs this worker no more, which ends its script before the others'."""


class Rescaling:
    """This process as a member of one generation after the other.

    Args:
        step: step in flight.
        rollback: undoes what the script changed when a step fails.
        checkpoints: takes this process's checkpoints.
        metrics: collects and sends the run's metrics.
        state_parts: objects of the library that are part of the script's state.

    Attributes:
        change_agreed: whether the ranks have agreed to leave the generation at the next step
            boundary.
    """

    def __init__(
        self,
        worker: Worker,
        step: Step,
        rollback: Rollback,
        checkpoints: Checkpointing,
        metrics: Metrics,
        state_parts: StateParts,
    ) -> None:
        self._worker = worker
        self._step = step
        self._rollback = rollback
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._state_parts = state_parts
        self.change_agreed = False
        self._is_whole = False
        """Whether all of the state belongs to one step; False while it is being received."""

    def rescale(self) -> None:
        """Leave the current generation and join the next one, in this process.

        Raises:
            GenerationBrokenError: the next generation could not be formed.
            WorkerLeaves: this worker is not part of the next generation; ends the script.
        """
        self.change_agreed = False
        self.prepare_change()
        self._checkpoints.settle()
        self._worker.communicator.stop()
        self.follow()

    def prepare_change(self) -> None:
        """Save, before a planned change of the world, what only a leaving rank may hold."""
        self._state_parts.prepare_change()
        self._rollback.save()

    def follow(self) -> None:
        """Carry out the leader's instructions until this worker has joined a generation."""
        worker = self._worker
        assert worker.link is not None
        worker.step_clock.began = None
        while True:
            instruction = worker.link.wait(worker.generation)
            if instruction is None:
                worker.link.take_checkpoint_request()
                if self._is_whole:
                    self._checkpoints.take_checkpoint(wait=True, alone=True)
                self._checkpoints.answer()
                continue
            match instruction:
                case msg.Leave():
                    self._checkpoints.close()
                    raise WorkerLeaves(0)
                case msg.Hold():
                    newness, step = self._rollback.newness, self._whole_step
                    worker.sink.send(
                        msg.Held(generation=worker.generation, step=step, state=newness)
                    )
                case msg.Join(announcement=announcement, env=env):
                    self._join(announcement, env)
                    return

    def _join(self, announcement: msg.Announcement, env: Mapping[str, str]) -> None:
        worker = self._worker
        first = worker.generation == 0
        worker.generation, worker.life = announcement.generation, announcement.life
        self.change_agreed = False
        self._step.forget()
        worker.refuse_aborted()
        worker.communicator.start(env)
        worker.refuse_aborted()
        is_root = worker.rank == announcement.root_rank
        if is_root and announcement.restore:
            self.restore_checkpoint(announcement.restore, announcement.checkpoint)
        self.synchronize_state(RunRank(announcement.root_rank))
        self._is_whole = True
        self._metrics.world_begins(first=first, announces_pause=is_root)
        self._checkpoints.schedule()
        step, stopped = self._whole_step, worker.progress.stopped
        worker.sink.send(msg.Joined(generation=worker.generation, step=step, stopped=stopped))

    def synchronize_state(self, root: RunRank) -> None:
        """Copy the root's state and progress to every rank."""
        worker = self._worker
        assert worker.state is not None
        worker.averagers.reset()  # a newcomer has no gradients, which show what is trained
        is_root = worker.rank == root
        if is_root and (worker.progress.position == 0 or not worker.progress.data):
            worker.progress.data = worker.data_sets.described()
        worker.progress = worker.state.sync(
            worker.communicator, worker.in_ring(root), worker.progress, self._has_state
        )
        self._rollback.synchronized()

    def _has_state(self, theirs: Progress) -> bool:
        # While it is being received the state belongs to no one step, unless both are the same.
        same = theirs == self._worker.progress and not self._rollback.partial
        self._is_whole = self._is_whole and same
        return self._is_whole

    def start_alone(self) -> None:
        """Begin a generation without a leader."""
        self._worker.generation += 1
        self._checkpoints.schedule()

    def ranks_changed(self) -> None:
        """Use the new communicator that Horovod's own elastic driver has created."""
        self._checkpoints.settle()
        self._worker.communicator.refresh()
        self.start_alone()

    def report_broken(self, error: BaseException) -> None:
        """Report the progress of this rank, which has left its generation after a failure."""
        worker = self._worker
        worker.sink.send(
            msg.Broken(
                generation=worker.generation,
                step=self._whole_step,
                state=self._rollback.newness,
                error=str(error),
                progress=worker.position if self._is_whole else None,
            )
        )

    @property
    def _whole_step(self) -> int:
        """Number of steps that the state has taken; -1 where it is not whole."""
        return self._worker.progress.step if self._is_whole else -1

    def restore_checkpoint(self, path: str, copy_of: str | None = None) -> None:
        """Load the state from a checkpoint and report it; ``copy_of``: the path users know."""
        worker = self._worker
        assert worker.state is not None
        worker.progress = worker.state.load(worker.frontend.load_checkpoint(path), copy_of or path)
        if worker.mode is Mode.AGENT:  # the agent put a copy into the spool for this load only
            shutil.rmtree(Path(path).parent, ignore_errors=True)
        worker.sink.send(Restored(**asdict(worker.position), path=path))
