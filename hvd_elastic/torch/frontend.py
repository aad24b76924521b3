"""The frontend for PyTorch."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.checkpoint import load_checkpoint
from hvd_elastic.torch.collectives import TorchCollectives, to_gather, to_reduce
from hvd_elastic.torch.elastic import training
from hvd_elastic.torch.export import exported
from hvd_elastic.torch.inference import TorchInference
from hvd_elastic.torch.saving import write_object
from hvd_elastic.worker.frontend import Frontend
from hvd_elastic.worker.generators import Generator

_KILLED = "DataLoader worker (pid {}) is killed by signal: Killed"
"""What PyTorch says of a process of a loader that was killed."""
_KILLED_READER = re.compile(re.escape(_KILLED).replace(r"\{\}", r"\d+"))
_READER_ENDS_S = 1.0
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
            for frame, _ in traceback.walk_tb(cause.__traceback__):
                reading = frame.f_locals.get("self")
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
    training = staticmethod(training)
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
