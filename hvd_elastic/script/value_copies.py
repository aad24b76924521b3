"""Copies of a script's plain values, which are restored in place."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hvd_elastic.script.helper_copies import HelperCopies, dump_value
from hvd_elastic.worker.rollback import SnapshotSource


def load_value(dumped: bytes) -> Any:
    """Return a new copy of the value."""
    return pickle.loads(dumped)  # noqa: S301  (it never left this process)


def put_back(present: Any, saved: Any, copy_tensor: Callable[[Any, Any], bool]) -> Any:
    """Return the saved value, if possible in the present object, which the script may refer to.

    Args:
        saved: value to restore.
        copy_tensor: overwrites a tensor with another of its type; returns whether that is possible.
    """
    if type(present) is not type(saved):
        return saved
    if isinstance(saved, list):
        present[:] = saved
    elif isinstance(saved, (dict, set)):
        present.clear()
        present.update(saved)
    elif not copy_tensor(present, saved):
        return saved
    return present


class ValueCopies(ABC):
    """Copies of a state's plain values, and of objects.

    Args:
        plain: plain values by name.
        objects: objects by name: those of the library, whose names begin with an underscore and
            which are copied only if they are a :class:`SnapshotSource`, and helpers of the script.
        helpers: copies those helpers that are none.
        always: copy them however long that takes, as at the end of an epoch.

    Attributes:
        dumped: copies of the states of helpers, and of what a frontend adds, by name.

    Raises:
        ScriptError: a value cannot be copied; names it.
    """

    def __init__(
        self,
        plain: Mapping[str, Any],
        objects: Mapping[str, Any],
        helpers: HelperCopies,
        *,
        always: bool,
    ) -> None:
        self._plain = {name: dump_value(name, value) for name, value in plain.items()}
        self._own: dict[str, Any] = {}
        self.dumped: dict[str, bytes] = {}
        for name, item in objects.items():
            if isinstance(item, SnapshotSource):
                self._own[name] = item.snapshot()
            elif not name.startswith("_"):
                copied = helpers.copy(name, item, always=always)
                if copied is not None:
                    self.dumped[name] = copied

    def restore(self, plain: dict[str, Any], objects: Mapping[str, Any]) -> None:
        """Restore everything in place, and remove plain values that were added since.

        Args:
            plain, objects: as they are now.
        """
        for name in [name for name in plain if name not in self._plain]:
            del plain[name]
        for name, dumped in self._plain.items():
            plain[name] = put_back(plain.get(name), load_value(dumped), self.copy_tensor)
        for name, values in self._own.items():
            objects[name].roll_back(values)
        for name, dumped in self.dumped.items():
            self.set_back(objects[name], load_value(dumped))

    @abstractmethod
    def copy_tensor(self, present: Any, saved: Any) -> bool:
        """Overwrite a tensor with another of its type; return whether that is possible."""

    def set_back(self, item: Any, state: Any) -> None:
        """Set an object to its state in :attr:`dumped`."""
        item.load_state_dict(state)

    def differences(self, later: ValueCopies) -> set[str]:
        """Return the names of the values that differ in a later copy."""
        return {
            name
            for mine, theirs in ((self._plain, later._plain), (self.dumped, later.dumped))
            for name in {**mine, **theirs}
            if mine.get(name) != theirs.get(name)
        }
