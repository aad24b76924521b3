"""Random numbers that a script has seeded alike on all ranks stay alike."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.worker.generators import Generators


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draw() -> tuple[float, float, float]:
    return random.gauss(0, 1), float(np.random.randn()), torch.randn(1).item()


def begun(number: int) -> Generators:
    """A process whose script has seeded all numbers, and begins to train."""
    seed(number)
    made = Generators(TorchFrontend().generators())
    made.offered()
    return made


def test_a_newcomer_draws_what_the_others_draw() -> None:
    root = begun(0)
    for _ in range(701):
        draw()
    offered = json.loads(json.dumps(root.offered()))
    expected = draw()
    newcomer = begun(0)
    assert newcomer.agree(offered, take=True) == newcomer.all_bits
    assert draw() == expected


@pytest.mark.parametrize("number", [1, 2])
def test_a_script_that_seeds_by_rank_keeps_its_numbers(number: int) -> None:
    offered = begun(0).offered()
    newcomer = begun(number)
    assert newcomer.agree(offered, take=True) == 0
    drawn = draw()
    seed(number)
    assert draw() == drawn


@pytest.mark.parametrize("drawn", [0, 1, 2, 623, 700])
def test_a_failed_body_draws_the_same_again(drawn: int) -> None:
    made = begun(0)
    made.settle(made.all_bits)
    for _ in range(drawn):
        draw()
    made.copy()
    before = made.copy()
    expected = draw()
    made.restore(before)
    assert draw() == expected


def draw_many() -> None:
    for _ in range(2000):
        draw()


def seed_and_draw() -> None:
    seed(1)
    draw()


@pytest.mark.parametrize(
    ("beginning", "kept"),
    [(lambda: None, False), (draw, False), (draw_many, False), (seed_and_draw, True)],
)
def test_what_the_beginning_of_the_function_seeds_is_kept(
    beginning: Callable[[], object], kept: bool
) -> None:
    """What it draws has been drawn before, where a newcomer or a failure enters it again."""
    made = begun(0)
    made.settle(made.all_bits)
    before = made.copy()
    expected = draw()
    made.restore(before)
    beginning()
    made.restore(before, unless_seeded=True)
    drawn = draw()
    assert all((a != b) == kept for a, b in zip(drawn, expected, strict=True))


def test_numbers_that_ranks_do_not_share_are_not_copied() -> None:
    made = begun(0)
    made.settle(0b100)
    assert list(made.copy()) == ["torch"]
