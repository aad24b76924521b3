"""What the PyTorch frontend knows of errors."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.torch import frontend as frontends
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.worker.context import Context
from tests.paths import LIMIT_S

DATA = TensorDataset(torch.zeros(8))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontends, "_READER_ENDS_S", LIMIT_S)


@pytest.fixture
def unheard_children() -> Iterator[None]:
    """Processes may end without PyTorch's handler of SIGCHLD, which would raise its own error."""
    for _ in DataLoader(DATA, num_workers=1):  # sets the handler, once in a process
        pass
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, handler)


def kill_once_asked(reading: Any) -> int:
    """Kill a process whose next batch is there, after it was asked for the batch's memory."""
    assert reading._worker_result_queue._reader.poll(60)
    pid: int = reading._workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    return pid


def check_is_told_of(error: BaseException, pid: int) -> None:
    frontend = TorchFrontend()
    assert (
        frontend.killed_reader(error)
        == f"DataLoader worker (pid {pid}) is killed by signal: Killed"
    )
    assert frontend.killed_reader(type(error)(*error.args)) == "", "which came from no loader"


FETCH_ERRORS = (OSError, EOFError, RuntimeError)


def test_a_killed_reader_of_the_loader_is_told_of_whatever_its_batch_raises(
    alone: Context, unheard_children: None
) -> None:
    alone.worker.in_train = True
    loader: hvd.DataLoader[Any] = hvd.DataLoader(DATA, 1, num_workers=1)
    reading = iter(loader)
    next(reading)
    pid = kill_once_asked(loader._plain._batches)
    with pytest.raises(FETCH_ERRORS) as caught:
        next(reading)
    check_is_told_of(caught.value, pid)


def test_a_killed_reader_of_another_loader_is_told_of(unheard_children: None) -> None:
    reading = iter(DataLoader(DATA, num_workers=1))
    next(reading)
    pid = kill_once_asked(reading)
    with pytest.raises(FETCH_ERRORS) as caught:
        next(reading)
    check_is_told_of(caught.value, pid)


def test_an_error_of_the_data_set_waits_for_no_end_of_a_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: Any) -> Any:
        raise ValueError("not these")

    reading = iter(DataLoader(DATA, num_workers=1, collate_fn=refuse))
    with pytest.raises(ValueError, match="not these") as caught:
        next(reading)
    monkeypatch.setattr(frontends, "wait", pytest.fail)
    assert TorchFrontend().killed_reader(caught.value) == ""
