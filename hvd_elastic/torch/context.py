"""Where one training process stands: its ranks, its progress, and what the leader wants of it.

The same script runs four ways, told apart by the environment that the launcher left:

=====================  ==================================================================
``python``             one process, no Horovod needed
``horovodrun -np``     static ranks (also under ``mpirun``)
``horovodrun`` elastic Horovod's own elastic driver changes the ranks
``hvd-elastic run``    generations announced by the leader, through the agent
=====================  ==================================================================
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hvd_elastic.communicator.interface import Communicator, GenerationBrokenError
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.communicator.ring import HorovodCommunicator
from hvd_elastic.control.progress import Activity, Position
from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import count, plural
from hvd_elastic.torch.checkpoint import load_checkpoint
from hvd_elastic.torch.checkpointing import Checkpointing
from hvd_elastic.torch.collectives import TorchCollectives
from hvd_elastic.torch.replica_check import check_replicas
from hvd_elastic.torch.rollback import Rollback
from hvd_elastic.training.progress import InFlight, Progress
from hvd_elastic.training.sink import Sink, open_sink
from hvd_elastic.training.uncaught import NOT_THE_SCRIPT, tell_uncaught
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.link import AgentLink, worker_options

if TYPE_CHECKING:
    from hvd_elastic.torch.adaptation import Adaptation
    from hvd_elastic.torch.optimizer import GradientAverager
    from hvd_elastic.torch.rebalancing import Rebalancing
    from hvd_elastic.torch.state import State
    from hvd_elastic.training.planning.compute_times import ComputeTimes

__all__ = ["Context", "Left", "Mode", "current", "initialize"]

log = logging.getLogger(__name__)

_METRICS_INTERVAL_S = 0.25
_LONG_S = 2.0
"""A step or a wait of this length is told with the line of the script that it is at."""
_PLACE_TOLERANCE = 1e-3
"""Variance of the place's hash: more than the rounding of its averages in float32 (4e-4), and less
than what one rank of 1000 changes."""
_REMEMBERED_STEPS = 4096  # far more than are made until the leader has recorded them


class Mode(Enum):
    """Who decides about the ranks of this process."""

    ALONE = "python"
    STATIC = "horovodrun"
    HOROVOD_ELASTIC = "horovodrun elastic"
    AGENT = "hvd-elastic"


class Left(SystemExit):
    """This worker was asked to leave: unwinds the script and ends the process with status 0."""

    def __init__(self) -> None:
        super().__init__(0)


def detect_mode(environment: Mapping[str, str]) -> Mode:
    """How this process was launched.

    >>> detect_mode({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}).value
    'horovodrun'
    """
    if "HVD_ELASTIC_AGENT" in environment:
        return Mode.AGENT
    if environment.get("HOROVOD_ELASTIC") == "1":
        return Mode.HOROVOD_ELASTIC
    if "HOROVOD_RANK" in environment or int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return Mode.STATIC
    return Mode.ALONE


class Context:
    """One process's part in a training run; made by :func:`initialize`."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.progress = Progress()
        self.generation = 0
        self.life = ""
        """Tells the generations that one leader counts from those of another."""
        alone = mode is Mode.ALONE
        self.engine: Communicator = (
            LocalCommunicator() if alone else HorovodCommunicator(TorchCollectives())
        )
        self._step_began: float | None = None
        self._longest_step_s = 0.0
        self.link: AgentLink | None = None
        if mode is Mode.AGENT:
            self.link = AgentLink.from_environment(self._on_abort, self._activity)
        self.options = worker_options() if mode is Mode.AGENT else msg.WorkerOptions()
        self.sink: Sink = open_sink(self.link)
        self.audit = self.options.audit or self.sink.audit
        self.in_train = False
        self.check_host_updates: Callable[[], None] = lambda: None
        """Set for Horovod's own elastic driver: raises when the ranks are about to change."""
        self.adaptation: Adaptation | None = None
        """Chooses the batch; None where the script leaves it as it is."""
        self.rebalancing: Rebalancing | None = None
        """Chooses the shares of a batch that stays as it is; None: they are equal."""
        self.voided = False
        """Whether the step in flight counts for nothing, since it did not fit into some memory."""
        self._void = False
        self._left_out = False
        self._left_epoch = ""
        self._kept: dict[str, Any] = {}
        self._before_change: dict[str, Callable[[], None]] = {}
        self._state: State | None = None
        self._averager: GradientAverager | None = None
        self._has_loader = False
        self._other_optimizers: set[str] = set()
        self._in_flight: list[InFlight] = []
        self._marked = True
        self._exchanged = False
        self._uncommitted = False
        self._flag: tuple[Any, torch.Tensor] | None = None
        self._change_agreed = False
        self._read: list[int] = []
        self._whole = False
        self._used: collections.deque[msg.Used] = collections.deque(maxlen=_REMEMBERED_STEPS)
        self._metrics: dict[str, Any] = {}
        self._metrics_due = 0.0
        self._window = (time.monotonic(), 0)
        self._last_step: float | None = None
        self._rescaled_from: float | None = None
        self._announce_pause = False
        self.rollback = Rollback(self)
        self._checkpoints = Checkpointing(self)
        self._started = time.monotonic()
        if mode is Mode.STATIC or mode is Mode.HOROVOD_ELASTIC:
            self.engine.start({})

    @property
    def elastic(self) -> bool:
        """Whether the training function may be entered again after a failure."""
        return self.mode in (Mode.AGENT, Mode.HOROVOD_ELASTIC)

    # -- ranks -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank; known inside the training function."""
        self._need_ranks("rank()")
        return self.engine.rank

    @property
    def size(self) -> int:
        """World size; known inside the training function."""
        self._need_ranks("size()")
        return self.engine.size

    @property
    def waited_s(self) -> float:
        """For other ranks, since this process began [s]."""
        return self.engine.waited_s

    @property
    def local_rank(self) -> int:
        """The slot of this process on its host: it never changes while the process lives."""
        for name in ("HVD_ELASTIC_LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
            if name in os.environ:
                return int(os.environ[name])
        return 0

    def _need_ranks(self, what: str) -> None:
        if self.mode is Mode.AGENT and self.generation == 0:
            raise ScriptError(
                f"{what} is not known yet: this worker is warm and waits to be told its rank. "
                "Ask for it, and train, inside the function given to hvd_elastic.torch.run; "
                "local_rank() and device() are known before."
            )

    def refuse_outside(self) -> None:
        """The script reads training data: is it in its training function?

        Raises:
            ScriptError: it is outside, before the ranks are known.
        """
        if self.mode is Mode.AGENT and self.generation == 0:
            raise ScriptError(
                "the loader is iterated outside of a training function, where this worker has no "
                "rank yet. Put the loop into a function under @hvd.run, `def train(state): ...`, "
                "and call it: train(hvd.State(model=model, optimizer=optimizer))"
            )

    # -- registration ----------------------------------------------------------------------

    def register_state(self, state: State) -> None:
        """The state to synchronise; a script has one."""
        self._state = state
        for name, item in self._kept.items():
            state.keep(name, item)

    def keep(self, name: str, item: Any, before_change: Callable[[], None] | None = None) -> None:
        """Make something of the library's last as long as the script's state does.

        Args:
            name: equal on all ranks and in all lives of the run.
            item: has ``state_dict()`` and ``load_state_dict()`` of plain values.
            before_change: called on all ranks before a planned change of the world.
        """
        self._kept[name] = item
        if before_change is not None:
            self._before_change[name] = before_change
        if self._state is not None:
            self._state.keep(name, item)

    def keeps(self, name: str) -> bool:
        """Whether there is something of the library's under this name."""
        return name in self._kept

    def register_averager(self, averager: GradientAverager) -> None:
        """The optimizer whose steps count, instead of that of before."""
        if self._averager is not None:
            self._averager.retire()
        self._averager = averager
        self._adapt()

    @property
    def averager(self) -> GradientAverager | None:
        """What averages the gradients of the script's optimizer; None before there is one."""
        return self._averager

    def register_loader(self, loader: Any) -> None:
        """Its batches are the steps; the audit is told the size of its data set."""
        self._has_loader = True
        if self.audit:
            dropped = len(loader.dataset) % loader.batch_size if loader.drop_last else 0
            self.sink.send(msg.Dataset(len(loader.dataset), dropped))
        if loader.adaptation is not None:
            self.adaptation = loader.adaptation
            self.keep("_adaptation", loader.adaptation)
            self._adapt()
        if loader.rebalancing is not None:
            # No part of the state: every world begins with a review, which tells all of it.
            self.rebalancing = loader.rebalancing

    @property
    def own_times(self) -> ComputeTimes | None:
        """Times this rank's own work; None where nobody asks for it."""
        planner = self.adaptation or self.rebalancing
        return None if planner is None else planner.own_times

    def _adapt(self) -> None:
        if self.adaptation is not None and self._averager is not None:
            self._averager.adapt(self.adaptation)

    # -- steps -----------------------------------------------------------------------------

    def hand_out(self, batch: InFlight) -> None:
        """A batch, or the next pass of one, goes to the script now."""
        if self.accumulating:
            self._in_flight.append(batch)
            return
        self._end_uncommitted(time.monotonic())
        self._in_flight = [batch]
        self._marked = False
        self._exchanged = False
        self.voided = False
        if self._averager is not None:
            self._averager.forget()

    @property
    def accumulating(self) -> bool:
        """Whether more passes follow in the step in flight."""
        return not self._marked and bool(self._in_flight) and self._in_flight[-1].accumulating

    @property
    def step_examples(self) -> int:
        """Examples of the step in flight over all ranks; 0 without a loader of ours."""
        return self._in_flight[-1].step_examples if self._in_flight else 0

    @property
    def passes(self) -> int:
        """Passes of the step in flight handed out on this rank so far."""
        return len(self._in_flight)

    def pass_ends(self) -> None:
        """The loop body came back for the next pass of the step in flight."""
        if self._averager is not None and not self._marked:
            self._averager.absorb()

    def batch_weight(self) -> float:
        """Factor on this rank's mean gradient, for the batch in flight."""
        return self._in_flight[-1].weight if self._in_flight else 1.0

    def begin_exchange(self) -> None:
        """Begin telling the others where this rank is and whether a change is wanted; once a step.

        The numbers travel with the gradients, so that all ranks learn in the same step that
        somebody has heard of a change, and act on it at the same step boundary. The place in the
        training data travels as a hash and its square: their averages show to all ranks alike
        whether the ranks are in different places.
        """
        if self._exchanged or self._flag is not None:
            return
        adaptive = self.adaptation is not None
        if self.engine.size > 1 and (self.mode is Mode.AGENT or adaptive):
            heard = self.link is not None and self.link.pending(self.generation)
            place = float(self.progress.place_hash()) if self._in_flight else 0.0
            wishes = [1.0 if heard else 0.0, place, place * place, *self._checkpoints.wishes()]
            if adaptive:
                wishes += [float(self._void), float(self._left_out)]
            flag = torch.tensor(wishes)
            self._flag = (self.engine.reduce_async(flag, "hvd_elastic.change"), flag)

    def exchange(self) -> None:
        """Finish what :meth:`begin_exchange` began; once a step."""
        if self._exchanged:
            return
        if self.engine.size == 1:
            self._refuse_aborted()  # no collective fails that would tell of it
        self.begin_exchange()
        if self.audit and self._in_flight:
            self._gather_read()
        if self._flag is not None:
            handle, _ = self._flag
            self._flag = None
            change, place, square, *wishes = self.engine.wait(handle).tolist()
            if square - place * place > _PLACE_TOLERANCE:
                self._refuse_places()
            left_out = 0
            if self.adaptation is not None:
                left_out = round(wishes.pop() * self.engine.size)
                self.voided = wishes.pop() > 0
            if 0 < left_out < self.engine.size and not self.voided:
                self.refuse_left_out()
            self._change_agreed |= change > 0
            self._checkpoints.agree(wishes)
        else:
            self._change_agreed |= self.link is not None and self.link.pending(self.generation)
            self._checkpoints.agree(self._checkpoints.wishes())
            self.voided = self._void
        self._exchanged = True
        if self.voided and self.adaptation is not None:
            self._marked = True  # nothing of it counts, and all ranks do it again
            self.adaptation.want_review()
        check_replicas(self)

    def _refuse_places(self) -> None:
        """The ranks have found that they read from different places: all of them call this.

        Raises:
            ScriptError: always; names where each rank is, and where it left an epoch early.
        """
        where = f"in epoch {self.progress.epoch} at example {self.progress.position}"
        own = torch.tensor(list(f"{where}|{self._left_epoch}\n".encode()), dtype=torch.uint8)
        told = bytes(self.engine.gather(own, "hvd_elastic.places").tolist()).decode().splitlines()
        places: dict[str, list[str]] = {}
        for rank, line in enumerate(told):
            place, left = line.split("|", 1)
            places.setdefault(place + (f" ({left})" if left else ""), []).append(str(rank))
        each = "; ".join(
            f"{plural('rank', len(ranks))} {', '.join(ranks)} {place}"
            for place, ranks in places.items()
        )
        raise ScriptError(
            f"the ranks are in different places of the training data in step "
            f"{self.progress.step + 1}: {each}. A step would average gradients of different "
            "epochs, and examples would be read twice or not at all. Leave the loop over the "
            "loader on all ranks at the same step: by a condition that is the same on all of "
            "them, such as one on hvd.allreduce(loss, ...)"
        )

    def refuse_left_out(self) -> None:
        """The ranks have found that they do not make the same step: all of them call this.

        Raises:
            ScriptError: some leave it out and others do not; names them.
        """
        # The others may be one step further already.
        own = torch.tensor([self.progress.step + 1 if self._left_out else 0])
        told = self.engine.gather(own, "hvd_elastic.left_out").tolist()
        ranks = [str(rank) for rank, left_out in enumerate(told) if left_out]
        if ranks:
            raise ScriptError(
                f"step {max(told)} was left out on {plural('rank', len(ranks))} "
                f"{', '.join(ranks)} alone, of {len(told)}: the loop body went on to the next "
                "batch without optimizer.step(), and from then on ranks would hold different "
                "weights. Take every step on all ranks; where the batch adapts, and with "
                "hvd.GradScaler, one with gradients that are not finite is left out on all of "
                "them by itself. Else have all decide alike, by hvd.allreduce"
            )

    def _gather_read(self) -> None:
        # Padding is marked by its sign: it was read, and counted with weight 0.
        indices = [
            -1 - i if batch.padding else i for batch in self._in_flight for i in batch.indices or []
        ]
        own = torch.tensor(indices, dtype=torch.int64)
        self._read = self.engine.gather(own, "hvd_elastic.audit").tolist()

    def step_done(self) -> None:
        """The optimizer took its step: what was in flight is consumed."""
        now = time.monotonic()
        if self._marked:
            if not self._in_flight and self.in_train:
                self._step_without_loader(now)
            return
        self._marked = True
        epoch, position = self.progress.epoch, self.progress.position
        batch = self._in_flight[-1]
        self.progress.advance(batch.step_examples)
        if self.audit:
            record = msg.Used(
                generation=self.generation,
                step=self.progress.step,
                epoch=epoch,
                position=position,
                indices=[i for i in self._read if i >= 0],
                padding=[-1 - i for i in self._read if i < 0],
            )
            while self._used and self.link and self._used[0].step <= self.link.recorded_step:
                self._used.popleft()
            self._used.append(record)
            if self.engine.rank == 0:
                self.sink.send(record)
        self._step_finished(now)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer of any kind took a step in training: is it one whose gradients are averaged?

        Raises:
            ScriptError: it is another one, and the run is audited.
        """
        averager, kind = self._averager, type(optimizer).__name__
        if self.engine.size == 1 or kind in self._other_optimizers:
            return
        if averager is not None and (averager.stepping or averager.owns(optimizer)):
            return
        self._other_optimizers.add(kind)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        shape = f", the first of shape {tuple(parameters[0].shape)}" if parameters else ""
        problem = (
            f"the {kind} that takes a step at {_script_line()} was not given to "
            "hvd.DistributedOptimizer and is not in the State: gradients of its "
            f"{count(len(parameters), 'parameter')}{shape}, are not averaged, so every rank trains "
            "values of its own, and those of rank 0 are no better than the others. Train them with "
            "the one DistributedOptimizer, in a parameter group of their own; scripts with several "
            "optimizers (GANs, actor-critic) are not supported yet"
        )
        if self.audit:
            raise ScriptError(problem)
        if self.engine.rank == 0:
            self.warn(problem)

    def _step_without_loader(self, now: float) -> None:
        """The optimizer took a step with examples that our loader did not hand out.

        Raises:
            ScriptError: the run is audited, and nobody knows what was read.
        """
        if self.progress.step == 0 and not self._uncommitted and self.mode is not Mode.ALONE:
            what = (
                "optimizer.step() was called for a batch that does not come from "
                "hvd_elastic.torch.DataLoader"
            )
            remedy = (
                "Read the training data with hvd_elastic.torch.DataLoader(dataset, batch_size, "
                "shuffle=True) in place of torch.utils.data.DataLoader, with the batch size of all "
                "ranks together and without a DistributedSampler"
            )
            if self.audit:
                raise ScriptError(f"{what}, so no audit (--audit) can be made. {remedy}")
            if self.engine.rank == 0:
                self.warn(
                    f"{what}: examples are not shared out among the ranks, every rank trains on "
                    "what its own loader gives it; a worker that joins or is replaced begins with "
                    "the first batch of its own; and hosts join or leave only where the script "
                    f"calls state.commit(). {remedy}"
                )
        self._end_uncommitted(now)
        self._uncommitted = True
        self._exchanged = False

    def _end_uncommitted(self, now: float) -> None:
        """Count a step without our loader that the script did not commit."""
        if self._uncommitted:
            self._uncommitted = False
            self.progress.advance(0)
            self._step_finished(now)

    def function_returned(self) -> None:
        """The training function has returned."""
        self._end_uncommitted(time.monotonic())

    def _step_finished(self, now: float) -> None:
        if self._announce_pause:
            self._announce_pause = False
            pause = None if self._rescaled_from is None else now - self._rescaled_from
            self.sink.send(msg.RescaleFinished(self.generation, self.engine.size, pause))
        self._last_step = now
        if self._step_began is not None:
            self._longest_step_s = max(self._longest_step_s, now - self._step_began)
        self._step_began = now
        self._send_metrics(now)

    def mark_consumed(self) -> None:
        """The loop body came back for more without a step of our optimizer."""
        if self.accumulating:  # the loop was left between two passes: this step was never made
            self.step_failed()
        self._step_left_out(over=True)

    def epoch_left(self) -> None:
        """The script leaves the loop over the loader before the end of the epoch."""
        at = f"epoch {self.progress.epoch} at example {self.progress.position}"
        self._left_epoch = f"it left {at}, {_script_line()}"

    def _step_left_out(self, *, over: bool) -> None:
        """The step in flight ends without our optimizer's; ``over``: the loop body has ended."""
        if self._marked:
            return
        self._left_out = True
        try:
            if over and self.adaptation is not None and self._averager is not None:
                self._averager.synchronize()  # somebody may want to call the step off
            elif self._averager is not None:
                self._averager.leave_out(over=over)
            self.exchange()
        finally:
            self._left_out = False
        # Called off, it does not count.
        if not self._marked:
            self.step_done()

    def commit(self, metrics: Mapping[str, Any]) -> None:
        """See :meth:`State.commit`."""
        self._metrics.update(metrics)
        if self._has_loader and not self._uncommitted:
            if not self.accumulating:
                self._step_left_out(over=False)
            return
        # A script that reads its data itself: this is where its steps end.
        self._uncommitted = False
        self.exchange()
        self.progress.advance(0)
        self._step_finished(time.monotonic())
        self._exchanged = False
        self.rollback.save()
        self.step_boundary()

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Numbers for the run's metrics, sent with the next step's, or at once after training."""
        self._metrics.update(metrics)
        if not self.in_train:
            self._send_metrics(time.monotonic(), force=True)

    def warn(self, message: str) -> None:
        """Something is wrong and training goes on: told in the records, and on the terminal."""
        self.sink.send(msg.WorkerWarning(message))
        if self.link is None:  # else the leader shows it
            log.warning("%s", message)

    def _send_metrics(self, now: float, *, force: bool = False) -> None:
        if self.engine.rank != 0 or (now < self._metrics_due and not force):
            return
        self._metrics_due = now + _METRICS_INTERVAL_S
        since, examples = self._window
        done = self.progress.examples - examples
        own = {*self.progress.as_dict(), "size", "kind"}
        record: dict[str, Any] = {}
        if done > 0 and now > since:
            record["throughput"] = done / (now - since)
        if self._averager is not None:
            record["lr"] = self._averager.learning_rate()
        if self.adaptation is not None:
            record |= self.adaptation.metrics()
            if "throughput" in record and "efficiency" in record:
                record["goodput"] = record["throughput"] * record["efficiency"]
        if self.rebalancing is not None:
            record |= self.rebalancing.metrics()
        for name, value in self._metrics.items():
            if name not in own and name not in record:  # the run is steered by those of its own
                record[name] = value.item() if isinstance(value, torch.Tensor) else value
        self._window = (now, self.progress.examples)
        self.sink.send(msg.Metrics(self._position(), self.engine.size, record))

    def _position(self) -> Position:
        return Position(**self.progress.as_dict())

    # -- step boundaries -------------------------------------------------------------------

    def step_boundary(self) -> None:
        """Between two steps: take checkpoints, and follow the leader to another generation."""
        if self.mode is Mode.HOROVOD_ELASTIC and self.in_train:
            self.check_host_updates()
        if self._change_agreed and self.in_train:
            self.rescale()
        self._checkpoints.step_boundary()
        if self.adaptation is not None:
            self.adaptation.review_if_due(self)
        if self.rebalancing is not None:
            self.rebalancing.review_if_due(self)

    def rescale(self) -> None:
        """Stop the current generation and go over to the next, in place.

        Raises:
            GenerationBrokenError: the next one could not be made.
            Left: this worker is not part of it.
        """
        self._change_agreed = False
        self.prepare_change()
        self.settle()
        self.engine.stop()
        self.follow()

    def prepare_change(self) -> None:
        """The world is about to change as planned: save what a rank that leaves has alone."""
        for _, prepare in sorted(self._before_change.items()):
            prepare()
        self.rollback.save()

    def follow(self) -> None:
        """Wait for the leader's next instruction and carry it out, until in a generation."""
        assert self.link is not None
        assert self._state is not None
        self._step_began = None
        while True:
            instruction = self.link.wait(self.generation)
            if instruction is None:
                self.link.take_checkpoint_request()
                if self._whole:
                    self._checkpoints.take_alone()
                self._checkpoints.answer()
                continue
            match instruction:
                case msg.Leave():
                    self.close()
                    raise Left
                case msg.Hold():
                    newness = self.rollback.newness
                    step = self._whole_step
                    self.sink.send(msg.Held(generation=self.generation, step=step, state=newness))
                case msg.Join(announcement=announcement, env=env):
                    self._join(announcement, env)
                    return

    def _join(self, announcement: msg.Announcement, env: Mapping[str, str]) -> None:
        assert self._state is not None
        first = self.generation == 0
        self.generation, self.life = announcement.generation, announcement.life
        self._change_agreed = False
        self._flag = None
        self._refuse_aborted()
        self.engine.start(env)
        self._refuse_aborted()
        root_rank = announcement.root_rank
        root = self.engine.rank == root_rank
        if root and announcement.restore:
            self.restore_checkpoint(announcement.restore, announcement.checkpoint)
        self.progress = self._state.sync(self.engine, root_rank, self.progress, self._has_state)
        self.rollback.synchronized()
        self._whole = True
        now = self._step_began = time.monotonic()
        self._announce_pause = root
        self._rescaled_from = None if first else self._last_step
        self._window = (now, self.progress.examples)
        self._checkpoints.schedule(now)
        self.sink.send(msg.Joined(generation=self.generation, step=self._whole_step))

    def _has_state(self, theirs: Progress) -> bool:
        # Until the synchronisation is through, the state is a mixture, unless both are the same.
        self._whole = self._whole and theirs == self.progress and not self.rollback.partial
        return self._whole

    def _refuse_aborted(self) -> None:
        if self.link is not None and self.link.aborted(self.generation):
            raise GenerationBrokenError("the leader called this generation off")

    def start_alone(self) -> None:
        """Training begins without a leader."""
        self.generation += 1
        self._checkpoints.schedule(time.monotonic())

    def ranks_changed(self) -> None:
        """Horovod's own driver has made another communicator."""
        self.settle()
        self.engine.refresh()
        self.start_alone()

    def step_failed(self) -> None:
        """Forget the step in flight."""
        if self._uncommitted:  # one that was made, and that a newcomer is told as made
            self._uncommitted = False
            self.progress.advance(0)
        self._marked = True
        self._in_flight = []
        self._flag = None
        self._exchanged = False
        self.voided = False
        self._change_agreed = False
        if self._averager is not None:
            self._averager.reset()

    def out_of_memory(self) -> bool:
        """A pass did not fit into this rank's memory: call the step off on all ranks.

        Returns:
            Whether training can go on, with smaller passes.
        """
        if self.adaptation is None or self._averager is None or self._marked or self._exchanged:
            return False
        if not self.adaptation.out_of_memory(self._in_flight[-1].examples):
            return False
        self._void = True
        try:
            self._averager.give_up()
        finally:
            self._void = False
        return True

    def broken(self, error: BaseException) -> None:
        """A collective failed: leave the generation and say how far this rank is."""
        self.engine.stop(broken=True)
        self.settle()
        self.step_failed()
        self.rollback.fail()
        for record in self._used:
            self.sink.send(record)
        self._checkpoints.broken()
        self.sink.send(
            msg.Broken(
                generation=self.generation,
                step=self._whole_step,
                state=self.rollback.newness,
                error=str(error),
                progress=self._position() if self._whole else None,
            )
        )

    @property
    def _whole_step(self) -> int:
        """Steps that the state has taken; -1 where it is not whole."""
        return self.progress.step if self._whole else -1

    def _activity(self) -> Activity:
        """Return what this worker is doing, for the heartbeat."""
        now = time.monotonic()
        began, waiting = self._step_began, self.engine.waiting_since
        step_s = 0.0 if began is None else now - began
        waiting_s = 0.0 if waiting is None else now - waiting
        said = Activity(
            generation=self.generation,
            step=self.progress.step,
            step_s=round(step_s, 3),
            waiting_s=round(waiting_s, 3),
            longest_step_s=round(self._longest_step_s, 3),
            longest_wait_s=round(self.engine.longest_wait_s, 3),
            line=_script_line() if max(step_s, waiting_s) >= _LONG_S else "",
        )
        if waiting_s >= _LONG_S:
            detailed = dataclasses.replace(
                said,
                waiting_for=self.engine.waiting_for,
                begun=self.engine.begun(),
                progress=self._position(),
            )
            if self.engine.waiting_since == waiting:  # else they are of different moments
                return detailed
        return said

    def _on_abort(self, generation: int) -> None:
        if generation >= self.generation:
            self.engine.abort()

    # -- checkpoints -----------------------------------------------------------------------

    def restore_checkpoint(self, path: str, copy_of: str | None = None) -> None:
        """Take the state from a checkpoint and say so; ``copy_of``: what the user calls it."""
        assert self._state is not None
        self.progress = self._state.load(load_checkpoint(path), copy_of or path)
        if self.mode is Mode.AGENT:  # brought into the spool for this alone
            shutil.rmtree(Path(path).parent, ignore_errors=True)
        self.sink.send(msg.Restored(self._position(), path))

    def settle(self) -> None:
        """Parameters are about to change: wait until what is being checkpointed is copied."""
        self._checkpoints.settle()

    def checkpoint(self, *, wait: bool = False) -> None:
        """Write the state as it is now; all ranks call it at the same step, each writes its share.

        Args:
            wait: until this rank's share is written.
        """
        self._checkpoints.take(wait=wait)

    @property
    def state(self) -> State | None:
        """What is being trained; None before there is one."""
        return self._state

    def script_failed(self, text: str) -> bool:
        """An exception ends the script; whether the leader was told."""
        try:
            self.sink.send(msg.ScriptRaised(text, self._position()))
        except OSError:  # the agent is gone
            return False
        return True

    # -- life ------------------------------------------------------------------------------

    def ready(self) -> None:
        """Tell the leader that this worker is warm."""
        self.engine.warm()
        self.sink.send(msg.Ready(time.monotonic() - self._started))

    def close(self) -> None:
        """Finish what runs in the background."""
        self._checkpoints.close()


def _script_line() -> str:
    """Return where the main thread is in the script, such as "train.py:41 (validate)"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(NOT_THE_SCRIPT):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    return ""


_context: Context | None = None


def initialize() -> Context:
    """The context of this process, made at the first call."""
    global _context
    if _context is None:
        tell_uncaught()
        _context = Context(detect_mode(os.environ))
        if _context.mode is Mode.AGENT:
            tell_uncaught(_context.script_failed)
    return _context


def is_initialized() -> bool:
    """Whether :func:`initialize` was called."""
    return _context is not None


def current() -> Context:
    """The context of this process.

    Raises:
        ScriptError: ``init()`` was not called.
    """
    if _context is None:
        tell_uncaught()
        raise ScriptError("call hvd_elastic.torch.init() first, before anything else of it")
    return _context
