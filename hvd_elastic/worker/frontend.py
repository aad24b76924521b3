"""The protocols that a frontend (PyTorch, TensorFlow) implements for its framework.

Beside those of this module a frontend implements:

- :class:`hvd_elastic.communicator.interface.Collectives`: Horovod's collectives on its tensors;
- :class:`hvd_elastic.checkpoint.stream.Content`: what a checkpoint holds, as named buffers;
- :class:`hvd_elastic.worker.planning.samples.Samples`: gradient statistics of a step;
- ``NewEvent`` of :mod:`hvd_elastic.worker.planning.compute_times`: marks on the device's clock;
- ``Read`` of :mod:`hvd_elastic.input.data_order`: reads examples by index into a batch.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvd_elastic.checkpoint.stream import Content
from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.communicator.interface import Collectives, Communicator, RingRank
from hvd_elastic.errors import ScriptError
from hvd_elastic.worker.generators import Generator
from hvd_elastic.worker.inference import Inference
from hvd_elastic.worker.progress import Progress


class Frontend(Protocol):
    """Functions and names of a framework that the training context needs.

    Attributes:
        module: name of the module that a script imports, for messages.
        horovod: name of Horovod's module for the framework.
        loader: name of our loader, for messages.
        other_loader: name of the framework's loader that ours replaces.
        takes_step: call by which a script takes an optimizer's step, for messages.
    """

    module: str
    horovod: str
    loader: str
    other_loader: str
    takes_step: str = "optimizer.step()"

    def collectives(self) -> Collectives:
        """Return Horovod's collectives on the framework's tensors."""

    def generators(self) -> dict[str, Generator]:
        """Return the framework's global generators of random numbers, by name."""
        return {}

    def plain(self, value: Any) -> Any:
        """Return a number from the script, which may be a tensor, as a Python number."""

    def element(self, name: str, value: Any) -> Any:
        """Return a tensor's one element as a float64 on its device; None: it is no tensor.

        Raises:
            ScriptError: it has more elements, or is no number; ``name`` it is added under.
        """

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Return the content of a checkpoint, as :meth:`State.load` takes it."""

    def failed_collective(self, error: BaseException) -> BaseException | None:
        """Return what to raise for an error of a collective in a graph; None: it is another."""
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether a pass did not fit into memory, and is to be called off."""
        return False

    def killed_reader(self, error: BaseException) -> str:
        """Return what an error says of a process of the loader that was killed; "": nothing."""
        return ""

    def free_memory(self) -> None:
        """Free what a pass that did not fit has left in memory."""
        gc.collect()

    def training(
        self, state: Any, warmup: Callable[[], object] | None
    ) -> AbstractContextManager[None]:
        """Return a context in which the training function runs.

        Args:
            state: the script's State; its optimizers are chosen to train.
            warmup: see :func:`hvd_elastic.script.run.run`.

        Raises:
            ScriptError: the State does not fit the optimizers that the script has made.
        """

    def script_tensor(
        self, kind: str, tensor: Any, name: str, *, average: bool = False
    ) -> tuple[Any, Callable[[Any], Any]]:
        """Return what the collective ``hvd.<kind>(tensor, name)`` takes; it may overwrite it.

        Also return a function that turns its result into that of the script.
        """

    def inference(
        self, model: Any, dataset: Any, called: str, num_workers: int, collate_fn: Any
    ) -> Inference:
        """Return a model and a dataset for ``hvd.evaluate`` and ``hvd.predict``."""

    def write_object(self, name: str, obj: Any, file: HashingWriter) -> None:
        """Write an object that the script saves under a name; see ``hvd.save``."""

    def profiler(self) -> Any:
        """Return a profiler with ``start``, ``stop`` and ``export_chrome_trace``.

        Raises:
            ScriptError: the framework has none.
        """
        raise ScriptError(
            "hvd-elastic run --profile records with PyTorch's profiler, and this script uses "
            f"{self.module}: leave --profile out, and see docs/debugging.md"
        )

    def exported(self, model: Any, example: Any, name: str) -> Callable[[Path], Any]:
        """Return a function for :func:`hvd_elastic.script.export.export`.

        It exports the model in a folder, compares its outputs with those of the model
        (:func:`~hvd_elastic.script.export.compare_outputs`), and returns the file's content.

        Raises:
            ScriptError: the name has another ending than those of the framework.
        """


def require_number(name: str, tensor: Any, *, is_number: bool) -> None:
    """Raise ScriptError if a tensor that the script adds to an Accumulator is no number."""
    if not is_number:
        raise ScriptError(
            f"Accumulator.add({name}=...): a tensor of shape {tuple(tensor.shape)} and type "
            f"{tensor.dtype} is no number; give its sum"
        )


class Averager(ABC):
    """Averages the gradients of one optimizer of the script: what every framework has of it.

    Attributes:
        steps: number of steps that have ended on this rank, taken or left out.
        several_steps: whether it may take several steps in a loop body.
        number: number of the optimizer among those that train, from 0, the same on all ranks.
        retired: why another optimizer trains; empty: this one does.
    """

    steps: int = 0
    several_steps: bool = False
    number: int = 0
    retired: str = ""

    @property
    @abstractmethod
    def idle(self) -> str:
        """Return the call that the script leaves out, so that no step has trained; empty: none."""

    @abstractmethod
    def learning_rate(self) -> float:
        """Return the learning rate of the first parameter group."""

    @abstractmethod
    def adapt(self) -> None:
        """Begin to sample gradients for the planner and to scale the learning rate as it asks."""

    def shared_with(self, other: Any) -> str:
        """Return the name of a parameter that ``other`` averages too, or "", if that is known."""
        return ""

    def engage(self, number: int) -> None:
        """Average the gradients of the optimizer's steps from now on; see :attr:`number`."""
        self.number, self.retired = number, ""

    def retire(self, reason: str) -> None:
        """Stop averaging; a later ``step()`` raises ScriptError with the reason."""
        self.retired = reason

    @abstractmethod
    def restore(self) -> None:
        """Undo the steps since :meth:`drop_copy`, if the optimizer was copied before them."""

    @abstractmethod
    def drop_copy(self) -> None:
        """Drop the copy of parameters and optimizer state, which its next step takes again."""

    @abstractmethod
    def forget(self) -> None:
        """Forget a step that ended without ``step()``; called when the next one begins."""

    @abstractmethod
    def check_not_begun(self, call: str) -> None:
        """Raise ScriptError if gradients of the present pass are weighted already.

        Args:
            call: what the script calls too late.
        """

    @abstractmethod
    def leave_out(self) -> None:
        """Tell the other ranks that this one has ended a loop body without an optimizer step.

        Raises:
            ScriptError: only some ranks leave the step out; names them.
        """

    @abstractmethod
    def reset(self) -> None:
        """Drop a step that failed half way, with its gradients."""


class EagerAverager(Averager):
    """One of a framework that computes while the script runs, gradient after gradient.

    Attributes:
        local: whether a step of training is a period of steps that each rank takes alone.
    """

    local: bool = False

    @property
    @abstractmethod
    def flags_meet(self) -> str:
        """Name of a gradient reduction of each step, if gradients carry the step's flags; or "".

        Flags that are exchanged at the end of an epoch are sent under this name, so that they meet
        the gradients of a rank that is still in a step.
        """

    def pass_begins(self) -> None:
        """Note that the script is given a batch, or the next pass of one."""
        return

    @abstractmethod
    def weight_sums(self) -> list[tuple[str, int]]:
        """Return for each trained parameter its name, and a number that other weights change."""

    @abstractmethod
    def absorb(self) -> None:
        """Add up the gradients of a pass that is followed by others in the same step."""

    @abstractmethod
    def give_up(self) -> None:
        """Call the step off: complete the collectives that other ranks wait for, and drop it."""


class GraphAverager(Averager):
    """One of a framework that runs a graph for each step, which calls back once it has ended."""

    @abstractmethod
    def prepare(self) -> None:
        """Set what a graph depends on before the script runs it: weight and number of ranks."""

    @abstractmethod
    def collect(self, *, collectives: bool = True) -> None:
        """Count the step that a graph has taken, if it has.

        Args:
            collectives: whether the other ranks do so too, at the same place.
        """


class Schedule(NamedTuple):
    """A learning-rate schedule that counts calls.

    Attributes:
        calls: number of calls so far.
        described: its type and length, for messages.
    """

    calls: int
    described: str


class State(Protocol):
    """State that a run must not lose: model, optimizer and the script's own values."""

    def keep(self, name: str, item: Any) -> None:
        """Add an object of the library to the values; the name starts with ``_``."""

    def take_snapshot(self, *, tensors: bool = False) -> Any:
        """Return a copy of the state without parameters and optimizer state.

        Its ``differences(later)`` returns the names of values that differ in a later snapshot.

        Args:
            tensors: copy also what is needed at the end of an epoch only.
        """

    def save_values(self, snapshot: Any = None, *, tensors: bool = False) -> None:
        """Set the snapshot that :meth:`roll_back` restores; None takes one now.

        Args:
            snapshot: an earlier one.
            tensors: without ``snapshot``, copy also buffers and modules that no optimizer trains,
                on their device.
        """

    def step_begins(self) -> None:
        """Raise ScriptError if a change of the loop body before the step could not be undone."""

    def roll_back(self) -> None:
        """Restore the snapshot of the last :meth:`save_values`."""

    def keep_moving(self) -> None:
        """Keep what forward passes change in models, such as the statistics of batches."""

    def undo_moving(self) -> None:
        """Set that back to the last :meth:`keep_moving`: the step is left out."""

    def module_attributes(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """Yield the name of each module, of modules in others too, and its attributes."""
        return ()

    def module_versions(self) -> int:
        """Return a number that grows whenever a tensor of a module is changed in place."""

    def schedules(self) -> Mapping[str, Schedule]:
        """Return the schedules that count calls instead of following progress, by name."""

    def trained_sums(self, signs: np.ndarray, number: int | None) -> TrainedSums:
        """Return sums over the model's parameters, used to compare ranks.

        Args:
            signs: random signs, one for each number that is summed of a parameter.
            number: number of the check, which selects parameters and parts of them; None: all.
        """

    def sync(
        self,
        communicator: Communicator,
        root_rank: RingRank,
        progress: Progress,
        has_state: Callable[[Progress], bool],
    ) -> Progress:
        """Copy the root's state to every rank; return the root's progress.

        Args:
            communicator: the communicator of all ranks.
            root_rank: number in its ring of the one whose state is copied.
            progress: progress of this rank.
            has_state: called with the root's progress before live tensors are overwritten; returns
                whether this rank already holds the whole state at that progress.
        """

    def load(self, payload: dict[str, Any], path: str) -> Progress:
        """Load the content of a checkpoint and return its progress; ``path`` is for messages.

        Raises:
            CheckpointError: it does not fit this script.
        """

    def content(self, *, copy_own: bool) -> Content:
        """Return all of the present state; ``copy_own``: copy the parts that differ by rank."""

    def lasting(self) -> set[int]:
        """Return the addresses of tensors that change only in an optimizer's step."""

    def waits_before_step(self) -> bool:
        """Return whether every optimizer waits for checkpoints to be copied before its step."""


class TrainedSums(NamedTuple):
    """Sums over some parameters in float64, one row for each parameter.

    Attributes:
        names: names of the parameters.
        sums: shape (parameters, 2): sum with random signs, and sum of squares.
        epsilons: machine epsilons of the parameters' types.
        known: number of all parameters.
    """

    names: list[str]
    sums: np.ndarray
    epsilons: np.ndarray
    known: int
