"""What this process is in a run: launcher, communicator, progress and where it reports to."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NewType

import numpy as np

from hvd_elastic.checkpoint.saved import (
    SAVED_FOLDER,
    drop_spooled,
    find_spooled,
    spool_file,
    store_file,
)
from hvd_elastic.checkpoint.whole_files import Write
from hvd_elastic.communicator.interface import Communicator, GenerationBrokenError, RingRank
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.communicator.ring import HorovodCommunicator
from hvd_elastic.control.progress import Activity, Position
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.run_events import TrainingStopped, Warned
from hvd_elastic.wire import messages as msg
from hvd_elastic.worker.agent_link import AgentLink, worker_options
from hvd_elastic.worker.averagers import Averagers
from hvd_elastic.worker.checks.data_digest import DataDigest
from hvd_elastic.worker.debugging.uncaught import script_line
from hvd_elastic.worker.frontend import Frontend, State
from hvd_elastic.worker.generators import Generators
from hvd_elastic.worker.input_times import InputTimes
from hvd_elastic.worker.launch import Mode, not_finite_choice
from hvd_elastic.worker.message_sink import Sink, open_sink
from hvd_elastic.worker.progress import Progress

log = logging.getLogger(__name__)

RunRank = NewType("RunRank", int)
"""Rank of a worker in its run, as scripts and messages have it; see :attr:`Worker.rank`."""

_LONG_S = 2.0
"""Duration of a step or a wait from which heartbeats carry the script's line, which is read from
the stack."""


@dataclass
class DataSets:
    """Data sets of the script's loaders.

    Attributes:
        examples: number of examples in the one that is trained on, for messages.
        digests: what is compared of each, in order.
    """

    examples: int = 0
    digests: list[DataDigest] = field(default_factory=list)

    def described(self) -> str:
        """Return what is compared of the datasets; see :attr:`Progress.data`."""
        return json.dumps([digest.described() for digest in self.digests])


@dataclass
class Saves:
    """Files that the script has saved in this process.

    Attributes:
        again: those of the time since an epoch has ended, by name, with what writes them; None:
            the script itself saves them again after a failure.
    """

    names: set[str] = field(default_factory=set)
    again: dict[str, Write] | None = None


@dataclass
class StepClock:
    """Times of the steps of this process.

    Attributes:
        began: when the step in flight began [s, monotonic]; None: no step is in flight.
        longest_s: duration of the longest step [s].
        agreed_at: when the ranks agreed last, at the end of a step or as the generation began [s,
            monotonic].
        longest_period_s: longest time between two such moments [s]; of LocalOptimizer a period.
    """

    began: float | None = None
    longest_s: float = 0.0
    agreed_at: float = 0.0
    longest_period_s: float = 0.0


class Worker:
    """State that all parts of a training process share.

    Args:
        mode: how the process was launched.
        frontend: framework of the script.

    Attributes:
        communicator: communicator of the current generation.
        generation: number of the current generation.
        life: term of the leader, which distinguishes generations of different leaders.
        link: link to the agent; None without one.
        options: options that the leader sets for all workers.
        sink: receiver of this worker's messages.
        on_not_finite: what is done about a step whose gradients are not finite: ``skip``, ``stop``
            or ``ignore``.
        input_times: how long this rank waits for its data.
        progress: progress of training, equal on all ranks between two steps.
        stop_reason: why this rank asks for the end of training; empty: it does not.
        left_epoch: where the script left an epoch early, for messages; empty: nowhere.
        data_sets: datasets of the script's loaders.
        generators: global generators of random numbers.
        in_train: whether the training function runs.
        saves: files that the script has saved.
        state: the script's state; None before it is created.
        averagers: averagers of the script's optimizers.
        step_clock: times of the steps of this process.
    """

    def __init__(self, mode: Mode, frontend: Frontend) -> None:
        self.mode = mode
        self.frontend = frontend
        self.generation = 0
        self.life = ""
        self.progress = Progress()
        self.input_times = InputTimes()
        self.stop_reason = ""
        self.left_epoch = ""
        self.data_sets = DataSets()
        self.generators = Generators(frontend.generators())
        self.in_train = False
        self.saves = Saves()
        self.state: State | None = None
        self.averagers = Averagers()
        self.step_clock = StepClock()
        self.communicator: Communicator = (
            LocalCommunicator()
            if mode is Mode.ALONE
            else HorovodCommunicator(frontend.collectives())
        )
        self.link: AgentLink | None = None
        self.options = msg.WorkerOptions()
        if mode is Mode.AGENT:
            self.link = AgentLink.from_environment(self._on_abort, self.activity)
            self.options = worker_options()
        self.sink: Sink = open_sink(self.link)
        self.on_not_finite = self.options.on_not_finite
        if mode is not Mode.AGENT:
            self.on_not_finite = not_finite_choice(os.environ)

    @cached_property
    def audit(self) -> bool:
        """Return whether the indices that are read are reported."""
        return self.options.audit or self.sink.audit

    @property
    def reads(self) -> bool:
        """Return whether this process reads for the ranks of other hosts and does not train."""
        return self.mode is Mode.AGENT and os.environ.get("HVD_ELASTIC_READS") == "1"

    @property
    def elastic(self) -> bool:
        """Return whether the training function may be entered again after a failure."""
        return self.mode in (Mode.AGENT, Mode.HOROVOD_ELASTIC)

    @property
    def rank(self) -> RunRank:
        """Rank of this process in the run: it chooses data, names shards and speaks for all.

        The ring has all workers of the run, in the order of their ranks. This property and
        :meth:`in_ring` are all that takes it to.
        """
        return RunRank(self.communicator.rank)

    @property
    def size(self) -> int:
        """Number of workers of the run that train."""
        return self.communicator.size

    def in_ring(self, rank: RunRank) -> RingRank:
        """Return the number in the ring of a rank of the run."""
        return RingRank(rank)

    @property
    def has_ranks(self) -> bool:
        """Return whether this worker has a rank yet."""
        return self.mode is not Mode.AGENT or self.generation > 0

    def check_has_ranks(self, what: str) -> None:
        """Raise ScriptError if the script asks for ``what`` before the ranks are known."""
        if not self.has_ranks:
            raise ScriptError(
                f"{what} is not known yet: this worker is warm and waits to be told its rank. "
                f"Ask for it, and train, inside the function given to {self.frontend.module}.run; "
                "local_rank() and device() are known before."
            )

    @property
    def position(self) -> Position:
        """Progress of training, for messages."""
        return Position(**self.progress.as_dict())

    def keep_file(self, name: str, write: Write) -> None:
        """Write a file where the leader fetches it; a later one of that name replaces it.

        Args:
            name: valid name of the file.
            write: writes the content to the file it is given.

        Raises:
            CheckpointError: it cannot be written on this host; an earlier one is untouched.
        """
        began = time.monotonic()

        def describe(size: int, sha256: str) -> msg.SavedFile:
            return msg.SavedFile(
                name=name,
                bytes=size,
                sha256=sha256,
                step=self.progress.step,
                epoch=self.progress.epoch,
                host=os.environ.get("HVD_ELASTIC_HOST") or socket.gethostname(),
                generation=self.generation,
                life=self.life,
                number=time.monotonic_ns(),
                created=time.time(),
            )

        try:
            if self.link is None:
                folder = Path(self.sink.saved_folder)
                saved = store_file(folder, write, describe)
            else:
                folder = Path(os.environ["HVD_ELASTIC_SPOOL"]) / SAVED_FOLDER
                saved = spool_file(folder, write, describe)
        except CheckpointError as error:
            raise CheckpointError(f"hvd.save({name!r}) has not saved the file: {error}") from error
        path = str(folder / name)
        self.sink.send(msg.FileSaved(saved, path, time.monotonic() - began))
        if self.link is not None:
            for other in find_spooled(folder):
                if other.name == name and other != saved:
                    drop_spooled(folder, other)

    def warn(self, message: str) -> None:
        """Record a warning and show it on the terminal; training continues."""
        self.sink.send(Warned(message))
        if self.link is None:  # else the leader shows it
            log.warning("%s", message)

    def warn_once(self, message: str, of: str = "") -> None:
        """Warn of a problem that all ranks see, on rank 0 only, and there once.

        Args:
            of: what tells the problem from others; by default the message.
        """
        if self.rank == 0 and (of or message) not in self._warned_of:
            self._warned_of.add(of or message)
            self.warn(message)

    @cached_property
    def _warned_of(self) -> set[str]:
        return set()

    @property
    def wants_stop(self) -> bool:
        """Return whether this rank asks for the end of training, and the ranks have not agreed."""
        return bool(self.stop_reason) and not self.progress.stopped

    def agree_on_stop(self, step: int) -> None:
        """End training after ``step`` on all ranks: a collective, called once any rank asks for it.

        The lowest rank that asks gives the reason.
        """
        own = np.frombuffer(f"{self.stop_reason}\n".encode(), np.uint8).copy()
        gathered = self.communicator.gather(own, "hvd_elastic.stop").tobytes().decode()
        rank, reason = next((r, each) for r, each in enumerate(gathered.split("\n")) if each)
        self.progress.stopped = True
        if self.rank == 0:
            self.sink.send(TrainingStopped(step, rank, reason))
            if self.link is None:  # else the leader shows it
                text = "training ends after step %d, as rank %d has asked: %s"
                log.warning(text, step, rank, reason)

    def script_failed(self, text: str) -> bool:
        """Report the exception that ends the script; return whether it could be sent."""
        for name in self.saves.names:
            if f"No such file or directory: {name!r}" in text:
                how = f"hvd.load_model({name!r}, model, share=True)"
                text = f"{text.rstrip()} (hvd.save keeps it in the run folder: {how} loads it)\n"
        try:
            self.sink.send(msg.ScriptRaised(text, self.position))
        except OSError:  # the agent is gone
            return False
        return True

    @property
    def wants_change(self) -> bool:
        """Return whether the leader has asked this worker to leave its present generation."""
        return self.link is not None and self.link.pending(self.generation)

    @property
    def is_to_leave(self) -> bool:
        """Return whether the leader has told this worker to leave the run."""
        return self.link is not None and self.link.is_to_leave

    def refuse_aborted(self) -> None:
        """Raise GenerationBrokenError if the leader called this generation off."""
        if self.link is not None and self.link.aborted(self.generation):
            raise GenerationBrokenError("the leader called this generation off")

    def _on_abort(self, generation: int) -> None:
        if generation >= self.generation:
            self.communicator.abort()

    def activity(self) -> Activity:
        """Return what this worker is doing at present, for the heartbeat."""
        communicator = self.communicator
        now = time.monotonic()
        began, waiting = self.step_clock.began, communicator.waiting_since
        step_s = 0.0 if began is None else now - began
        waiting_s = 0.0 if waiting is None else now - waiting
        brief = Activity(
            generation=self.generation,
            step=self.progress.step,
            step_s=round(step_s, 3),
            waiting_s=round(waiting_s, 3),
            waited_s=round(communicator.waited_s + waiting_s, 3),
            longest_step_s=round(self.step_clock.longest_s, 3),
            longest_period_s=round(self.step_clock.longest_period_s, 3),
            longest_wait_s=round(communicator.longest_wait_s, 3),
            line=script_line() if max(step_s, waiting_s) >= _LONG_S else "",
            reading=self.input_times.reading(),
        )
        if waiting_s >= _LONG_S:
            detailed = dataclasses.replace(
                brief,
                waiting_for=communicator.waiting_for,
                begun=communicator.begun(),
                progress=self.position,
            )
            if communicator.waiting_since == waiting:  # else the details are of a later wait
                return detailed
        return brief
