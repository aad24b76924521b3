from __future__ import annotations

import pytest

from hvd_elastic.hosts.programs.keep_wire import (
    EXIT,
    INPUT,
    OUT,
    Frames,
    frame,
    pack_number,
    unpack_number,
)

SENT = [(OUT, 1, b"a\0\xff"), (INPUT, 2**32 - 1, b""), (EXIT, 7, pack_number(-1))]


@pytest.mark.parametrize("size", [1, 2, 8, 9, 10, 1000])
def test_frames_are_found_however_they_arrive(size: int) -> None:
    data = b"".join(frame(*each) for each in SENT)
    frames, found = Frames(), []
    for at in range(0, len(data), size):
        found += frames.feed(data[at : at + size])
    assert found == SENT
    assert unpack_number(found[-1][2]) == -1


def test_a_frame_that_is_too_large_is_refused_before_it_is_there() -> None:
    assert Frames(5).feed(frame(OUT, 1, b"12345"))
    with pytest.raises(ValueError, match="6 bytes"):
        Frames(5).feed(frame(OUT, 1, b"123456")[:9])
