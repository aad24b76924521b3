"""The averagers of the script's optimizers, of which a loop body may use several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvd_elastic.errors import ScriptError
from hvd_elastic.worker.frontend import Averager, EagerAverager, GraphAverager


class Averagers:
    """The averagers whose optimizers train.

    With one, gradients are averaged during the backward pass, and the optimizer's step is the step
    of training. With several, each averages in its own step, since a backward pass may also fill
    gradients that another optimizer must not use (a generator's pass fills the discriminator's).
    Then a whole loop body is one step of training: the parameters and the state of an optimizer are
    copied before its first step in a body, and restored if the body fails.

    The same holds for one optimizer that steps several times in a body, if the script says so.

    Attributes:
        several: whether a whole body is one step: there is more than one, or one that says so.
    """

    def __init__(self) -> None:
        self._live: list[Averager] = []
        self.several = False

    def __iter__(self) -> Iterator[Averager]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def add_averager(self, averager: Averager, *, in_train: bool) -> None:
        """Add an averager in place of those that have a parameter in common with it.

        So a script may replace its optimizer.

        Args:
            averager: the new one.
            in_train: whether the training function runs.

        Raises:
            ScriptError: it would be one more while the training function runs.
        """
        live: list[Averager] = []
        for earlier in self._live:
            name = earlier.shared_with(averager)
            if not name:
                live.append(earlier)
                continue
            earlier.retire(
                f"its parameter {name!r} was given to DistributedOptimizer(...) again with another "
                "optimizer, and a parameter has one; leave it out of one of them"
            )
        if in_train and self._live and len(live) == len(self._live):
            raise ScriptError(
                "DistributedOptimizer() is called in the training function for one optimizer more. "
                "The function is called again after a failure, and a worker that joins has to know "
                "all optimizers: make them before it, and put each into the State"
            )
        self._set([*live, averager])

    def choose(self, chosen: Sequence[Averager]) -> None:
        """Have exactly these train, and retire the others: training begins."""
        for averager in self._live:
            if averager not in chosen:
                averager.retire(
                    "it is not in the State, as others are, so a worker that joins would not have "
                    "its state; put it there: hvd.State(..., second_optimizer=second_optimizer)"
                )
        self._set(list(chosen))

    def _set(self, live: list[Averager]) -> None:
        self._live = live
        self.several = len(live) > 1 or any(averager.several_steps for averager in live)
        for number, averager in enumerate(live):
            averager.engage(number)

    @property
    def steps(self) -> int:
        """Number of steps that an optimizer has taken on its own; with several, bodies count."""
        return 0 if self.several or not self._live else self._live[0].steps

    @property
    def eager(self) -> list[EagerAverager]:
        """Those of a framework that computes gradient after gradient."""
        return [each for each in self._live if isinstance(each, EagerAverager)]

    @property
    def graphs(self) -> list[GraphAverager]:
        """Those of a framework whose steps are graphs."""
        return [each for each in self._live if isinstance(each, GraphAverager)]

    @property
    def local(self) -> bool:
        """Return whether a step of training is a period of steps that each rank takes alone."""
        return any(averager.local for averager in self.eager)

    @property
    def idle(self) -> str:
        """See :attr:`Averager.idle`; one optimizer that trains is enough."""
        idle = [averager.idle for averager in self._live]
        return idle[0] if idle and all(idle) else ""

    @property
    def flags_meet(self) -> str:
        """See :attr:`EagerAverager.flags_meet`; with several, flags go alone."""
        return self.eager[0].flags_meet if self.eager and not self.several else ""

    def learning_rate(self) -> float | None:
        """Return the learning rate of the first optimizer, or None."""
        return self._live[0].learning_rate() if self._live else None

    def forget(self) -> None:
        """Forget steps that ended without ``step()``; called when the next body begins."""
        for averager in self._live:
            averager.forget()

    def pass_begins(self) -> None:
        """See :meth:`EagerAverager.pass_begins`."""
        for averager in self.eager:
            averager.pass_begins()

    def weight_sums(self) -> list[tuple[str, int]]:
        """See :meth:`EagerAverager.weight_sums`."""
        return [each for averager in self.eager for each in averager.weight_sums()]

    def leave_out(self) -> None:
        """See :meth:`Averager.leave_out`; with several, the exchange of the body checks it."""
        if not self.several:
            for averager in self._live:
                averager.leave_out()

    def prepare(self) -> None:
        """See :meth:`GraphAverager.prepare`."""
        for averager in self.graphs:
            averager.prepare()

    def collect(self, *, collectives: bool = True) -> None:
        """See :meth:`GraphAverager.collect`."""
        for averager in self.graphs:
            averager.collect(collectives=collectives)

    def absorb(self) -> None:
        """See :meth:`EagerAverager.absorb`."""
        for averager in self.eager:
            averager.absorb()

    def reset(self) -> None:
        """Drop a step that failed half way, with all gradients."""
        for averager in self._live:
            averager.reset()

    def restore(self) -> None:
        """Undo the steps that optimizers have taken since :meth:`drop_copies`."""
        for averager in self._live:
            averager.restore()

    def drop_copies(self) -> None:
        """Make the present parameters and optimizer states those to go back to."""
        for averager in self._live:
            averager.drop_copy()
