"""The run's rank and the ring's, where they differ: a ring of three of a run's six workers."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import hvd_elastic
import hvd_elastic.torch as hvd
from hvd_elastic.communicator.interface import FIRST
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.model.sharding import step_slice
from hvd_elastic.torch.state import State
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.worker import RunRank, Worker

RANK, SIZE = RunRank(2), 6


class OfThree(LocalCommunicator):
    rank, size = FIRST, 3


@pytest.fixture
def split(alone: Context, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(Worker, "rank", RANK)
    monkeypatch.setattr(Worker, "size", SIZE)
    alone.worker.communicator = OfThree()
    return alone


def test_scripts_and_data_follow_the_run(split: Context) -> None:
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    loader: hvd.DataLoader[list[torch.Tensor]] = hvd.DataLoader(TensorDataset(torch.arange(24)), 12)
    assert len(loader) == 2
    next(iter(hvd.epochs(1)))
    (read,) = next(iter(loader))
    share = step_slice(0, 24, 12, RANK, SIZE, 1)
    assert read.tolist() == [*range(share.start, share.stop)] == [4, 5]


def test_each_rank_sees_in_which_step_an_epoch_ends(split: Context) -> None:
    """Not in that whose share ends with it: local steps meet there on all ranks."""
    loader: hvd.DataLoader[list[torch.Tensor]] = hvd.DataLoader(TensorDataset(torch.arange(24)), 12)
    next(iter(hvd.epochs(1)))
    assert [split.step.passes[-1].ends_epoch for _ in loader] == [False, True]


def test_checkpoints_and_files_are_named_and_written_by_the_run(
    split: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the first process of each ring."""
    split.worker.state = State(weights=torch.zeros(3))
    assert split.checkpoints._share()[1] is None, "without a leader rank 0 of the run writes all"
    asked: list[object] = []
    monkeypatch.setattr(split.checkpoints, "_spool", tmp_path)
    monkeypatch.setattr(
        "hvd_elastic.worker.checkpointing.new_shard",
        lambda *args, world: asked.append((*args[2:4], world)),
    )
    split.checkpoints._share()
    assert asked == [(RANK, SIZE, SIZE)]
    monkeypatch.setattr(Worker, "keep_file", lambda *_: pytest.fail("rank 0 writes it"))
    monkeypatch.setattr(Worker, "warn", lambda *_: pytest.fail("rank 0 says it"))
    hvd.save("weights.pt", torch.zeros(3))
    split.worker.warn_once("all see it")


def test_gradients_are_averaged_over_the_ring(split: Context) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [-1.0] * 3, "a third of each of three that are alike"


def test_the_rings_rank_is_read_where_its_collectives_are() -> None:
    package = Path(hvd_elastic.__file__).parent
    reading = re.compile(r"\b_?(communicator|ring)\.rank\b")
    readers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if reading.search(path.read_text())
    }
    assert readers == {
        "script/model_loading.py",
        "script/state.py",
        "torch/adaptive_rates.py",
        "transformers/trainer.py",
        "worker/worker.py",
    }, "elsewhere it is worker.rank, that of the run"
