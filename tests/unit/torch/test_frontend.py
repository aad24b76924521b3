"""What the PyTorch frontend knows of errors."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hvd_elastic.torch.frontend import TorchFrontend


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset"), EOFError()])
def test_a_batch_that_a_killed_reader_had_sent_tells_of_it(error: Exception) -> None:
    frontend = TorchFrontend()
    assert frontend.killed_reader(error) == ""
    reading: Any = iter(DataLoader(TensorDataset(torch.zeros(8)), num_workers=1))
    next(reading)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # whose handler would raise it here
    try:
        os.kill(reading._workers[0].pid, signal.SIGKILL)
        assert frontend.killed_reader(error).startswith("DataLoader worker (pid")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
