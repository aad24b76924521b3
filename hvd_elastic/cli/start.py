"""Where every program starts: Ctrl-C is answered before anything large is imported.

A KeyboardInterrupt in the middle of an import shows its traceback, or is lost in a callback of the
import system. Until a command begins there is nothing to clean up, so the process just ends.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal loads enum
import os
import sys

TYPE_CHECKING = False  # typing is slow to load
if TYPE_CHECKING:
    from types import FrameType

__all__ = [
    "INTERRUPTED",
    "checkclust",
    "copyclust",
    "end_at_interrupt",
    "hvd_elastic",
    "killclust",
    "raise_at_interrupt",
    "runclust",
    "virtclust",
]

INTERRUPTED = 130


def end_at_interrupt() -> None:
    """From now on Ctrl-C ends the process at once; where it is ignored or handled, it stays so."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _end)


def raise_at_interrupt() -> None:
    """Undoes :func:`end_at_interrupt`: Ctrl-C raises KeyboardInterrupt again."""
    if _signal.getsignal(_signal.SIGINT) is _end:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _open_streams() -> None:
    """Has what the caller closed (``2>&-``) lead nowhere; else the next file got its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: PTH123, SIM115


def _begin() -> None:
    """What must be so before anything else is loaded."""
    _open_streams()
    end_at_interrupt()


def _call(module: str, function: str) -> None:
    import gc
    import importlib

    # What is loaded stays: looking through it for garbage takes a tenth of the start.
    gc.disable()
    begin = getattr(importlib.import_module(module), function)
    gc.freeze()
    gc.enable()
    begin()


def _start(module: str, function: str) -> None:
    _begin()
    _call(module, function)


def hvd_elastic() -> None:
    """Entry point of ``hvd-elastic``."""
    _start("hvd_elastic.cli.app", "main")


def runclust() -> None:
    """Entry point of ``runclust``; a keeper does what it can without much being loaded here."""
    _begin()
    from hvd_elastic.cli import warm

    status = warm.call(sys.argv[1:])
    if status is not None:
        os._exit(status)
    _call("hvd_elastic.cli.cluster_tools", "runclust_main")


def copyclust() -> None:
    """Entry point of ``copyclust``."""
    _start("hvd_elastic.cli.cluster_tools", "copyclust_main")


def killclust() -> None:
    """Entry point of ``killclust``."""
    _start("hvd_elastic.cli.cluster_tools", "killclust_main")


def checkclust() -> None:
    """Entry point of ``checkclust``."""
    _start("hvd_elastic.cli.cluster_tools", "checkclust_main")


def virtclust() -> None:
    """Entry point of ``virtclust``."""
    _start("hvd_elastic.cli.virtclust", "main")
