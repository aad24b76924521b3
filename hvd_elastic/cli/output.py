"""Print the results of commands: JSON for machines, rows of a label and a text, and tables."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from hvd_elastic.records.json_lines import without_nan

_POLL_S, _TELL_S = 0.1, 60.0


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print a line for each label and text."""
    for name, value in rows:
        print(f"{name:<12} {value}")


def table_lines(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Return the lines of a table whose columns are as wide as their widest cell.

    Args:
        left: columns whose cells begin at the left; the others end at the right.

    >>> table_lines([["JOB", "USER"], ["12", "ann"]], left={1})
    ['JOB  USER', ' 12  ann']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if at in left else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def print_table(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> None:
    """Print a table; arguments as of :func:`table_lines`."""
    for line in table_lines(rows, left):
        print(line)


def print_json(value: Any) -> None:
    """Print a value as JSON that people can read too; null for NaN and infinity."""
    json.dump(without_nan(value), sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_json_line(value: dict[str, Any]) -> None:
    """Print one JSON object of several as one line, at once; null for NaN and infinity."""
    print(json.dumps(without_nan(value), ensure_ascii=False), flush=True)


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
