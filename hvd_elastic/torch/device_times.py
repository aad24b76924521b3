"""Creates CUDA events, which measure the compute time of a GPU."""

from __future__ import annotations

import torch

from hvd_elastic.worker.planning.compute_times import DeviceEvent


def cuda_event() -> DeviceEvent | None:
    """Return a new CUDA event with timing; None if PyTorch has not used a GPU."""
    if not torch.cuda.is_initialized():
        return None
    event: DeviceEvent = torch.cuda.Event(enable_timing=True)
    return event
