from __future__ import annotations

import math
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.wire.framing import decode, encode, peer_uid, split_lines

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
messages = st.dictionaries(st.text(), plain)


@given(messages)
def test_a_message_arrives_as_it_was_sent(message: dict[str, object]) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message


@given(st.lists(messages), st.integers(1, 50))
def test_lines_are_found_however_they_are_cut(sent: list[dict[str, object]], size: int) -> None:
    data = b"".join(encode(message) for message in sent)
    buffer = bytearray()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    heard = [decode(line) for piece in pieces for line in split_lines(buffer, piece)]
    assert heard == sent
    assert not buffer


@pytest.mark.parametrize("line", [b"", b"nonsense\n", b"[1]\n", b'"x"\n', b"\x80\x04.\n", b"{\n"])
def test_what_is_no_object_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting|JSON object|decode|Extra data"):
        decode(line)


def test_an_integer_that_no_float_can_hold_is_infinite() -> None:
    for digits in (400, 5000):
        assert decode(f'{{"step": 1{"0" * digits}}}'.encode()) == {"step": math.inf}
    assert decode(b'{"step": -%d}' % 10**400) == {"step": -math.inf}
    assert decode(b'{"pid": %d}' % 2**200) == {"pid": 2**200}


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert peer_uid(one) == os.getuid()
