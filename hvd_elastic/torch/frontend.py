"""The frontend for PyTorch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.checkpoint import load_checkpoint
from hvd_elastic.torch.collectives import TorchCollectives, to_gather, to_reduce
from hvd_elastic.torch.elastic import training
from hvd_elastic.torch.export import exported
from hvd_elastic.torch.inference import TorchInference
from hvd_elastic.torch.saving import write_object
from hvd_elastic.training.frontend import Frontend
from hvd_elastic.training.generators import Generator

_KILLED_READER = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: Killed")


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
        """See :meth:`Frontend.killed_reader`; PyTorch may raise another error from it.

        A batch that it has sent cannot be fetched any more: that is an error of the connection.
        """
        cause: BaseException | None = error
        if isinstance(error, (OSError, EOFError)):
            cause = _failed_reader() or error
        while cause is not None:
            found = isinstance(cause, RuntimeError) and _KILLED_READER.search(str(cause))
            if found:
                return found[0]
            cause = cause.__cause__
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

    training = staticmethod(training)
    inference = staticmethod(TorchInference)
    load_checkpoint = staticmethod(load_checkpoint)
    write_object = staticmethod(write_object)
    exported = staticmethod(exported)


class _TorchGenerator:
    """A generator of a device; see :class:`hvd_elastic.training.generators.Generator`."""

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


def _failed_reader() -> RuntimeError | None:
    """Return PyTorch's error about a process of a loader that has failed; None: there is none."""
    end = time.monotonic() + _READER_ENDS_S
    while time.monotonic() < end:
        try:
            torch._C._error_if_any_worker_fails()
            time.sleep(0.02)  # PyTorch's handler of signals may raise it here
        except RuntimeError as error:
            return error
    return None
