"""Finds what an interrupted loop body has left in lists and dicts of the script's modules.

They are not part of the State, so they are not restored, and the body runs again on top of them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hvd_elastic.formatting import count
from hvd_elastic.worker.frontend import State

_CONTAINERS = (list, dict, set, deque)


class Leftovers:
    """Lengths of the containers that are attributes of a State's modules."""

    def __init__(self) -> None:
        self._found: list[tuple[str, dict[str, Any], str]] = []
        self._lengths: list[int] = []

    def find(self, state: State) -> None:
        """Find the containers; called once a loop, since it visits all modules."""
        self._found = [
            (f"{name}.{key}", attributes, key)
            for name, attributes in state.module_attributes()
            for key, value in attributes.items()
            if isinstance(value, _CONTAINERS) and not key.startswith("_")
        ]
        self.note_lengths()

    def note_lengths(self) -> None:
        """Note the lengths; called at the end of each loop body."""
        if self._found:
            self._lengths = self._now()

    def _now(self) -> list[int]:
        return [
            len(value) if isinstance(value := attributes.get(key), _CONTAINERS) else 0
            for _, attributes, key in self._found
        ]

    def left(self) -> str:
        """Return a warning of what has another length now than was noted last, or ""."""
        changed = [
            f"{name} has {count(now, 'entry')} and had {before}"
            for (name, *_), before, now in zip(self._found, self._lengths, self._now(), strict=True)
            if before != now
        ]
        if not changed:
            return ""
        return (
            f"a loop body was interrupted, and has left behind what is not in the State: "
            f"{', '.join(changed[:3])} at the end of the body before. The body runs again on top "
            "of it: empty such objects first in the body, or put what they hold into the State"
        )
