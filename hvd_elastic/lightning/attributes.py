"""Plain attributes of callbacks and of the module: numbers, text, arrays, containers of them."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch

_DICTS = (dict, defaultdict, OrderedDict, Counter)
_LISTS = (list, deque)
_ROWS = (*_LISTS, set, frozenset, tuple)
_PLAIN = (bool, int, float, str, torch.Tensor, np.ndarray, np.generic, type(None))
_OF_PROCESS = ("training", "_last_time_checked")
"""Attributes that are of this process."""
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
        """Return the tensor as it was."""
        if self.tensor.is_inference():
            return self.copied.clone()
        if _version(self.tensor) != self._version:
            with torch.no_grad():
                self.tensor.copy_(self.copied)
            self._version = _version(self.tensor)
        return self.tensor


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def is_plain(value: Any) -> bool:
    """Return whether a value can be copied, and sent to other ranks."""
    if type(value) in _ROWS:
        return all(map(is_plain, islice(value, 1)))  # of one kind, and a history is long
    if type(value) in _DICTS:
        return all(map(is_plain, (*value, *value.values())))
    return isinstance(value, _PLAIN) and not isinstance(value, torch.nn.Parameter)


def remembered(item: Any, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return copies of the plain attributes of an object; ``before``: those of the last time."""
    is_module, old = isinstance(item, torch.nn.Module), before or {}
    return {
        key: _copied(value, old.get(key))
        for key, value in vars(item).items()
        if key not in _OF_PROCESS and not (is_module and key[0] == "_") and is_plain(value)
    }


def set_back(item: Any, attributes: dict[str, Any]) -> None:
    """Give an object what :func:`remembered` has returned."""
    vars(item).update({key: _back(value) for key, value in attributes.items()})


def told(attributes: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return for other ranks, as plain values, what differs from ``before``."""
    found = {key: _sent(value) for key, value in attributes.items()}
    return {
        key: value
        for key, value in found.items()
        if key == "dirpath" or key not in before or not _same(value, _sent(before[key]))
    }


def take(item: Any, values: dict[str, Any], before: dict[str, Any]) -> None:
    """Give an object the attributes of another rank, which has :func:`told` them."""
    set_back(item, before)
    for key, value in values.items():
        vars(item)[key] = _like(vars(item).get(key), value)


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
        (found.extend if kind is deque else found.update)(value)
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
