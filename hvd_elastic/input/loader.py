"""The part of a loader that all frontends share: the order of its data, the steps of an epoch."""

from __future__ import annotations

from typing import NoReturn

from hvd_elastic.input.data_order import DataOrder
from hvd_elastic.input.shared import SharedReading
from hvd_elastic.worker import context as training
from hvd_elastic.worker.context import Context


class OrderedLoader:
    """A dataset in its order, registered with the training once.

    Args:
        order: order of the examples.
        shared: reads them where input hosts help, or each example is seeded.
        context: training context; None: that of this process, from when it is initialised.
    """

    def __init__(
        self, order: DataOrder, shared: SharedReading, context: Context | None = None
    ) -> None:
        self._order = order
        self._shared = shared
        self._given_context = context
        self._registered: Context | None = None
        # A loader created before hvd.init() is registered when it is first used.
        if context is not None or training.is_initialized():
            self._context()

    def _context(self) -> Context:
        """Register the data with the training context, once; return the context."""
        context = self._given_context or training.current()
        if self._registered is not context:
            self._registered = context
            self._order.register(context)
            self._shared.offer(context, self._order.digest)
        return context

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch at the present world size.

        Before the ranks are known it is that of one rank. No world size has more steps, and at most
        the last two of an epoch are one elsewhere, so a schedule of this length is never too short.
        """
        worker = self._context().worker
        return self._order.steps_from(0, worker.size if worker.has_ranks else 1)

    @property
    def position(self) -> int:
        """Examples of the current epoch that all ranks together have used.

        In the body of a loop that is those before the batch, and with it after
        ``optimizer.step()``. Unlike the count of ``enumerate(loader)``, it is right after a failure
        and in a worker that joined.
        """
        return self._context().reading.position

    @property
    def sampler(self) -> NoReturn:
        """Raise an error that names what to do without a sampler."""
        raise AttributeError(
            "a loader of hvd_elastic has no sampler: it gives each rank its share, and draws a new "
            "order in each epoch of hvd.epochs(). Leave sampler.set_epoch() out, and write "
            "len(dataset) for len(loader.sampler)"
        )

    def largest_share(self) -> int:
        """Return the most examples that a rank has in the present step; for libraries' loops."""
        return self._order.largest_share(self._context())

    def steps_left(self) -> int:
        """Return the number of steps left in the current epoch at the present world size."""
        worker = self._context().worker
        worker.check_has_ranks("the number of steps that are left")
        return self._order.steps_from(self._context().reading.position, worker.size)
