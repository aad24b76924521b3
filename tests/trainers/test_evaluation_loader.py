"""Ranks share the examples of an evaluation, whatever its sampler draws on each of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

pytest.importorskip("lightning", reason="Lightning is not installed: make test-trainers")
pytest.importorskip("transformers", reason="transformers is not installed: make test-trainers")

from hvd_elastic.errors import ScriptError
from hvd_elastic.lightning.loaders import EvaluationLoader
from hvd_elastic.transformers import loaders

DATA: Any = torch.arange(40)
INDICES = [*range(3, 40, 2)]
Shares = Callable[..., list[list[int]]]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(in_train=True, has_ranks=True, size=2, rank=0)
    monkeypatch.setattr("hvd_elastic.worker.context.current", lambda: SimpleNamespace(worker=made))
    return made


@pytest.fixture
def lightning_shares(worker: SimpleNamespace) -> Shares:
    """Return the examples of each of two ranks, whose random numbers differ."""

    def of_ranks(sampler: Any) -> list[list[int]]:
        found = []
        for worker.rank in range(2):
            torch.manual_seed(worker.rank)
            loader: Any = DataLoader(DATA, batch_size=3, sampler=sampler)
            before = torch.get_rng_state()
            evaluated = EvaluationLoader(loader, 1.0)
            assert torch.equal(torch.get_rng_state(), before)
            found.append(torch.cat([*evaluated]).tolist())
        return found

    return of_ranks


def test_each_example_of_a_random_subset_is_validated_once(lightning_shares: Shares) -> None:
    assert sorted(chain(*lightning_shares(SubsetRandomSampler(INDICES)))) == INDICES


def test_ranks_share_one_draw_of_weighted_examples(lightning_shares: Shares) -> None:
    sampler = WeightedRandomSampler(torch.ones(40).tolist(), 40)
    drawn = lightning_shares(sampler)
    assert drawn == lightning_shares(sampler)
    assert drawn[0][-1] <= drawn[1][0]


def test_indices_that_cannot_be_sorted_are_explained(lightning_shares: Shares) -> None:
    with pytest.raises(ScriptError, match=r"is a list whose indices cannot be sorted \('<' not"):
        lightning_shares([3, "4"])


@pytest.mark.parametrize("drawn", ["subset", "batches", "order"])
def test_ranks_of_transformers_evaluate_the_batches_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, worker: SimpleNamespace, drawn: str
) -> None:
    sent: list[Any] = []

    def gather(own: Any) -> list[Any]:
        sent.append(own)
        return [sent[0]]

    monkeypatch.setattr(loaders, "gather_objects", gather)
    found = []
    for worker.rank in range(2):
        torch.manual_seed(worker.rank)
        random = SubsetRandomSampler(INDICES)
        choices: dict[str, dict[str, Any]] = {
            "subset": {"batch_size": 3, "sampler": random},
            "batches": {"batch_sampler": BatchSampler(random, 3, drop_last=False)},
            "order": {"batch_size": 3, "sampler": SequentialSampler(INDICES)},
        }
        loader: Any = DataLoader(DATA, **choices[drawn])
        accelerator: Any = SimpleNamespace(rows=None)
        for batch in loaders.EvaluationLoader(loader, accelerator):
            found += batch[: accelerator.rows].tolist()
    assert sorted(found) == ([*range(len(INDICES))] if drawn == "order" else INDICES)
    assert len(sent) == (0 if drawn == "order" else 2)
