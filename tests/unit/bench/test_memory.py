"""A step that does not fit into memory, and the batch that would."""

from __future__ import annotations

import resource

import pytest

from hvd_elastic.bench.memory import refuse_too_large
from hvd_elastic.errors import ScriptError
from hvd_elastic.programs.usable import Memory


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


@pytest.mark.parametrize(("ranks", "sizes"), [(None, [64]), (1, [1, 2, 4, 8, 16, 32, 64])])
def test_what_fits_leaves_the_limit_as_it_was(ranks: int | None, sizes: list[int]) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    tried, run = holds(64)
    refuse(64, run, ranks)
    assert tried == sizes
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_the_largest_half_that_fits_is_named() -> None:
    _, run = holds(20)
    with pytest.raises(ScriptError, match=r"net with 64 examples .* host .*; --batch-size 16 does"):
        refuse(64, run)
    with pytest.raises(ScriptError, match="which 4 ranks share"):
        refuse(64, run, ranks=4)
    with pytest.raises(ScriptError, match="memory of the GPU; --batch-size 16 does"):
        refuse(64, run, ranks=None)


def test_a_hopeless_batch_is_refused_after_a_few_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example takes is seen as it is used."""
    memory = Memory(1 << 30, 1 << 30)
    monkeypatch.setattr("hvd_elastic.bench.memory.usable_memory", lambda: memory)
    monkeypatch.setattr("hvd_elastic.bench.memory._MEASURABLE_BYTES", 64 << 20)
    tried: list[int] = []

    def run(examples: int) -> None:
        tried.append(examples)
        assert b"\1" * (examples * 48 << 20)

    with pytest.raises(ScriptError) as refused:
        refuse(1 << 20, run)
    assert tried == [1, 2, 4]
    named = int(str(refused.value).rpartition("--batch-size ")[2].split()[0])
    assert 8 <= named <= 21  # 21 times 48 MB are 1 GB, of which it plans with three quarters
    refuse(named, run)


def test_a_model_may_not_take_few_examples() -> None:
    tried: list[int] = []

    def run(examples: int) -> None:
        tried.append(examples)
        if examples % 8:
            raise ValueError("a multiple of 8")

    refuse(24, run)
    assert tried == [1, 3, 6, 12, 24]
    with pytest.raises(ValueError, match="a multiple of 8"):
        refuse(12, run)


def test_nothing_may_fit() -> None:
    _, run = holds(0)
    with pytest.raises(ScriptError, match="neither does a single example"):
        refuse(64, run)


def test_other_errors_are_the_users() -> None:
    def run(examples: int) -> None:
        raise ValueError("of the model")

    with pytest.raises(ValueError, match="of the model"):
        refuse(64, run)
