"""What the scripts of this folder share: a progress bar, how they end, numbers as options."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from hvd_elastic.errors import DataError, HvdElasticError

Result = TypeVar("Result")
_OF_THE_FILE = {
    None,  # of a library that reads damaged content
    *(errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EINVAL, errno.ELOOP),
}
_OF_A_MOUNT = (errno.ENOENT, errno.ENOTDIR, errno.EACCES)
"""Errors of a file that was there before if its file system, or the login to it, is gone."""


@contextlib.contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, elsewhere a line for each tenth, with rate and time left.

    Yields the function that moves it on by a count.
    """
    began, done = time.monotonic(), 0
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            *(label, BarColumn(), MofNCompleteColumn()),
            *(TextColumn("{task.fields[rate]}"), TimeRemainingColumn()),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task(label, total=total, rate="")

            def move(count: int) -> None:
                nonlocal done
                done += count
                rate = done / max(1e-9, time.monotonic() - began)
                progress.update(bar, advance=count, rate=f"{rate:,.0f}/s")

            yield move
        return

    def advance(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if 10 * before // total < 10 * done // total:
            rate = done / max(1e-9, time.monotonic() - began)
            left = f", {(total - done) / rate:,.0f} s left" if done < total else ""
            print(f"{label}: {done} of {total} ({rate:,.0f}/s{left})", file=sys.stderr, flush=True)

    yield advance


def interrupted(*, again: bool) -> str:
    """Return what to say of a call that Ctrl-C ends; ``again``: whether it was to redo all."""
    which = "the same call without --again" if again else "the same call"
    return f"interrupted; {which} goes on where this one stopped"


def result_of(
    work: Callable[[], Result], place: object, interruption: str
) -> tuple[Result | None, int]:
    """Return what work gives, and 0; or None, and the exit status of what was printed instead.

    Args:
        work: what a script does.
        place: what an error of the system is about where it names no file.
        interruption: what is printed after Ctrl-C.
    """
    try:
        return work(), 0
    except HvdElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return None, error.exit_status
    except OSError as error:
        print(f"error: {error.filename or place}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(interruption, file=sys.stderr)
        return None, 130
    return None, 1


def is_of_storage(error: Exception, *, was_there: bool = False) -> bool:
    """Return whether reading failed for a reason that is not the file's and may pass (ESTALE).

    Args:
        error: why it failed.
        was_there: whether the file was found when it was listed.
    """
    if not isinstance(error, OSError):
        return False
    if error.errno not in _OF_THE_FILE:
        return True
    return was_there and error.errno in _OF_A_MOUNT and not _is_closed(error)


def _is_closed(error: OSError) -> bool:
    """Return whether the file's own mode forbids this user to read it, as that of another's may."""
    if error.errno != errno.EACCES or not error.filename:
        return False
    try:
        found = Path(error.filename).stat()
    except OSError:
        return False
    if found.st_uid == os.geteuid():
        mask = stat.S_IRUSR
    else:
        ours = found.st_gid in (os.getegid(), *os.getgroups())
        mask = stat.S_IRGRP if ours else stat.S_IROTH
    return not (found.st_mode & mask or os.access(error.filename, os.R_OK))


def unlisted(path: object, error: Exception) -> DataError:
    """Return the error of a file that the storage fails to describe."""
    why = getattr(error, "strerror", None) or error
    return DataError(f"{path}: {why}; call again, and if it fails again, remove the file")


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return argparse's type of an option that is a whole number within limits."""

    def number(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            limits = f"{low} to {high}" if high is not None else f"{low} or more"
            raise argparse.ArgumentTypeError(f"{value}: it must be {limits}")
        return value

    number.__name__ = "whole number"  # argparse: invalid whole number value
    return number
