"""Copies of a script's plain values, which are restored in place."""

from __future__ import annotations

import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hvd_elastic.errors import ScriptError
from hvd_elastic.training.rollback import SnapshotSource


def dump_value(
    name: str, value: Any, pickler: Callable[..., pickle.Pickler] = pickle.Pickler
) -> bytes:
    """Return a copy of a value of the State, for :func:`load_value`.

    Args:
        name: name of the value, for messages.
        value: the value.
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


def load_value(dumped: bytes) -> Any:
    """Return a new copy of the value."""
    return pickle.loads(dumped)  # noqa: S301  (it never left this process)


def put_back(present: Any, saved: Any, copy_tensor: Callable[[Any, Any], bool]) -> Any:
    """Return the saved value, if possible in the present object, which the script may refer to.

    Args:
        present: present value.
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
        objects: objects by name: those of the library, whose names begin with an underscore, and
            helpers of the script. Those that are a :class:`SnapshotSource` are copied.

    Attributes:
        dumped: copies of the states of further objects by name, which a frontend adds.

    Raises:
        ScriptError: a value cannot be copied; names it.
    """

    def __init__(self, plain: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
        self._plain = {name: dump_value(name, value) for name, value in plain.items()}
        self._own = {
            name: item.snapshot()
            for name, item in objects.items()
            if isinstance(item, SnapshotSource)
        }
        self.dumped: dict[str, bytes] = {}

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
