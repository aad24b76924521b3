"""``hvd.evaluate`` in one process: what it counts, refuses, and leaves unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from hvd_elastic.errors import ScriptError
from hvd_elastic.script.evaluation import batches_of
from hvd_elastic.torch import evaluate
from hvd_elastic.worker.context import Context

INPUTS = torch.arange(14.0).reshape(7, 2)
DATA = TensorDataset(INPUTS, torch.arange(7))


def first(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0]


@pytest.mark.parametrize(("examples", "batch_size", "size"), [(10, 3, 4), (3, 4, 5), (1, 1, 2)])
def test_batches_are_the_same_at_any_number_of_ranks(
    examples: int, batch_size: int, size: int
) -> None:
    of_all = [each for rank in range(size) for each in batches_of(examples, batch_size, rank, size)]
    assert of_all == batches_of(examples, batch_size, 0, 1)
    assert [index for batch in of_all for index in batch] == list(range(examples))


def test_a_short_last_batch_counts_by_its_examples(alone: Context) -> None:
    for workers in (0, 1):
        found = evaluate(
            torch.nn.Identity(), DATA, {"first": first}, batch_size=3, num_workers=workers
        )
        assert found == {"first": 6.0}


def test_batches_of_another_kind_go_through_forward(alone: Context) -> None:
    data: Any = [{"x": row, "y": row[0]} for row in INPUTS]
    found = evaluate(
        torch.nn.Identity(),
        data,
        {"equal": lambda outputs, targets: outputs == targets},
        forward=lambda batch: (batch["x"][:, 0], batch["y"]),
    )
    assert found == {"equal": 1.0}
    with pytest.raises(ScriptError, match="give forward="):
        evaluate(torch.nn.Identity(), data, {"first": first})


def test_modules_keep_their_modes(alone: Context) -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.9), torch.nn.BatchNorm1d(2))
    model[1].eval()
    assert evaluate(model, DATA, {"first": first})["first"] == pytest.approx(6.0, rel=1e-4)
    assert [module.training for module in model] == [True, False]


@pytest.mark.parametrize(
    ("metrics", "batch_size", "words"),
    [
        ({"loss": lambda outputs, _: outputs.mean()}, 3, r"one number for a batch of 3.*reduction"),
        ({"loss": lambda outputs, _: outputs}, 3, r"shape \(3, 2\) for a batch of 3"),
        ({}, 3, "at least one function"),
        ([first], 3, "at least one function"),
        ({"first": first}, 0, r"batch_size=0"),
    ],
)
def test_wrong_arguments_are_refused(
    alone: Context, metrics: Any, batch_size: int, words: str
) -> None:
    with pytest.raises(ScriptError, match=words):
        evaluate(torch.nn.Identity(), DATA, metrics, batch_size=batch_size)


def test_more_batches_than_exchanges(alone: Context) -> None:
    many = TensorDataset(torch.arange(300.0).reshape(150, 2), torch.arange(150))
    found = evaluate(torch.nn.Identity(), many, {"first": first}, batch_size=1)
    assert found == {"first": 149.0}
