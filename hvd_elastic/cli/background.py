"""Do work in a process of its own that outlives this one, with its output in a log."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import typer

from hvd_elastic.errors import HvdElasticError

Work = Callable[[Callable[[], None]], int]
"""Work, which calls what it is given as soon as it has begun, and returns an exit status."""
_BEGUN = b"begun"


def fork_with_log(log: Path, work: Callable[[], int]) -> int:
    """Fork a process in a session of its own, whose output goes to a log; return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (file, 1), (file, 2)):
            os.dup2(source, target)
        os.environ.pop("COLUMNS", None)
        status = work()
    except HvdElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        status = error.exit_status
    except BaseException:  # noqa: BLE001  (a forked child must not return into its parent's code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def begin_in_background(name: str, log: Path, work: Work) -> None:
    """Have a process of its own do work; return when it has begun.

    Args:
        name: what does the work, for messages.

    Raises:
        typer.Exit: it could not begin; the reason was printed.
    """
    answer, to_terminal = os.pipe()

    def tell(text: bytes) -> None:
        nonlocal to_terminal
        # Later, nobody reads any more, and the descriptor may be that of another file.
        number, to_terminal = to_terminal, -1
        if number >= 0:
            with contextlib.suppress(OSError):  # after Ctrl-C, the other end of the pipe is closed
                os.write(number, text)
            os.close(number)

    def do_and_tell() -> int:
        os.close(answer)
        try:
            return work(lambda: tell(_BEGUN))
        except HvdElasticError as error:
            if to_terminal < 0:
                raise
            tell(f"{error.exit_status} error: {error}".encode())
            return error.exit_status

    child = fork_with_log(log, do_and_tell)
    os.close(to_terminal)
    with open(answer, "rb") as told:  # noqa: PTH123
        try:
            said = told.read()
        except KeyboardInterrupt:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGINT)
            raise
    if said != _BEGUN:
        status, _, text = said.decode(errors="replace").partition(" ")
        print(text or f"error: the {name} ended before it began; see {log}", file=sys.stderr)
        raise typer.Exit(int(status or 1))
