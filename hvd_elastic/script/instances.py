"""Find objects of this process by what they refer to.

``gc.get_objects()`` would also return a tuple that another thread is about to make, of a script or
of a library. Whoever holds it has that thread fail with a ``SystemError``.
"""

from __future__ import annotations

import gc
from typing import Any, TypeVar

T = TypeVar("T")


def instances_of(kind: type[T]) -> list[T]:
    """Return the objects of a class that is written in Python, and of its subclasses."""
    kinds = [kind]
    for each in kinds:
        kinds += each.__subclasses__()
    return _of(kind, gc.get_referrers(*kinds))


def holders_of(item: object, kind: type[T]) -> list[T]:
    """Return the objects of such a class that have the item as the value of an attribute."""
    found = gc.get_referrers(item)
    # Some objects have a dict for their attributes, others refer to the values themselves.
    return _of(kind, found + gc.get_referrers(*(each for each in found if type(each) is dict)))


def _of(kind: type[T], found: list[Any]) -> list[T]:
    return list({id(each): each for each in found if issubclass(type(each), kind)}.values())
