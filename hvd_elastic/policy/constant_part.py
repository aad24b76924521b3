"""What part of a pass takes the same time for any number of examples, as the ranks show it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hvd_elastic.model.shares import TimedTwice, constant_examples

__all__ = ["ConstantPart"]

_KEPT = 32


class ConstantPart:
    """Learns it whenever a rank gets another share, or all get another batch.

    Attributes:
        examples: so many take as long as what is constant in a pass; 0 until it has shown.

    >>> part = ConstantPart()
    >>> part.note(["a", "b"], 1, [16, 16], [0.26, 0.78])
    >>> part.examples
    0.0
    >>> part.note(["a", "b"], 1, [24, 8], [0.34, 0.54])
    >>> round(part.examples)
    10
    """

    def __init__(self) -> None:
        self._last: tuple[Sequence[str], int, Sequence[float], Sequence[float]] | None = None
        self._pairs: deque[TimedTwice] = deque(maxlen=_KEPT)
        self.examples = 0.0

    def note(
        self, ranks: Sequence[str], passes: int, examples: Sequence[float], own_s: Sequence[float]
    ) -> None:
        """A report.

        Args:
            ranks: the host of each; in another world they are others.
            passes: in which each makes its examples.
            examples: of each rank in a step.
            own_s: own time of each for it, above 0 [s].
        """
        last, self._last = self._last, (ranks, passes, examples, own_s)
        if last is None or last[0] != ranks or last[1:3] == (passes, examples):
            return
        before = zip(last[2], last[3], strict=True)
        for (made, took_s), makes, takes_s in zip(before, examples, own_s, strict=True):
            self._pairs.append(TimedTwice(last[1], made, took_s, passes, makes, takes_s))
        found = constant_examples(self._pairs)
        self.examples = self.examples if found is None else found
