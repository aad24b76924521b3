"""Events in the work of a GPU, by which its times are measured."""

from __future__ import annotations

import torch

from hvd_elastic.training.planning.compute_times import DeviceEvent

__all__ = ["cuda_event"]


def cuda_event() -> DeviceEvent | None:
    """Return an event for the GPU; None where PyTorch has not used one."""
    if not torch.cuda.is_initialized():
        return None
    event: DeviceEvent = torch.cuda.Event(enable_timing=True)
    return event
