"""Plain attributes of objects that a library's loop calls, such as callbacks.

They are of the script's own making, decide what ranks do, and are in no ``state_dict()``.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

_DICTS = (dict, defaultdict, OrderedDict, Counter)
_LISTS = (list, deque)
_ROWS = (*_LISTS, set, frozenset, tuple)
_PLAIN = (bool, int, float, str, torch.Tensor, np.ndarray, np.generic, type(None))
_SMALL = 4096
"""Most elements of a tensor that is copied each time; another is where it was changed in place."""
_SHORT = 64
"""Most entries of a list whose entries may be changed in place."""


class _Kept:
    """A tensor, and a copy to which it is set back in place."""

    def __init__(self, tensor: torch.Tensor, before: Any) -> None:
        self.tensor, self._version = tensor, _version(tensor)
        same = isinstance(before, _Kept) and before.tensor is tensor and tensor.numel() > _SMALL
        unchanged = same and before._version == self._version
        self.copied: torch.Tensor = before.copied if unchanged else tensor.detach().clone()

    def back(self) -> torch.Tensor:
        if self.tensor.is_inference():
            return self.copied.clone()
        if _version(self.tensor) != self._version:
            with torch.no_grad():
                self.tensor.copy_(self.copied)
            self._version = _version(self.tensor)
        return self.tensor


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def numbered(things: Iterable[Any], left_out: tuple[type, ...]) -> dict[str, Any]:
    """Return objects by number and class, which are names that all ranks have, without some."""
    return {
        f"{number}.{type(each).__name__}": each
        for number, each in enumerate(things)
        if not isinstance(each, left_out)
    }


class Attributes:
    """Plain attributes of several objects: numbers, text, tensors, arrays, containers of them.

    Args:
        things: returns the objects by name.
        leave_out: whether an attribute of an object is of this process alone.
        always: names of attributes that other ranks take over even if they have not changed.
    """

    def __init__(
        self,
        things: Callable[[], Mapping[str, Any]],
        leave_out: Callable[[Any, str], bool],
        always: Container[str] = (),
    ) -> None:
        self._things, self._leave_out, self._always = things, leave_out, always
        self._last: dict[str, dict[str, Any]] = {}
        self._before = self.snapshot()

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return what :meth:`roll_back` needs; cheap, since it is called after each step."""
        found = {}
        for name, item in self._things().items():
            old = self._last.get(name, {})
            found[name] = {
                key: _copied(value, old.get(key))
                for key, value in vars(item).items()
                if not self._leave_out(item, key) and _is_plain(value)
            }
        self._last = found
        return found

    def roll_back(self, values: Mapping[str, Any]) -> None:
        """Go back to an earlier :meth:`snapshot`."""
        for name, item in self._things().items():
            own = vars(item)
            for key, value in values.get(name, {}).items():
                _put(own, key, _back(value))

    def state_dict(self) -> dict[str, Any]:
        """Return for other ranks, as plain values, what has changed since this was made."""
        return {
            name: {
                key: value
                for key, value in _sent(found).items()
                if key in self._always or not _same(value, _sent(self._before[name].get(key, self)))
            }
            for name, found in self.snapshot().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` has returned on another rank."""
        self.roll_back(self._before)
        for name, item in self._things().items():
            own = vars(item)
            for key, value in state.get(name, {}).items():
                _put(own, key, _like(own.get(key), value))


def _put(own: dict[str, Any], key: str, value: Any) -> None:
    """Set an attribute, unless an object was made here since it was None, or is None elsewhere."""
    if value is not None or _is_plain(own.get(key)):
        own[key] = value


def _is_plain(value: Any) -> bool:
    """Return whether a value can be copied, and sent to other ranks."""
    if type(value) in _ROWS:
        return all(map(_is_plain, islice(value, 1)))  # of one kind, and a history is long
    if type(value) in _DICTS:
        return all(map(_is_plain, (*value, *value.values())))
    return isinstance(value, _PLAIN) and not isinstance(value, torch.nn.Parameter)


def _filled(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a copy of a value; ``change`` is given key and entry of those that may change."""
    if type(value) in (tuple, frozenset):
        return value
    found = copy.copy(value)
    if isinstance(value, dict):
        for key, each in value.items():
            found[key] = change(key, each)
    elif type(value) in _LISTS and len(value) <= _SHORT:
        for number, each in enumerate(value):
            if isinstance(each, (*_LISTS, dict, set, np.ndarray)):
                found[number] = change(None, each)
    return found


def _copied(value: Any, before: Any = None) -> Any:
    if isinstance(value, torch.Tensor):
        return _Kept(value, before)
    old = before if isinstance(before, dict) else {}
    return _filled(value, lambda key, each: _copied(each, old.get(key)))


def _back(value: Any) -> Any:
    if isinstance(value, _Kept):
        return value.back()
    return _filled(value, lambda _, each: _back(each))


def _sent(value: Any) -> Any:
    if isinstance(value, _Kept):
        return value.copied
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(value.copy()) if value.shape else value.item()
    if isinstance(value, dict):
        return {key: _sent(each) for key, each in value.items()}
    return [_sent(each) for each in value] if type(value) in _ROWS else value


def _like(own: Any, value: Any) -> Any:
    """Return a received value in the type that it has here."""
    kind = type(own)
    if kind in (*_DICTS, deque) and isinstance(value, (dict, list)):
        found = copy.copy(own)  # has the default of a defaultdict, and the length of a deque
        found.clear()
        if isinstance(value, list):
            found.extend(value)
        else:
            found.update({key: _like(own.get(key), each) for key, each in value.items()})
        return found
    if isinstance(own, np.ndarray) and isinstance(value, torch.Tensor):
        return value.numpy()
    return kind(value) if kind in _ROWS and isinstance(value, list) else value


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
