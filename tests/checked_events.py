"""Compares what runs write with the types of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hvd_elastic.run_events import Event, OpenEvent


def check_event(record: Mapping[str, Any]) -> None:
    """Check one record of ``events.jsonl`` against its type.

    Raises:
        ValueError: the kind is unknown, or a field is missing, unknown or of another type; names
            it.
    """
    event = msgspec.convert(record, Event)
    unknown = record.keys() - {*type(event).__struct_fields__, "kind"}
    if unknown and not isinstance(event, OpenEvent):
        raise ValueError(
            f"event {event.kind} has fields that are not documented: {sorted(unknown)}"
        )
    if missing := {"t", "mono"} - record.keys():
        raise ValueError(f"event {event.kind} has no {sorted(missing)}")
