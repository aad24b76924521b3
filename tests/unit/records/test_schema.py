"""The types of events, their published schema, and what runs really write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hvd_elastic.records.events import decode_event
from hvd_elastic.run_events import Unread
from scripts import events_schema
from tests.checked_events import check_event
from tests.unit.test_docs import read

STAMPS = {"t": 1.0, "mono": 2.0}


def test_the_published_schema_is_current() -> None:
    text = read(events_schema.SCHEMA)
    assert text == events_schema.schema_text(), "run: python scripts/events_schema.py"
    assert json.loads(text) == events_schema.event_schema()


def test_every_kind_of_the_document_has_a_type_with_its_fields() -> None:
    page = read(events_schema.SCHEMA.with_name("run-folder.md"))
    table = page.partition("| kind | fields | when |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    documented = {row[0].strip("|` "): row[1] for row in rows}
    kinds = (each["$ref"].rsplit("/", 1)[1] for each in events_schema.event_schema()["anyOf"])
    types = [events_schema.event_schema()["$defs"][kind] for kind in kinds]
    found = {each["properties"]["kind"]["enum"][0]: each for each in types}
    assert documented.keys() == found.keys()
    for kind, fields in documented.items():
        for name in found[kind]["required"]:
            assert name in ("kind", "t", "mono") or f"`{name}`" in fields, (kind, name)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"kind": "host_drained"}, "missing required field `host`"),
        ({"kind": "host_drained", "host": 7}, r"Expected `str`, got `int` - at `\$.host`"),
        ({"kind": "host_drained", "host": "a", "why": ""}, r"not documented: \['why'\]"),
        ({"kind": "no_such"}, "Invalid value 'no_such'"),
    ],
)
def test_an_event_of_another_form_is_refused(record: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_event({**STAMPS, **record})


def test_metrics_may_hold_what_the_script_reports() -> None:
    counts = {"step": 1, "epoch": 0, "position": 8, "examples": 8, "size": 2}
    check_event({**STAMPS, "kind": "metrics", **counts, "accuracy": 0.5, "loss": None})


@pytest.mark.parametrize("kind", ["run_started", "of_a_later_version"])
def test_a_number_that_no_float_can_hold_is_read_as_of_another_form(kind: str) -> None:
    line = f'{{"kind":"{kind}","t":1{"0" * 400},"mono":2.0}}'
    event = decode_event(line.encode())
    assert isinstance(event, Unread)
    assert (event.t, event.mono) == (0.0, 2.0)
