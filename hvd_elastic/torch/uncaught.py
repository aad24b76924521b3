"""How an exception that ends the script is told: a user's mistake by its message alone."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from hvd_elastic.errors import HvdElasticError

__all__ = ["tell_uncaught"]

_WANTED = "HVD_ELASTIC_TRACEBACK"


def tell_uncaught(tell: Callable[[str], bool] | None = None) -> None:
    """Have Python tell of an exception in our way; calls after the first only set ``tell``.

    Where the script has a hook of its own, that one shows it, ours included.

    Args:
        tell: is given the words; whether it has shown them. None: they go to stderr.
    """
    hook = sys.excepthook
    if not isinstance(hook, _Hook):
        hook = sys.excepthook = _Hook(hook)
    hook.tell = tell


class _Hook:
    """In place of ``sys.excepthook``."""

    def __init__(self, previous: Callable[..., Any]) -> None:
        self._previous = previous
        self.tell: Callable[[str], bool] | None = None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._previous(kind, error, trace)
            return
        ours = isinstance(error, HvdElasticError) and os.environ.get(_WANTED) != "1"
        own = self._previous is sys.__excepthook__
        if self.tell is not None:
            text = "".join(traceback.format_exception(kind, error, trace))
            if self.tell(f"{kind.__name__}: {error}\n" if ours else text) and own:
                return
        if ours and own:
            sys.stderr.write(f"error: {error}\n")
        else:
            self._previous(kind, error, trace)
