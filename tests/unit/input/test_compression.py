"""Batches are compressed where the link is the limit, and only there."""

from __future__ import annotations

import pytest

from hvd_elastic.input.compression import LinkLimit, compress, expand
from hvd_elastic.input.link import LinkError

MEGABYTE = 1 << 20


def compressed_of(limit: LinkLimit, count: int, *, made: float, plain: float, packed: float) -> int:
    """Send batches of 1 MB, each of which takes so long; return how many were compressed."""
    compressed = 0
    for _ in range(count):
        compressed += limit.compresses
        limit.sent(MEGABYTE, made, packed if limit.compresses else plain)
    return compressed


def test_a_link_that_is_not_the_limit_carries_batches_as_they_are() -> None:
    assert compressed_of(LinkLimit(), 2000, made=0.02, plain=0.003, packed=0.001) == 0


def test_batches_are_compressed_where_that_is_faster() -> None:
    assert compressed_of(LinkLimit(), 2000, made=0.01, plain=0.1, packed=0.05) > 1900


def test_what_compression_does_not_shorten_is_only_tried() -> None:
    assert 0 < compressed_of(LinkLimit(), 2000, made=0.01, plain=0.1, packed=0.11) < 50


def test_a_link_that_becomes_fast_carries_batches_as_they_are() -> None:
    limit = LinkLimit()
    compressed_of(limit, 100, made=0.01, plain=0.1, packed=0.05)
    assert limit.compresses
    compressed_of(limit, 600, made=0.01, plain=0.001, packed=0.05)
    assert not limit.compresses


def test_batches_without_bytes_decide_nothing() -> None:
    limit = LinkLimit()
    for _ in range(100):
        limit.sent(0, 0.0, 1.0)
    assert not limit.compresses


def test_what_was_compressed_is_the_same_and_can_be_written_to() -> None:
    whole = [b"description", memoryview(bytearray(b"pixels" * 1000)), b""]
    packed, sizes = compress(whole)
    assert sum(map(len, packed)) < 200
    found = expand(packed, sizes)
    assert [bytes(each) for each in found] == [bytes(each) for each in whole]
    found[1][0] = 0


@pytest.mark.parametrize(
    ("packed", "sizes"),
    [(compress([b"pixels"])[0], [5]), (compress([b"pixels"])[0], [7]), ([b"nonsense"], [6])],
)
def test_what_is_not_as_announced_is_refused(packed: list[bytes], sizes: list[int]) -> None:
    with pytest.raises(LinkError, match="a batch that"):
        expand(packed, sizes)


def test_as_many_sizes_as_buffers_are_needed() -> None:
    packed, _ = compress([b"a", b"b"])
    with pytest.raises(LinkError):
        expand(packed, [1])
