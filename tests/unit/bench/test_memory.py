"""A step that does not fit into memory, and the batch that would."""

from __future__ import annotations

import resource

import pytest

from hvd_elastic.bench.memory import refuse_too_large
from hvd_elastic.errors import ScriptError


def holds(most: int) -> tuple[list[int], object]:
    """Numbers of examples that were tried, and a step that fits up to ``most`` of them."""
    tried: list[int] = []

    def run(examples: int) -> None:
        tried.append(examples)
        if examples > most:
            raise MemoryError

    return tried, run


def refuse(batch_size: int, run: object, ranks: int | None = 1) -> None:
    def never(error: Exception) -> bool:
        return False

    refuse_too_large("net", batch_size, run, never, ranks)  # type: ignore[arg-type]


def test_what_fits_is_tried_once_and_leaves_the_limit_as_it_was() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    tried, run = holds(64)
    refuse(64, run)
    assert tried == [64]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_the_largest_half_that_fits_is_named() -> None:
    _, run = holds(20)
    with pytest.raises(ScriptError, match=r"net with 64 examples .* host .*; --batch-size 16 does"):
        refuse(64, run)
    with pytest.raises(ScriptError, match="which 4 ranks share"):
        refuse(64, run, ranks=4)
    with pytest.raises(ScriptError, match="memory of the GPU"):
        refuse(64, run, ranks=None)


def test_nothing_may_fit() -> None:
    _, run = holds(0)
    with pytest.raises(ScriptError, match="neither does a single example"):
        refuse(64, run)


def test_other_errors_are_the_users() -> None:
    def run(examples: int) -> None:
        raise ValueError("of the model")

    with pytest.raises(ValueError, match="of the model"):
        refuse(64, run)
