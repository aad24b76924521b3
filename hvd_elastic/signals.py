"""How this process takes signals for the length of a block.

Standard library only, since the set-up uses it before anything is installed.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def _handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, object], None]
) -> Iterator[None]:
    """Call ``handler`` for these signals; handlers from before are back afterwards.

    A signal that is ignored, as by nohup, stays so.
    """
    found = {number: signal.getsignal(number) for number in numbers}
    before = {number: each for number, each in found.items() if each != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that what the block has started is ended too."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    with _handled((signal.SIGTERM, signal.SIGHUP), end):
        yield


@contextlib.contextmanager
def delayed_signals() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP take effect here at the end of the block.

    Other than in :func:`uninterrupted`, a process that the block starts takes them at once.
    """
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        with _handled(numbers, lambda number, _frame: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the cleanup in the block is done."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
