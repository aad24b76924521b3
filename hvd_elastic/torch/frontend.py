"""The frontend for PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from hvd_elastic.torch.checkpoint import load_checkpoint
from hvd_elastic.torch.collectives import TorchCollectives


class TorchFrontend:
    """Implements :class:`hvd_elastic.training.frontend.Frontend` for PyTorch."""

    module = "hvd_elastic.torch"
    horovod = "torch"
    loader = "hvd_elastic.torch.DataLoader"
    other_loader = "torch.utils.data.DataLoader"

    def collectives(self) -> TorchCollectives:
        """Return Horovod's collectives on tensors."""
        return TorchCollectives()

    def plain(self, value: Any) -> Any:
        """Return a number; reading a tensor waits for its device."""
        return value.item() if isinstance(value, torch.Tensor) else value

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """See :func:`~hvd_elastic.torch.checkpoint.load_checkpoint`."""
        return load_checkpoint(path)

    def failed_collective(self, error: BaseException) -> None:
        """Return None: PyTorch runs no collective of ours in a graph."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error means out of memory; on the CPU PyTorch has no type for it."""
        return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or (
            isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
        )

    def free_memory(self) -> None:
        """Empty PyTorch's cache of GPU memory."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
