"""Print the results of commands: JSON for machines, and rows of a label and a text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

_POLL_S, _TELL_S = 0.1, 60.0


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


def wait_until(ended: Callable[[], bool], waiting: str) -> None:
    """Wait until something that takes as long as it takes has ended, and say so every minute.

    Args:
        waiting: what is waited for, printed after the time.
    """
    began = told = time.monotonic()
    while not ended():
        if time.monotonic() > told + _TELL_S:
            told = time.monotonic()
            print(f"after {told - began:.0f} s: {waiting}", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)
