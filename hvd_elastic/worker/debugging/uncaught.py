"""Finds the script's current line, and formats an exception that ends the script."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hvd_elastic.control.endings import explain_script_error
from hvd_elastic.errors import HvdElasticError

_WANTED = "HVD_ELASTIC_TRACEBACK"
_PACKAGE = Path(__file__).parents[2]
_FRONTENDS = ("torch", "tensorflow", "keras", "lightning", "transformers")
_ENTRIES = (
    *(str(_PACKAGE / room / "elastic.py") for room in _FRONTENDS),
    str(_PACKAGE / "script/run.py"),
)
"""Files between the script and its training function, whose frames do not help the user."""
_NOT_THE_SCRIPT = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(_PACKAGE / room) for room in _FRONTENDS),
    *(
        str(_PACKAGE / room)
        for room in ("engines", "worker", "input", "script", "communicator", "wire", "checkpoint")
    ),
    str(_PACKAGE / "frameworks.py"),
    "<frozen ",
)
"""Prefixes of file names whose code does not belong to the script."""


def tell_uncaught(tell: Callable[[str], bool] | None = None) -> None:
    """Install our hook for uncaught exceptions; later calls only set ``tell``.

    If the script has its own ``sys.excepthook``, that one prints the exception.

    Args:
        tell: called with the text; returns whether it was reported. None: print to stderr.
    """
    hook = sys.excepthook
    if not isinstance(hook, _Hook):
        hook = sys.excepthook = _Hook(hook)
    hook.tell = tell
    if tell is not None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # signals are the main thread's
            signal.signal(signal.SIGINT, hook.interrupt)


def show_instead(error: HvdElasticError) -> None:
    """Have the hook show our error in place of one of a framework that quotes it.

    The process then ends at once: threads of the framework may still run our code, and would wait
    for the interpreter that ends.
    """
    hook = sys.excepthook
    if isinstance(hook, _Hook):
        hook.instead = error


class _Hook:
    """Replacement for ``sys.excepthook`` that shows our own errors without a traceback."""

    def __init__(self, previous: Callable[..., Any]) -> None:
        self._previous = previous
        self.tell: Callable[[str], bool] | None = None
        self.instead: HvdElasticError | None = None
        self._was_interrupted = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT as Python does, and remember it."""
        self._was_interrupted = True
        signal.default_int_handler(number, frame)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, KeyboardInterrupt):
            text = _text(kind, error, _without_entry(trace))
            if not self._was_interrupted and self.tell is not None and self.tell(text):
                # Raised by the script: Python would end by SIGINT, as if somebody had sent that.
                raise SystemExit(1)
            self._previous(kind, error, trace)
            return
        whole = os.environ.get(_WANTED) == "1"
        quoted = self.instead
        if quoted is not None and str(quoted) in str(error) and not whole:
            self.instead = None
            self(type(quoted), quoted, trace)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        ours = isinstance(error, HvdElasticError) and not whole
        told = f"error: {_place(trace)}{error}\n"
        if not whole:
            trace = _without_entry(trace)
        own = self._previous is sys.__excepthook__
        hint = None if ours else explain_script_error(_text(kind, error, trace))
        if self.tell is not None and self.tell(told if ours else _text(kind, error, trace)) and own:
            return
        if ours and own:
            sys.stderr.write(told)
        else:
            self._previous(kind, error, trace)
        if hint is not None:
            sys.stderr.write(f"error: {hint}\n")


def _text(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    return "".join(traceback.format_exception(kind, error, trace))


def _place(trace: TracebackType | None) -> str:
    """Return the innermost line of the script in a traceback, such as "train.py, line 3: "."""
    found = ""
    for frame, line in traceback.walk_tb(trace):
        if not frame.f_code.co_filename.startswith((*_NOT_THE_SCRIPT, "<")):
            found = f"{frame.f_code.co_filename}, line {line}: "
    return found


def _without_entry(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that call the training function."""
    kept = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in _ENTRIES:
            kept.append(trace)
        trace = trace.tb_next
    for outer, inner in pairwise([*kept, None]):
        if outer is not None:
            outer.tb_next = inner
    return kept[0] if kept else None


def script_line() -> str:
    """Return where the main thread is in the script, such as "train.py:41 (validate)"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_NOT_THE_SCRIPT):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    return ""
