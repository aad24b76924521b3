from __future__ import annotations

import enum
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_elastic.run_events import Metrics
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import LineSplitter, MessageDecoder, ProtocolError, encode

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Lone surrogates stand for bytes that are no UTF-8, in names and in variables.
    | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def decoded(line: bytes, union: Any = msg.WorkerToAgent) -> Any:
    decoder: MessageDecoder[Any] = MessageDecoder(union, "host b: its agent")
    return decoder.decode(line)


def metrics(**values: Any) -> Metrics:
    return Metrics(1, 0, 8, 8, 2, values=values)


@settings(deadline=None)
@given(st.dictionaries(st.text(st.characters()), plain))
def test_a_message_arrives_as_it_was_sent(values: dict[str, Any]) -> None:
    line = encode(metrics(values=values))
    assert line.count(b"\n") == 1
    assert decoded(line) == metrics(values=values)


@settings(deadline=None)
@given(st.lists(st.binary().map(lambda data: data.hex())), st.integers(1, 50))
def test_lines_are_found_however_they_are_cut(sent: list[str], size: int) -> None:
    data = b"".join(encode(metrics(of=text)) for text in sent)
    lines = LineSplitter("a test")
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    heard = [decoded(line).values["of"] for piece in pieces for line in lines.feed(piece)]
    assert heard == sent


def test_a_line_that_never_ends_is_refused() -> None:
    lines = LineSplitter("host b: its agent", limit=100)
    assert list(lines.feed(b"x" * 100 + b"\n" + b"y" * 60)) == [b"x" * 100]
    with pytest.raises(ProtocolError, match="host b: its agent sent a line of more than 100 bytes"):
        list(lines.feed(b"y" * 60))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", "is not JSON"),
        (b"nonsense", "is not JSON (Expecting value: line 1 column 1 (char 0)): b'nonsense'"),
        (b"\x80\x04\x95.\xff", "is not JSON"),
        (b'{"kind": "ready", "warm_s": 1', "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"[1]", "sent list [1], not an object"),
        (b'"ready"', "sent str 'ready', not an object"),
        (b"{}", "sent a message with kind None; valid are batch_plan, beat, "),
        (b'{"kind": "steal"}', "sent a message with kind 'steal'; valid are batch_plan, beat, "),
        (b'{"kind": ["x"]}', "sent a message with kind ['x']; valid are"),
        (b'{"kind": "ready"}', "'ready': Object missing required field `warm_s`"),
        (b'{"kind": "ready", "warm_s": "1"}', "Expected `float`, got `str` - at `$.warm_s`; its"),
        (b'{"kind": "ready", "warm_s": 1, "x": 2}', "unknown field `x`; its fields are warm_s"),
        (b'{"kind": "joined", "generation": 1e400, "step": 1}', "Expected `int`, got `float`"),
        (b'{"kind": "warning", "message": "' + b"x" * 10**6, "xxx…"),
    ],
)
def test_what_is_no_message_is_refused_with_who_sent_it_and_what_is_valid(
    line: bytes, words: str
) -> None:
    with pytest.raises(ProtocolError) as error:
        decoded(line)
    assert str(error.value).startswith("host b: its agent sent ")
    assert words in str(error.value)
    assert len(str(error.value)) < 600


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_raise_a_protocol_error(data: bytes) -> None:
    for union in (msg.AgentToLeader, msg.LeaderToAgent, msg.WorkerToAgent, msg.AgentToWorker):
        for line in (data, b'{"kind":"join","op":"store","ev":"worker","entry":' + data):
            with pytest.raises(ProtocolError):
                decoded(line, union)


def test_numbers_that_json_does_not_have_are_none_and_huge_ones_arrive() -> None:
    sent = metrics(loss=math.nan, best=-math.inf, count=10**400, pid=2**200)
    received = decoded(encode(sent)).values
    assert (received["loss"], received["best"], received["pid"]) == (None, None, 2**200)
    assert received["count"] in (10**400, math.inf)


def test_numbers_of_derived_types_are_plain_ones() -> None:
    class Ratio(float):
        """As numpy.float64 is."""

    class Level(enum.IntEnum):
        LOW = 1

    assert decoded(encode(metrics(ratio=Ratio(0.5), level=Level.LOW))).values == {
        "ratio": 0.5,
        "level": 1,
    }
    with pytest.raises(TypeError, match="cannot hold an object of type object"):
        encode(metrics(wrong=object()))
