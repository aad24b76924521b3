"""The data that the script trains on, and how long it trains, as it has told."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_elastic.formatting import count
from hvd_elastic.run_events import ExampleSkipped
from hvd_elastic.worker.input_source import Skipped, Source
from hvd_elastic.worker.planning.planner import Planner
from hvd_elastic.worker.progress import Progress
from hvd_elastic.worker.worker import Worker


class ScriptData:
    """The loaders that the script has made, and the number of steps or epochs it wants.

    Attributes:
        loaders: number of loaders that the script has made.
        input_source: what the first of them reads; None: there is no loader that others can read.
        last_reader: (epoch, generation) and the data order that was read last. One for the whole
            process, as is progress: two loaders in one epoch are an error.
        has_loader: whether steps are the batches of one of them.
        examples: number of examples in its dataset; 0: there is none.
        aim: number of steps or epochs that the script trains for, and which of the two; (0, ""):
            not known.
    """

    def __init__(self) -> None:
        self.loaders = 0
        self.input_source: Source | None = None
        self.last_reader: tuple[tuple[int, int], object] | None = None
        self.has_loader = False
        self.examples = 0
        self.aim: tuple[int, str] = (0, "")
        self._skipped: set[str] = set()

    def register(self, examples: int) -> None:
        """Note a loader whose batches are the steps; ``examples``: those of its dataset."""
        self.has_loader, self.examples = True, examples

    def tell_skipped(self, worker: Worker, skipped: Sequence[Skipped]) -> None:
        """Tell of each skipped example once, and warn at the first, second, fourth, … of them."""
        for _, example, reason in skipped:
            if example in self._skipped:
                continue
            self._skipped.add(example)
            worker.sink.send(ExampleSkipped(example=example, reason=reason))
            if (number := len(self._skipped)).bit_count() == 1:
                worker.warn(
                    f"{example} cannot be decoded: {reason}. It is left out of its batch "
                    f'(on_error="skip"); {count(number, "example")} by this worker so far'
                )

    def part_done(self, progress: Progress, planner: Planner) -> float | None:
        """Return what part of the training is done, from 0 to 1; None: it is not known."""
        count, unit = self.aim
        if count <= 0:
            return None
        made = planner.progress_in(unit)
        if made is None:
            made = progress.step if unit == "step" else progress.epoch
            if unit == "epoch" and self.examples:
                made += progress.position / self.examples
        return min(1.0, made / count)
