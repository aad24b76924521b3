"""The module that a PyTorch training script imports.

Outline of a script::

    import hvd_elastic.torch as hvd

    hvd.init()
    model = Net().to(hvd.device())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = hvd.DataLoader(dataset, batch_size=64, shuffle=True)

    @hvd.run
    def train(state):
        for epoch in hvd.epochs(10):
            for inputs, targets in loader:
                ...
                state.commit(loss=loss)

    train(hvd.State(model=model, optimizer=optimizer))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hvd_elastic.frameworks import check_torch, refuse_triton_after_tensorflow
from hvd_elastic.script.accumulator import Accumulator
from hvd_elastic.script.collectives import allgather, allreduce
from hvd_elastic.script.evaluation import evaluate
from hvd_elastic.script.export import export
from hvd_elastic.script.horovod_names import missing_name
from hvd_elastic.script.prediction import predict
from hvd_elastic.script.ranks import local_rank, rank, report, size
from hvd_elastic.script.run import epochs, run, steps, stop
from hvd_elastic.script.saving import save
from hvd_elastic.script.step_weight import step_weight
from hvd_elastic.torch.compression import Compression
from hvd_elastic.torch.data import DataLoader
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.torch.grad_scaler import GradScaler
from hvd_elastic.torch.local_optimizer import LocalOptimizer
from hvd_elastic.torch.optimizer import DistributedOptimizer
from hvd_elastic.torch.saving import load_model
from hvd_elastic.torch.schedule import follow_progress
from hvd_elastic.torch.state import State
from hvd_elastic.worker import context as _context
from hvd_elastic.worker.debugging.uncaught import tell_uncaught

__all__ = [
    "Accumulator",
    "Compression",
    "DataLoader",
    "DistributedOptimizer",
    "GradScaler",
    "LocalOptimizer",
    "State",
    "allgather",
    "allreduce",
    "device",
    "epochs",
    "evaluate",
    "export",
    "follow_progress",
    "init",
    "load_model",
    "local_rank",
    "predict",
    "rank",
    "report",
    "run",
    "save",
    "size",
    "step_weight",
    "steps",
    "stop",
]

check_torch(torch.__version__)
refuse_triton_after_tensorflow()
tell_uncaught()  # before init() too: a script of torchrun may fail at once

if not TYPE_CHECKING:  # else mypy would take any name for one of this module
    __getattr__ = missing_name(__name__)


def init(*, own_data: bool = False) -> None:
    """Initialise the library for the launcher of this process. Call it first.

    Args:
        own_data: the training data does not come from hvd.DataLoader, and this is meant: each
            rank reads its own, or all of it. Without it that causes a warning.
    """
    worker = _context.initialize(TorchFrontend(), own_data=own_data).worker
    if torch.cuda.is_available():
        worker.communicator.check_device(local_rank(), torch.cuda.device_count())
        torch.cuda.set_device(device())


def device() -> torch.device:
    """Return the GPU of this slot, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank() % torch.cuda.device_count())
