"""The common part of every benchmark's command line: options, progress, output, exit status."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.testbed.figures import Result
from hvd_elastic.errors import HvdElasticError, UsageError

Say = Callable[[str], None]
"""Function that is called with a line of progress."""


def run_benchmark(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, Say], Result],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse the command line, measure, show the figures and write them; return the exit status."""
    told = "write a summary to this JSON file, and every measurement to .raw.json beside it"
    parser.add_argument("--out", "-o", type=Path, help=told)
    told = "print the figures as JSON, not as tables"
    parser.add_argument("--json", action="store_true", help=told)
    told = "print a line for each measurement (stderr)"
    parser.add_argument("--verbose", "-v", action="store_true", help=told)
    options = parser.parse_args(arguments)

    def measure_and_deliver() -> None:
        with _progress(options) as say:
            result = measure(options, say)
        if options.out is not None:
            result.write(options.out)
        if options.json:
            print(json.dumps(result.as_json(), indent=1))
        else:
            # Off a terminal rich would squeeze tables into 80 columns.
            console = Console()
            result.show(console if console.is_terminal else Console(width=180))

    return end_with(measure_and_deliver)


def end_with(measure: Callable[[], int | None]) -> int:
    """Call ``measure``; return its exit status, or that of the error or signal that ended it."""
    # SIGTERM raises KeyboardInterrupt too, so that jobs and virtual hosts are ended.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return measure() or 0
    except HvdElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted; everything was taken down", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _progress(options: argparse.Namespace) -> Iterator[Say]:
    """Yield a function that shows progress on stderr: a status line on a terminal, else lines.

    Raises:
        UsageError: the folder of ``--out`` does not exist; raised before anything is measured.
    """
    if options.out is not None and not options.out.absolute().parent.is_dir():
        folder = options.out.absolute().parent
        raise UsageError(f"--out {options.out}: the folder {folder} does not exist")
    console = Console(stderr=True)
    if options.verbose or not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status("making virtual hosts") as status:
        yield status.update


def names(text: str) -> list[str]:
    """Return the names in a comma-separated list.

    >>> names("a, b,")
    ['a', 'b']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def check_names(option: str, given: Collection[str], valid: Collection[str]) -> None:
    """Check that all names are valid.

    Raises:
        UsageError: some are not; lists the valid ones.
    """
    if unknown := [name for name in given if name not in valid]:
        raise UsageError(f"{option}: {', '.join(unknown)} is not known. Valid: {', '.join(valid)}")


def numbers(text: str) -> list[int]:
    """Return the numbers in a comma-separated list."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}': write numbers as in 2,4,8") from None


def at_least_one(text: str) -> int:
    """Return the whole number >= 1 that a text holds, or raise."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes a whole number of 1 or more, not '{text}'")
    return int(text)
