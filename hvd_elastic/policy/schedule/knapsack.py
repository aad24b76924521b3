"""Choose one option of each job so that the sum of their values is largest and the slots suffice.

This integer program (Sia, SOSP 2023, section 3) is a multiple-choice knapsack when all slots are
alike. It is solved exactly by dynamic programming over the number of slots, in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def choose_options(
    slots: Sequence[np.ndarray], values: Sequence[np.ndarray], capacity: int
) -> list[int]:
    """Return the index of the chosen option of each job.

    Args:
        slots: for each job the whole numbers of slots of its options, one of them 0.
        values: for each job the values of its options; -inf: never chosen.
        capacity: number of slots of the cluster.

    Raises:
        ValueError: a job has no option with 0 slots.

    >>> worth = [np.array([0.0, 3.0, 5.0]), np.array([0.0, 4.0, 4.5])]
    >>> choose_options([np.array([0, 1, 2])] * 2, worth, 2)
    [1, 1]
    """
    count = len(slots)
    best = np.zeros(capacity + 1)
    taken = np.zeros((count, capacity + 1), np.int16)
    for job in range(count):
        sizes, worth = slots[job], values[job]
        if not np.any(sizes == 0):
            raise ValueError(f"job {job} has no option with 0 slots")
        free = int(np.argmin(sizes))
        reached, index = best + worth[free], taken[job]
        index[:] = free
        for option in np.argsort(sizes, kind="stable"):
            size = int(sizes[option])
            if option == free or size > capacity or worth[option] == -np.inf:
                continue
            tried = best[: capacity + 1 - size] + worth[option]
            better = tried > reached[size:]
            np.copyto(reached[size:], tried, where=better)
            np.copyto(index[size:], option, where=better)
        best = reached
    left, chosen = capacity, [0] * count
    for job in range(count - 1, -1, -1):
        chosen[job] = int(taken[job, left])
        left -= int(slots[job][chosen[job]])
    return chosen
