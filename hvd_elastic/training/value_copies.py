"""Copies of a script's plain values, which are restored in place."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

from hvd_elastic.errors import ScriptError


def dump_value(name: str, value: Any) -> bytes:
    """Return a copy of a value of the State, for :func:`load_value`.

    Raises:
        ScriptError: it cannot be copied; names it.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
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


def differing(*pairs: tuple[Mapping[str, bytes], Mapping[str, bytes]]) -> set[str]:
    """Return the names of values whose copies differ, in any pair of sets of copies."""
    return {
        name
        for mine, theirs in pairs
        for name in {**mine, **theirs}
        if mine.get(name) != theirs.get(name)
    }
