"""Events of a run for tests, which name the fields that matter to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec

from hvd_elastic.records.events import EVENT_TYPES, as_record, decode_event
from hvd_elastic.records.json_lines import EventLog, encode_line
from hvd_elastic.records.run_folder import Request, RunFolder
from hvd_elastic.records.summary import RunSummary, summarize
from hvd_elastic.run_events import BatchLimits, ReadEvent, RunEvent

_LIMITS = {
    "initial_batch_size": 64,
    "max_batch_size": 64,
    "min_atomic_batch_size": 1,
    "max_atomic_batch_size": None,
    "max_accumulation_steps": 0,
}
_WORDS = ("stay", "nothing", "succeeded", "died")
_OTHERS: tuple[Any, ...] = (None, "", True, 0, 1, [], _LIMITS, *_WORDS)


@cache
def _rest_of(kind: str) -> dict[str, Any]:
    """Values for the fields that an event of this kind must have."""
    fields = msgspec.structs.fields(EVENT_TYPES[kind])
    return {field.name: _value_of(field.type) for field in fields if field.required}


def _value_of(type_: Any) -> Any:
    for value in _OTHERS:
        try:
            msgspec.convert(value, type_)
        except msgspec.ValidationError:
            continue
        return value
    raise AssertionError(type_)


def whole(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with all fields of its kind."""
    kind = str(record["kind"])
    rest = _rest_of(kind) if kind in EVENT_TYPES else {}
    found = {"t": 0.0, "mono": 0.0, "kind": kind, **rest, **record}
    if isinstance(found.get("limits"), dict):
        found["limits"] = {**_LIMITS, **found["limits"]}
    return found


def made(record: Mapping[str, Any]) -> Any:
    """Return the event of a record, as it is read from a line."""
    event = decode_event(encode_line(whole(record)))
    assert event is not None
    return event


def made_all(records: Iterable[Mapping[str, Any]]) -> list[ReadEvent]:
    return [made(record) for record in records]


def summarized(records: Iterable[Mapping[str, Any]]) -> RunSummary:
    return summarize(made_all(records))


def noted(taker: Any, kind: str, fields: Mapping[str, Any], now: float) -> None:
    """Have ``taker`` note an event at a monotonic time; its numbers are not checked."""
    all_fields = {**_rest_of(kind), **fields, "mono": now}
    if "limits" in all_fields:
        all_fields["limits"] = BatchLimits(**{**_LIMITS, **all_fields["limits"]})
    if kind == "metrics" and "size" not in fields:
        evidence = getattr(taker, "evidence", taker)
        all_fields["size"] = evidence.allocation.slots
    taker.note_event(EVENT_TYPES[kind](**all_fields))


def fields_of(event: RunEvent) -> dict[str, Any]:
    """Return the fields of an event as they are written, without its time and kind."""
    record = as_record(event)
    return {name: record[name] for name in record if name not in ("t", "mono", "kind")}


def write(log: EventLog, kind: str, fields: Mapping[str, Any]) -> None:
    """Write an event of which these fields matter."""
    log.append(kind, whole({"kind": kind, **fields}))


@contextmanager
def leader(
    folder: RunFolder,
    handle: Callable[[Request, EventLog], bool] | None = None,
    *,
    answer: Callable[[Request], dict[str, Any]] = lambda _: {"ok": True, "message": "will do"},
) -> Iterator[EventLog]:
    """A leader that answers every request; ``handle`` returning True ends it."""
    gone = threading.Event()
    lock = folder.take_lead()
    log = EventLog(folder.events)

    def serve() -> None:
        while not gone.wait(0.01):
            for request in folder.take_requests():
                write(log, "command_done", {"id": request.id, **answer(request)})
                if handle is not None and handle(request, log):
                    lock.close()
                    return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield log
    finally:
        gone.set()
        thread.join()
        log.close()
        lock.close()
