"""Which examples of a batch are left, and what stands in where none is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hvd_elastic.errors import DataError, SkippedExampleError
from hvd_elastic.input.skipped import read_examples
from hvd_elastic.worker.input_source import Skipped


class Damaged:
    """Some of 40 examples cannot be decoded."""

    def __init__(self, damaged: Sequence[int]) -> None:
        self._damaged = damaged

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index in self._damaged:
            raise SkippedExampleError(f"example {index}", "no picture")
        return index

    def at_once(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


Way = Callable[[Damaged], Any]
WAYS = pytest.mark.parametrize("way", [lambda _: None, lambda data: data.at_once])


@WAYS
def test_those_that_are_left_keep_their_order(way: Way) -> None:
    data, began = Damaged([3, 9]), list[int]()
    found = read_examples(data, way(data), [9, 4, 3, 7], began.append)
    assert found == ([4, 7], [Skipped(n, f"example {n}", "no picture") for n in (9, 3)])
    assert began[-4:] == [9, 4, 3, 7], "each was seeded"


@WAYS
def test_a_batch_of_none_has_one_of_another_place(way: Way) -> None:
    data = Damaged(range(30))
    found, skipped = read_examples(data, way(data), [3, 9])
    assert [each.dataset_index for each in skipped] == [3, 9]
    assert len(found) == 1
    assert found[0] >= 30
    assert read_examples(data, way(data), [3, 9])[0] == found, "the same in any process"


@WAYS
def test_a_data_set_of_which_nothing_can_be_decoded_is_an_error(way: Way) -> None:
    data = Damaged(range(40))
    with pytest.raises(DataError, match=r"example 3 cannot be decoded: no picture\. Nor can any"):
        read_examples(data, way(data), [3])


def test_other_errors_are_raised() -> None:
    with pytest.raises(DataError, match="has changed"):
        read_examples(Changed(), None, [0])


class Changed:
    def __getitem__(self, index: int) -> Any:
        raise DataError("s.tar has changed")
