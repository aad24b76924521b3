"""The problems of which it is counted how many examples they need."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROBLEMS", "SCALES", "Problem"]

SCALES = (1, 2, 4, 8, 16)
"""Batch sizes over the initial one."""


@dataclass(frozen=True)
class Problem:
    """What its trainings have to reach.

    Attributes:
        initial: global batch size, as in the example of ``scripts/examples``, and in the
            benchmark's other parts.
        rate: learning rate for it: of the digits the best of 0.0125 to 0.2, in steps of the square
            root of 2, of the characters that of the example.
        level: loss to reach: of all training examples (digits), of text held out (characters).
        look_examples: examples between looks at the loss, a step at least.
        most_examples: after which a training is given up.
    """

    initial: int
    rate: float
    level: float
    look_examples: int
    most_examples: int


PROBLEMS = {
    "digits": Problem(32, 0.025, 0.01, 512, 300_000),
    "characters": Problem(32, 1e-3, 2.4, 1024, 400_000),
}
