"""Chooses the few gradients that show at little cost whether those of a step are finite.

A NaN or infinite loss makes the gradients of all parameters that it depends on not finite, and a
NaN that arises in the backward pass spreads to the gradients of earlier layers. So the smallest
parameter in each part of the model is enough, and is left out if it is large.
"""

from __future__ import annotations

from collections.abc import Sequence

_PARTS = 8  # parts of the model in each of which one gradient is checked for NaN and infinity
_NUMBERS = 1 << 14  # larger gradients are not checked, so that the check takes no time


def canaries(sizes: Sequence[int]) -> list[int]:
    """Return the indices of the parameters to check.

    Args:
        sizes: number of elements of each parameter, in the order of the model.

    >>> canaries([5, 3, 20_000, 7])
    [0, 1, 3]
    >>> canaries([])  # all of them are frozen
    []
    """
    if not sizes:
        return []
    length = -(-len(sizes) // _PARTS)
    parts = [range(at, min(at + length, len(sizes))) for at in range(0, len(sizes), length)]
    smallest = [min(part, key=sizes.__getitem__) for part in parts]
    most = max(_NUMBERS, min(sizes[index] for index in smallest))
    return [index for index in smallest if sizes[index] <= most]
