"""Plain attributes of objects that a library's loop calls, such as callbacks.

They are of the script's own making, decide what ranks do, and are in no ``state_dict()``.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch

_SMALL = 4096
"""Most elements of a tensor that is copied with the attributes after each step."""
_DICTS = (dict, defaultdict, OrderedDict)


def remembered(item: Any, leave_out: Callable[[str], bool]) -> dict[str, Any]:
    """Return the plain attributes of an object, with containers of their own.

    Args:
        item: numbers, strings, small tensors, and lists and dicts of them are copied.
        leave_out: whether an attribute of that name is of this process alone.
    """
    return {
        key: copied(value)
        for key, value in vars(item).items()
        if not leave_out(key) and _is_plain(value)
    }


def set_back(item: Any, values: dict[str, Any]) -> None:
    """Set attributes of an object to what :func:`remembered` has returned, here or elsewhere.

    An object that was made here since stays: it was None elsewhere, or before.
    """
    own = vars(item)
    for key, value in values.items():
        present = own.get(key)
        if value is not None or _is_plain(present):
            own[key] = _like(present, value)


def copied(value: Any) -> Any:
    """Return a copy of a plain value that no later change of the first one reaches."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() <= _SMALL else value
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [*value] if isinstance(value, list) else value


def same(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (bool, int, float, str, torch.Tensor, type(None))):
        return not isinstance(value, torch.nn.Parameter)
    if isinstance(value, list):
        return all(map(_is_plain, value[:1]))  # of one kind, and a history is long
    return type(value) in _DICTS and all(map(_is_plain, (*value, *value.values())))


def _like(present: Any, value: Any) -> Any:
    """Return a copy of a value, with dicts of the kinds that are there."""
    if not isinstance(value, dict):
        return copied(value)
    found = present if isinstance(present, dict) else {}
    content = {key: _like(found.get(key), each) for key, each in value.items()}
    if isinstance(present, defaultdict):
        return defaultdict(present.default_factory, content)
    return OrderedDict(content) if isinstance(present, OrderedDict) else content
