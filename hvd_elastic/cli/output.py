"""Print the results of commands: JSON for machines, and rows of a label and a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print a line for each label and text."""
    for name, value in rows:
        print(f"{name:<12} {value}")


def print_json(value: Any) -> None:
    """Print a value as JSON that people can read too."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_json_line(value: dict[str, Any]) -> None:
    """Print one JSON object of several as one line, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)
