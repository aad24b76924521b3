"""What a loader is asked for that no ranks, or not so many, can keep to."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.planning.batch_bounds import batch_limits, bounds_at_odds


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((9, 8), r"=\(9, 8\)\): they exclude each other"),
        (9, r"=9\): it must be a pair of whole numbers"),
        ((0, 4), r"=\(0, 4\)\): it must be a pair of whole numbers of at least 1"),
        ((4, 8.0), r"=\(4, 8.0\)\): it must be a pair"),
        ("48", r"='48'\): it must be a pair"),
        ((20, None), "one pass of at least 20 .* max_batch_size=19, .* first bound at most 19$"),
        ((10, 12), "2 passes, .* batch_size=16, of at least 10 .* at most 9, or the second one"),
    ],
)
def test_bounds_that_no_ranks_could_keep_to(bounds: Any, message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        batch_limits(16, 19, bounds, True, examples=400)


def test_a_data_set_below_the_least_pass_is_named() -> None:
    with pytest.raises(ScriptError, match="at least 50 are more than the 40 examples of the data"):
        batch_limits(16, 64, (50, None), True, examples=40)


@pytest.mark.parametrize(
    ("ranks", "bounds", "accumulation", "message"),
    [
        (4, (1, None), True, ""),
        (4, (16, 16), True, ""),
        (4, (24, None), True, "at 4 ranks the batch has at least 96 examples, more than batch_siz"),
        (
            4,
            (40, None),
            True,
            "at 4 ranks passes have 32 examples, fewer than .* at most 32, or use fewer",
        ),
        (1, (60, 63), True, "at 1 rank passes have 32 examples, .* or the second one at least 64"),
        (
            2,
            (1, 16),
            False,
            "at 2 ranks the batch has at most 32 .* at least 32, or use more ranks",
        ),
        (1, (1, 3), True, "at 1 rank the batch has at most 48 .* in 16 passes at the most"),
        (1, (40, None), True, "at 1 rank batch_size=64 does not adapt: .* at least 80"),
        (200, (1, None), True, ""),  # they have no example, which the loader says
    ],
)
def test_bounds_that_so_many_ranks_cannot_keep_to(
    ranks: int, bounds: tuple[int, int | None], accumulation: bool, message: str
) -> None:
    limits = batch_limits(64, 128, bounds, accumulation, examples=400)
    said = bounds_at_odds(limits, ranks)
    assert re.search(message, said) if message else not said


class Ranks(LocalCommunicator):
    """Others that do what this one does."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, array: Any, name: str) -> Any:
        return np.concatenate([array] * self.size)


def test_they_are_warned_of_when_they_take_effect_and_not_again(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", said.append)
    model = torch.nn.Linear(2, 1)
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    dataset = TensorDataset(torch.zeros(400, 2))
    bounds = (16, None)
    loader: hvd.DataLoader[Any] = hvd.DataLoader(
        dataset, 64, max_batch_size=256, atomic_batch_size_bounds=bounds
    )
    assert isinstance(loader.planner, AdaptivePlanner)
    told = []
    for ranks in (4, 8, 8, 2, 8, 5):
        alone.worker.communicator = Ranks(ranks)
        alone.worker.generation += 1
        loader.planner.review_if_due(alone.worker)
        loader.planner.want_review()
        loader.planner.review_if_due(alone.worker)
        told.append(len(said))
    assert told == [0, 1, 1, 1, 1, 2], "what is so again is not said again"
    assert said[0].startswith("at 8 ranks the batch has at least 128 examples, more than batch_siz")
