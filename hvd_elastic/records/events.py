"""Reads and writes the events of a run: each line of ``events.jsonl`` is its type."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgspec

from hvd_elastic.records.json_lines import (
    EventLog,
    Record,
    as_plain,
    decode_record,
    stamps,
)
from hvd_elastic.run_events import Event, OpenEvent, Output, ReadEvent, RunEvent, Unread

EVENT_TYPES: dict[str, type[Event]] = {each.__struct_config__.tag: each for each in get_args(Event)}
"""Type of each kind of event."""
_FIELDS = {each: {*each.__struct_fields__, "kind"} for each in EVENT_TYPES.values()}
_OUTPUT = msgspec.json.Decoder(Output)


def as_record(event: RunEvent) -> Record:
    """Return the plain fields of an event, as they are written.

    >>> from hvd_elastic.run_events import Metrics
    >>> as_record(Metrics(step=9, epoch=0, position=8, examples=72, size=2, values={"loss": 0.5}))
    {'t': 0.0, 'mono': 0.0, 'kind': 'metrics', 'step': 9, 'epoch': 0, 'position': 8, 'examples': 72, 'size': 2, 'loss': 0.5}
    """  # noqa: E501
    if isinstance(event, Unread):
        return event.fields
    fields: Record = msgspec.to_builtins(event, enc_hook=as_plain)
    record = {"t": event.t, "mono": event.mono, "kind": event.kind, **fields}
    if isinstance(event, OpenEvent):
        more = record.pop("values", {})
        record.update((name, more[name]) for name in more if name not in record)
    return record


def append_event(log: EventLog, event: RunEvent) -> None:
    """Set the time of an event and write it.

    Raises:
        RunError: see :meth:`EventLog.write`.
    """
    event.t, event.mono = stamps()
    log.write(as_record(event))


def decode_event(line: bytes) -> ReadEvent | None:
    """Return the event of a line; None: the line is damaged."""
    record = decode_record(line)
    return None if record is None else event_of(record)


def event_of(record: Record) -> ReadEvent:
    """Return the event of plain fields."""
    kind = EVENT_TYPES.get(record["kind"])
    if kind is None:
        return _unread(record)
    try:
        event = msgspec.convert(record, kind)
    except msgspec.ValidationError:
        return _unread(record)
    if isinstance(event, OpenEvent):
        fields = _FIELDS[kind]
        event.values = {name: record[name] for name in record if name not in fields}
    return event


def _unread(record: Record) -> Unread:
    event = Unread(record["kind"], record["kind"] in EVENT_TYPES, record)
    times = (record.get(name) for name in ("t", "mono"))
    event.t, event.mono = map(_as_seconds, times)
    return event


def _as_seconds(value: Any) -> float:
    with contextlib.suppress(OverflowError):  # of an integer that no float can hold
        return float(value) if isinstance(value, (int, float)) else 0.0
    return 0.0


def decode_output(line: bytes) -> Output | None:
    """Return the output of a line of ``output.jsonl``; None: the line is damaged."""
    try:
        return _OUTPUT.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
