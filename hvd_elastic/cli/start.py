"""Start every program, and handle Ctrl-C before large modules are imported.

A KeyboardInterrupt during an import shows a traceback or gets lost in a callback of the import
system. Before a command begins there is nothing to clean up, so Ctrl-C ends the process at once.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from functools import partial
from types import FrameType

INTERRUPTED = 130


def end_at_interrupt() -> None:
    """Let Ctrl-C end the process at once, unless SIGINT is ignored or handled."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_process)


def raise_at_interrupt() -> None:
    """Undo :func:`end_at_interrupt`: Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end_process:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_process(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _open_streams() -> None:
    """Redirect closed standard streams (``2>&-``) to /dev/null.

    Otherwise the next file that is opened would get their descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: PTH123, SIM115


def _start(module: str, function: str) -> None:
    _open_streams()
    end_at_interrupt()
    # Garbage collection during imports would take a tenth of the start-up time.
    gc.disable()
    begin = getattr(importlib.import_module(module), function)
    gc.freeze()
    gc.enable()
    begin()


# The entry points of the programs.
hvd_elastic = partial(_start, "hvd_elastic.cli.app", "main")
runclust = partial(_start, "hvd_elastic.cli.cluster.tools", "runclust_main")
copyclust = partial(_start, "hvd_elastic.cli.cluster.tools", "copyclust_main")
killclust = partial(_start, "hvd_elastic.cli.cluster.tools", "killclust_main")
checkclust = partial(_start, "hvd_elastic.cli.cluster.tools", "checkclust_main")
virtclust = partial(_start, "hvd_elastic.cli.machine.virtclust", "main")
