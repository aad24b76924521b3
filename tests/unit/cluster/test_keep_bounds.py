from __future__ import annotations

import pytest

from hvd_elastic.cluster.keep_bounds import Bounds
from hvd_elastic.hosts.programs.keep_wire import (
    DRAINED,
    ERR,
    EXIT,
    FAILED,
    GONE,
    INPUT,
    LIVE,
    OPENED,
    OUT,
    OVER,
    REASON_BYTES,
    REFUSED,
    ROOM,
    START,
    WINDOW_BYTES,
    pack_number,
)


def test_a_command_as_it_should_be() -> None:
    bounds = Bounds()
    bounds.note(INPUT, b"12345")
    assert bounds.allow(ROOM, pack_number(2))
    assert bounds.allow(OUT, bytes(WINDOW_BYTES - 1))
    assert bounds.allow(ERR, b"e")
    bounds.note(ROOM, pack_number(4))
    assert bounds.allow(OUT, b"1234")
    assert bounds.allow(ROOM, pack_number(3))
    assert bounds.allow(EXIT, pack_number(-1))
    assert bounds.allow(DRAINED, b"")
    assert bounds.allow(OVER, b"")


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (EXIT, b""),
        (EXIT, b"12345"),
        (DRAINED, b"1"),
        (OVER, b"1"),
        (OUT, b""),
        (OUT, bytes(WINDOW_BYTES + 1)),
        (REFUSED, bytes(REASON_BYTES + 1)),
        (ROOM, b""),
        (ROOM, pack_number(1)),
        (ROOM, pack_number(0)),
        (ROOM, pack_number(-1)),
        *((kind, b"") for kind in (OPENED, FAILED, GONE, LIVE, START, INPUT, 99)),
    ],
)
def test_what_must_not_come(kind: int, payload: bytes) -> None:
    assert not Bounds().allow(kind, payload)


def test_what_ends_ends_once() -> None:
    bounds = Bounds()
    assert bounds.allow(REFUSED, b"why")
    assert not bounds.allow(REFUSED, b"why")
    for kind, payload in (EXIT, pack_number(0)), (DRAINED, b""), (OVER, b""):
        assert bounds.allow(kind, payload)
        assert not bounds.allow(kind, payload)
