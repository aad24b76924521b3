"""The protocols that a frontend (PyTorch, TensorFlow) implements for its framework.

Beside those of this module a frontend implements:

- :class:`hvd_elastic.communicator.interface.Collectives`: Horovod's collectives on its tensors;
- :class:`hvd_elastic.checkpoint.stream.Content`: what a checkpoint holds, as named buffers;
- ``Statistics`` of :mod:`hvd_elastic.training.planning.adaptive`: gradient statistics of a step;
- ``NewEvent`` of :mod:`hvd_elastic.training.planning.compute_times`: marks on the device's clock;
- ``Read`` of :mod:`hvd_elastic.training.data_order`: reads examples by index into a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvd_elastic.checkpoint.stream import Content
from hvd_elastic.communicator.interface import Collectives, Communicator
from hvd_elastic.training.progress import Progress

__all__ = ["Averager", "Frontend", "Schedule", "State", "TrainedSums"]


class Frontend(Protocol):
    """What the training context needs of a framework.

    Attributes:
        module: that a script imports, for messages.
        horovod: name of Horovod's module for the framework.
        loader: our loader's name, for messages.
        other_loader: name of the one that it replaces.
    """

    module: str
    horovod: str
    loader: str
    other_loader: str

    def collectives(self) -> Collectives:
        """Return Horovod's collectives on the framework's tensors."""

    def plain(self, value: Any) -> Any:
        """Return a number of the script's, which may be a tensor, as one of Python's."""

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Return what :meth:`State.load` takes."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error says that a pass did not fit into memory."""

    def free_memory(self) -> None:
        """Give back what such a pass has left allocated."""


class Averager(Protocol):
    """Averages the gradients of the script's optimizer.

    Attributes:
        steps: that have ended here, taken or left out.
    """

    steps: int

    def learning_rate(self) -> float:
        """Return that of the first parameter group."""

    def adapt(self) -> None:
        """From now on sample gradients for the planner and scale the learning rate as it says."""

    def retire(self) -> None:
        """Another optimizer takes the steps from now on."""

    def forget(self) -> None:
        """A step begins; the one before may have ended without ``step()``."""

    def absorb(self) -> None:
        """A pass is over and others follow in the step: add its gradients up."""

    def leave_out(self, *, over: bool) -> None:
        """Tell the others that this rank takes no step for the batch in flight.

        Args:
            over: the loop body has ended, so no step follows gradients that are there.

        Raises:
            ScriptError: not all ranks do; names those that do.
        """

    def give_up(self) -> None:
        """Call the step off: finish with the others what they wait for, and forget it."""

    def reset(self) -> None:
        """Forget a step that failed half way, its gradients included."""


class Schedule(NamedTuple):
    """A learning-rate schedule that counts calls.

    Attributes:
        calls: so far.
        described: its kind and length, for messages.
    """

    calls: int
    described: str


class State(Protocol):
    """What a run must not lose: model, optimizer and the script's own values."""

    def keep(self, name: str, item: Any) -> None:
        """Treat something of the library's as one of the values; the name starts with ``_``."""

    def take_snapshot(self, *, tensors: bool = False) -> Any:
        """Return what the state holds, except parameters and optimizer state.

        Its ``differences(later)`` are the names of values that another snapshot has otherwise.

        Args:
            tensors: with what only the end of an epoch needs.
        """

    def save_values(self, snapshot: Any = None) -> None:
        """Make a snapshot, by default one of now, the point that :meth:`roll_back` goes to."""

    def roll_back(self) -> None:
        """Go back to the last :meth:`save_values`."""

    def module_versions(self) -> int:
        """Return a number that grows whenever a tensor of a module is changed in place."""

    def schedules(self) -> Mapping[str, Schedule]:
        """Return the schedules that do not follow progress, by name."""

    def trained_sums(self, signs: np.ndarray, number: int | None) -> TrainedSums:
        """Return sums over the model's parameters, by which ranks are compared.

        Args:
            signs: random ones, for as many numbers as are added up of each parameter.
            number: of the check: each looks at other parts of other parameters; None: at all.
        """

    def sync(
        self,
        communicator: Communicator,
        root_rank: int,
        progress: Progress,
        has_state: Callable[[Progress], bool],
    ) -> Progress:
        """Take the root's state on every rank; return the root's progress.

        Args:
            communicator: the ranks.
            root_rank: whose state.
            progress: where this rank stands.
            has_state: told the root's progress before live tensors are touched; whether this
                rank holds the whole state of that progress already.
        """

    def load(self, payload: dict[str, Any], path: str) -> Progress:
        """Take what a checkpoint holds; ``path`` is for messages.

        Raises:
            CheckpointError: it does not fit this script.
        """

    def content(self, *, copy_own: bool) -> Content:
        """Return everything as it is now; ``copy_own``: copy what ranks may differ in."""

    def lasting(self) -> set[int]:
        """Return the addresses of what changes in the step of an optimizer and at no other time."""

    def waits_before_step(self) -> bool:
        """Return whether every optimizer waits for checkpoints to be copied before its step."""


class TrainedSums(NamedTuple):
    """Sums over some parameters, float64, one row for each.

    Attributes:
        names: of the parameters.
        sums: of shape (parameters, 2): of the numbers with random signs, and of their squares.
        epsilons: of their types.
        known: number of all parameters.
    """

    names: list[str]
    sums: np.ndarray
    epsilons: np.ndarray
    known: int
