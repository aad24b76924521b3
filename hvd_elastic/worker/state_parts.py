"""Objects of the library that are part of the script's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_elastic.worker.frontend import State


class StateParts:
    """Objects that belong to the state by name, whether it is made before or after them."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._before_change: dict[str, Callable[[], None]] = {}
        self._state: State | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._objects

    def join(self, state: State) -> None:
        """Make the objects part of this state, and those that are added later."""
        self._state = state
        for name, item in self._objects.items():
            state.keep(name, item)

    def add_object(
        self, name: str, item: Any, before_change: Callable[[], None] | None = None
    ) -> None:
        """Add an object; see :meth:`Context.keep`."""
        self._objects[name] = item
        if before_change is not None:
            self._before_change[name] = before_change
        if self._state is not None:
            self._state.keep(name, item)

    def prepare_change(self) -> None:
        """Have the objects save what only a leaving rank may hold; all ranks call this."""
        for _, prepare in sorted(self._before_change.items()):
            prepare()
