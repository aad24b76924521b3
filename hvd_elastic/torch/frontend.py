"""The frontend for PyTorch."""

from __future__ import annotations

import contextlib
import re
import signal
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import count
from hvd_elastic.script.instances import instances_of
from hvd_elastic.torch.checkpoint import load_checkpoint
from hvd_elastic.torch.collectives import TorchCollectives, to_gather, to_reduce
from hvd_elastic.torch.inference import TorchInference, exported
from hvd_elastic.torch.optimizer import GradientAverager, averager_of
from hvd_elastic.torch.saving import write_object
from hvd_elastic.torch.schedule import held_by
from hvd_elastic.torch.state import State
from hvd_elastic.torch.summed_losses import summed_losses_are_added
from hvd_elastic.worker import context
from hvd_elastic.worker.debugging.uncaught import script_line
from hvd_elastic.worker.frontend import Averager, Frontend, require_number
from hvd_elastic.worker.generators import Generator
from hvd_elastic.worker.worker import Worker

_KILLED = "DataLoader worker (pid {}) is killed by signal: Killed"
"""What PyTorch says of a process of a loader that was killed."""
_KILLED_READER = re.compile(re.escape(_KILLED).replace(r"\{\}", r"\d+"))
_READER_ENDS_S = 10.0
"""Time in which a process of the loader ends after its connections."""


class TorchFrontend(Frontend):
    """The part of PyTorch that the training context needs."""

    module = "hvd_elastic.torch"
    horovod = "torch"
    loader = "hvd_elastic.torch.DataLoader"
    other_loader = "torch.utils.data.DataLoader"

    def collectives(self) -> TorchCollectives:
        return TorchCollectives()

    def generators(self) -> dict[str, Generator]:
        found: dict[str, Generator] = {"torch": _TorchGenerator(lambda: torch.default_generator)}
        if torch.cuda.is_available():
            found["cuda"] = _TorchGenerator(
                lambda: torch.cuda.default_generators[torch.cuda.current_device()]
            )
        return found

    def plain(self, value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) else value

    def element(self, name: str, value: Any) -> torch.Tensor | None:
        if not isinstance(value, torch.Tensor):
            return None
        require_number(name, value, is_number=value.numel() == 1 and not value.is_complex())
        return value.detach().reshape(()).double()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error means out of memory; on the CPU PyTorch has no type for it."""
        return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or (
            isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
        )

    def killed_reader(self, error: BaseException) -> str:
        """See :meth:`Frontend.killed_reader`.

        PyTorch raises an error of its own if it hears of the death first. A batch that the process
        had sent, and whose memory cannot be fetched any more, raises any other.
        """
        cause: BaseException | None = error
        processes: dict[int, BaseProcess] = {}
        while cause is not None:
            found = isinstance(cause, RuntimeError) and _KILLED_READER.search(str(cause))
            if found:
                return found[0]
            objects = [f.f_locals.get("self") for f, _ in traceback.walk_tb(cause.__traceback__)]
            # An error that a process has sent itself, such as one of the data set, is no sign of
            # its end, and not to be held up.
            if not any(isinstance(each, ExceptionWrapper) for each in objects):
                for reading in objects:
                    if isinstance(reading, _MultiProcessingDataLoaderIter):
                        started = getattr(reading, "_workers", ())
                        processes |= {each.sentinel: each for each in started}
            cause = cause.__cause__ or cause.__context__
        ended = wait([*processes], _READER_ENDS_S) if processes else ()
        for process in (each for sentinel, each in processes.items() if sentinel in ended):
            process.join()  # the kernel closes the sentinel a moment before the process has ended
            if process.exitcode == -signal.SIGKILL:
                return _KILLED.format(process.pid)
        return ""

    def free_memory(self) -> None:
        super().free_memory()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def training(self, state: State, warmup: Callable[[], object] | None) -> Iterator[None]:
        ctx = context.current()
        ctx.choose_averagers(_averagers_of(ctx.worker, state))
        if warmup is not None:
            warmup()
        watched = register_optimizer_step_pre_hook(_OptimizerWatch(ctx.worker, state))
        try:
            with summed_losses_are_added(ctx):
                yield
        finally:
            watched.remove()

    def script_tensor(
        self, kind: str, tensor: Any, name: str, *, average: bool = False
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        try:
            value = torch.as_tensor(tensor).detach()  # a number, such as loss.item(), is one too
        except (RuntimeError, TypeError, ValueError):
            raise ScriptError(
                f"hvd.{kind}(..., {name!r}) takes a tensor or a number, not a "
                f"{type(tensor).__name__}"
            ) from None
        return to_gather(value) if kind == "allgather" else to_reduce(value, average=average)

    profiler = staticmethod(torch.profiler.profile)
    inference = staticmethod(TorchInference)
    load_checkpoint = staticmethod(load_checkpoint)
    write_object = staticmethod(write_object)
    exported = staticmethod(exported)


class _TorchGenerator:
    """A generator of a device; see :class:`hvd_elastic.worker.generators.Generator`."""

    def __init__(self, of_device: Callable[[], torch.Generator]) -> None:
        self._of_device = of_device

    def copy(self) -> tuple[int, torch.Tensor]:
        generator = self._of_device()
        return generator.initial_seed(), generator.get_state()

    def set(self, state: tuple[int, torch.Tensor]) -> None:
        self._of_device().set_state(state[1])

    def dump(self) -> bytes:
        return self.copy()[1].numpy().tobytes()

    def load(self, data: bytes) -> None:
        self._of_device().set_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def is_later(self, state: tuple[int, torch.Tensor]) -> bool:
        return self._of_device().initial_seed() == state[0]


_BOTH = "Give it model and optimizer: hvd.State(model=model, optimizer=optimizer)"


def _averagers_of(worker: Worker, state: State) -> list[Averager]:
    """Return the averagers of the State's optimizers, or the only one if it has none.

    Raises:
        ScriptError: the gradients of an optimizer are not averaged over the ranks, the State lacks
            one of its parameters, two optimizers have a parameter in common, or there are several
            and none is in the State.
    """
    found: dict[str, GradientAverager] = {}
    storages = state.storages()
    for name, optimizer in state.named_optimizers().items():
        if name.startswith("_"):  # the outer one of hvd.LocalOptimizer
            continue
        averager, kind = averager_of(optimizer), type(optimizer).__name__
        if averager is None:
            raise ScriptError(
                f"State({name}=...): this {kind} was not given to "
                "hvd_elastic.torch.DistributedOptimizer, so its gradients are not averaged, and "
                f"the ranks would go apart; write {name} = hvd.DistributedOptimizer({name}, model)"
            )
        for other, earlier in found.items():
            shared = earlier.shared_with(averager)
            if shared:
                raise ScriptError(
                    f"State({other}=..., {name}=...): both optimizers have the parameter "
                    f"{shared!r}, and a parameter has one: the two would change it against each "
                    "other. Leave it out of one of them"
                )
        _check_is_held(
            averager,
            storages,
            f"State({name}=...): this {kind}",
            "Put the module, or the tensor itself, there: hvd.State(..., log_alpha=log_alpha)",
        )
        found[name] = averager
    if not found and worker.averagers.several:
        raise ScriptError(
            f"{len(worker.averagers)} optimizers were given to DistributedOptimizer(...), and none "
            "is in the State, so a worker that joins would not have their state; put them there: "
            "hvd.State(model=..., optimizer=..., second_optimizer=...)"
        )
    if not found:
        kept = {id(each) for item in state.named_objects().values() for each in held_by(item)}
        for each in worker.averagers:
            if isinstance(each, GradientAverager):
                each.check_is_kept(kept)
                _check_is_held(each, storages, "State(...): the optimizer", _BOTH)
    return list(found.values() or worker.averagers)


def _check_is_held(averager: GradientAverager, storages: set[int], which: str, way: str) -> None:
    """Raise ScriptError if the State lacks a parameter of an optimizer; ``way`` says what to do."""
    unknown = averager.first_not_in(storages)
    if unknown:
        raise ScriptError(
            f"{which} trains {unknown}, which is in no module or value of the State, so a worker "
            f"that joins would begin with a value of its own. {way}"
        )


class _OptimizerWatch:
    """Finds optimizers that take steps in training and whose gradients are not averaged.

    One that is there before the training function, or that trains what is in the State, is an
    error. One that a loop body makes for values of its own, such as an adversarial example, is
    warned of once.
    """

    def __init__(self, worker: Worker, state: State) -> None:
        self._worker = worker
        self._state = state
        self._early = weakref.WeakSet(instances_of(torch.optim.Optimizer))
        self._told: set[str] = set()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise ScriptError, or warn once of each kind; called before each step."""
        worker, kind = self._worker, type(optimizer).__name__
        averagers: Any = worker.averagers
        if averager_of(optimizer) or any(averager.stepping for averager in averagers):
            return
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        storages = self._state.storages()
        lasts = optimizer in self._early or any(
            each.untyped_storage().data_ptr() in storages for each in parameters if each.numel()
        )
        if not lasts and (worker.communicator.size == 1 or kind in self._told):
            return
        self._told.add(kind)
        shape = f", the first of shape {tuple(parameters[0].shape)}" if parameters else ""
        problem = (
            f"the {kind} that takes a step at {script_line()} was not given to "
            "hvd.DistributedOptimizer and is not in the State: gradients of its "
            f"{count(len(parameters), 'parameter')}{shape}, are not averaged, so every rank trains "
            "values of its own, and rank 0's are no better than the others'. Give it to "
            "hvd.DistributedOptimizer(...), and put it into the State"
        )
        if worker.audit or lasts:
            raise ScriptError(problem)
        worker.warn_once(problem)
