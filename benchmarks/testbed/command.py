"""What the command lines of the benchmarks share: progress, output, and how errors end."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from benchmarks.testbed.figures import Result
from hvd_elastic.errors import HvdElasticError, UsageError

__all__ = ["Say", "add_output_options", "at_least_one", "deliver", "end_with", "names", "numbers"]
__all__ += ["progress"]

Say = Callable[[str], None]


def end_with(measure: Callable[[], int | None]) -> int:
    """Call it and return its exit status, or that of the error or signal that ended it."""
    # As with Ctrl-C, jobs and virtual hosts are ended on the way out.
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


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--out``, ``--json`` and ``--verbose``."""
    told = "write a summary to this JSON file, and every measurement to .raw.json beside it"
    parser.add_argument("--out", "-o", type=Path, help=told)
    told = "print the figures as JSON, not as tables"
    parser.add_argument("--json", action="store_true", help=told)
    told = "print a line for each measurement (stderr)"
    parser.add_argument("--verbose", "-v", action="store_true", help=told)


def deliver(result: Result, options: argparse.Namespace) -> None:
    """Show the figures and write them, as the options say."""
    if options.out is not None:
        result.write(options.out)
    if options.json:
        print(json.dumps(result.as_json(), indent=1))
        return
    # Off a terminal rich would squeeze tables into 80 columns.
    console = Console()
    result.show(console if console.is_terminal else Console(width=180))


@contextlib.contextmanager
def progress(options: argparse.Namespace) -> Iterator[Say]:
    """One changing line on a terminal; lines with --verbose or off a terminal; all on stderr.

    Raises:
        UsageError: the folder for the figures does not exist, before minutes of measuring.
    """
    if options.out is not None and not options.out.absolute().parent.is_dir():
        folder = options.out.absolute().parent
        raise UsageError(f"--out {options.out}: the folder {folder} does not exist")
    console = Console(stderr=True)
    if options.verbose or not console.is_terminal:
        yield _print_line
        return
    with console.status("making virtual hosts") as status:
        yield status.update


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def names(text: str) -> list[str]:
    """Names with commas between.

    >>> names("a, b,")
    ['a', 'b']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str) -> list[int]:
    """Numbers with commas between."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}': write numbers as in 2,4,8") from None


def at_least_one(text: str) -> int:
    """A number of rounds."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes a whole number of 1 or more, not '{text}'")
    return int(text)
