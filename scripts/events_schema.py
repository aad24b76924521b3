"""Write ``docs/events.schema.json``, the JSON schema of ``events.jsonl``, from the types of events.

``--check`` changes nothing and ends with 1 if the file is old.

    .venv/bin/python scripts/events_schema.py
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from hvd_elastic.run_events import Event  # noqa: E402

SCHEMA = HERE.parent / "docs" / "events.schema.json"


def event_schema() -> dict[str, Any]:
    """Return the JSON schema of a line of ``events.jsonl``."""
    schema = msgspec.json.schema(Event)
    for kind in schema["$defs"].values():
        if "kind" in kind.get("properties", {}):
            kind["required"] = ["kind", "t", "mono", *kind["required"][1:]]
            kind["properties"].pop("values", None)  # they are written under their own names
        if "description" in kind:  # Python 3.13 keeps docstrings without their indentation
            kind["description"] = inspect.cleandoc(kind["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of events.jsonl",
        "anyOf": schema["anyOf"],
        "$defs": schema["$defs"],
    }


def schema_text() -> str:
    """Return what the file should hold."""
    schema = event_schema()
    kinds = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(kind)}" for name, kind in schema.pop("$defs").items()
    )
    return f'{json.dumps(schema)[:-1]},\n"$defs": {{\n{kinds}\n}}}}\n'


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Renew docs/events.schema.json.")
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    arguments = parser.parse_args()
    text = schema_text()
    if arguments.check:
        return int(not SCHEMA.exists() or SCHEMA.read_text(encoding="utf-8") != text)
    SCHEMA.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
