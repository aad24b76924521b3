"""Decides which helper objects of a State are copied at the end of each loop body.

A replay buffer of gigabytes cannot be copied so often, and an average that is updated right after
the step need not be, since it belongs to the step.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import bytes_words

_SMALL_BYTES = 1 << 20
"""States up to this size are always copied: that takes less than 1 % of a step of 30 ms."""
_SHARE = 0.01
"""Part of the time that copies of a larger one may take."""
_CREDIT_S = 0.05
"""Time that copies may take beyond it, so that a busy moment decides nothing."""


def dump_value(
    name: str, value: Any, pickler: Callable[..., pickle.Pickler] = pickle.Pickler
) -> bytes:
    """Return a copy of a value of the State, for :func:`load_value`.

    Args:
        name: name of the value, for messages.
        pickler: makes the copy.

    Raises:
        ScriptError: it cannot be copied; names it.
    """
    stream = io.BytesIO()
    try:
        pickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
        return stream.getvalue()
    except Exception as error:  # pickle and what it calls raise many kinds
        raise ScriptError(
            f"State: {name!r} cannot be copied ({type(error).__name__}: {error}), which is needed "
            "to undo a step that fails. Keep numbers, strings, lists, dicts and tensors in it"
        ) from error


@dataclass
class _Helper:
    """A helper object whose state is not small.

    Attributes:
        left_s: time that its copies may take now [s].
        paid_at: when the last of them was made [s].
        is_too_large: whether it is not copied at the end of each loop body any more.
        next_look: when it is compared again [s].
        before: copy from the end of the last loop body; None: it is not compared in this one.
    """

    left_s: float
    paid_at: float
    is_too_large: bool = False
    next_look: float = 0.0
    before: bytes | None = None


class HelperCopies:
    """Copies helper objects as often as the time for it allows; finds changes of the others.

    Args:
        pickler: makes the copies.
        clock: time [s].
    """

    def __init__(
        self,
        pickler: Callable[..., pickle.Pickler] = pickle.Pickler,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pickler = pickler
        self._clock = clock
        self._helpers: dict[str, _Helper] = {}

    def body_ends(self) -> None:
        """Note that the next copies are those of the end of a loop body, or of its beginning."""
        for helper in self._helpers.values():
            helper.before = None

    def copy(self, name: str, item: Any, *, always: bool) -> bytes | None:
        """Return a copy of the state of an object; None: that would take too long.

        Args:
            item: object with ``state_dict()``.
            always: copy it however long that takes, as at the end of an epoch.
        """
        began = self._clock()
        helper = self._helpers.get(name)
        if helper and helper.is_too_large and not always and began < helper.next_look:
            return None
        dumped = dump_value(name, item.state_dict(), self._pickler)
        if len(dumped) <= _SMALL_BYTES:
            return dumped
        helper = self._helpers.setdefault(name, _Helper(_CREDIT_S, began))
        earned_s = _SHARE * (began - helper.paid_at)
        helper.left_s = min(_CREDIT_S, helper.left_s + earned_s) - (self._clock() - began)
        helper.paid_at = began
        helper.is_too_large = helper.is_too_large or helper.left_s < 0
        if helper.is_too_large:
            helper.before = dumped
        return dumped

    def refuse_changed(self, objects: dict[str, Any], call: str) -> None:
        """Compare objects that are too large to be copied; called before an optimizer's step.

        Args:
            objects: the objects by name.
            call: what a script takes a step with, for the message.

        Raises:
            ScriptError: one has changed since the loop body began; names it, and what to do.
        """
        for name, helper in self._helpers.items():
            before, helper.before = helper.before, None
            if before is None or name not in objects:
                continue
            began = self._clock()
            if dump_value(name, objects[name].state_dict(), self._pickler) != before:
                kind, size = type(objects[name]).__name__, bytes_words(len(before))
                raise ScriptError(
                    f"State({name}=...): this {kind} changes in the loop body before {call}. "
                    f"If a step fails it has to be set back, and copying {size} "
                    "after each step would take more than 1 % of the time. Give it a method "
                    "snapshot(), which returns what roll_back(values) needs to undo what follows "
                    f"(docs/training-script.md); or change it right after {call}, where its change "
                    "belongs to the step"
                )
            helper.next_look = began + 2 * (self._clock() - began) / _SHARE
