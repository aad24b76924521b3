"""Collects the metrics of a run: throughput, the planner's, and those that the script reports."""

from __future__ import annotations

import json
import math
import numbers
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from hvd_elastic import run_events
from hvd_elastic.communicator.interface import Communicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.worker.worker import Worker

_FIELDS = frozenset({*run_events.Metrics.__struct_fields__, "kind"})
_REAL = re.compile(r"(torch\.)?(bool|u?int\d|b?float\d)")  # names of types of real numbers
_INTEGERS = range(-(2**63), 2**64)  # what messages can hold
_INTERVAL_S = 0.25  # not every step: reading the script's tensors waits for the device


class Metrics:
    """Sends metrics from rank 0, and the pause of a rescale from the rank that gave the state."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._values: dict[str, Any] = {}
        self._reported: dict[str, None] = {}  # names, since metrics were sent
        self._before: dict[str, None] = {}  # the same before, of a rank that may become rank 0
        self._told_skipped = 0
        self._due = 0.0
        self._window = (time.monotonic(), 0)
        self._input = (0.0, 0.0)
        self._waited_s = 0.0
        self._last_step: float | None = None
        self._rescaled_from: float | None = None
        self._announces_pause = False

    def update(self, values: Mapping[str, Any]) -> None:
        """Store numbers from the script for the metrics that are sent.

        One that has the name of a field of the event is sent as ``script.NAME``.

        Raises:
            ScriptError: a value is not one number; names it.
        """
        for name, value in values.items():
            number = _one_number(name, value)
            told = f"script.{name}" if name in _FIELDS else name
            self._values[told] = number
            self._reported[told] = None

    def world_begins(self, *, first: bool, announces_pause: bool) -> None:
        """Begin to measure a generation; ``first``: the first one of this process."""
        clock = self._worker.step_clock
        now = clock.began = clock.agreed_at = time.monotonic()
        self._announces_pause = announces_pause
        self._rescaled_from = None if first else self._last_step
        self._window = (now, self._worker.progress.examples)
        self._waited_s = self._worker.communicator.waited_s

    def step_finished(self, planned: Callable[[], Mapping[str, Any]]) -> None:
        """Note that a step was counted, and send metrics if due.

        Args:
            planned: returns the planner's metrics.
        """
        worker, now = self._worker, time.monotonic()
        if self._announces_pause:
            self._announces_pause = False
            pause = None if self._rescaled_from is None else now - self._rescaled_from
            size = worker.size
            worker.sink.send(run_events.RescaleFinished(worker.generation, size, pause))
        self._last_step = now
        self.body_ended(now)
        clock = worker.step_clock
        clock.longest_period_s = max(clock.longest_period_s, now - clock.agreed_at)
        clock.agreed_at = now
        if now >= self._due:
            self.send(planned)

    def body_ended(self, now: float) -> None:
        """Time the step, or one of several steps of this rank alone, that has ended at ``now``."""
        worker = self._worker
        if worker.step_clock.began is not None:
            worker.step_clock.longest_s = max(
                worker.step_clock.longest_s, now - worker.step_clock.began
            )
        worker.step_clock.began = now

    def training_ends(self, planned: Callable[[], Mapping[str, Any]]) -> None:
        """Send metrics if they lack values or steps left out; ``planned``: see :meth:`send`."""
        if self._reported or self._before or self._worker.progress.skipped > self._told_skipped:
            self.send(planned)

    def script_failed(self, planned: Callable[[], Mapping[str, Any]]) -> None:
        """Send what was not sent yet; ``planned``: see :meth:`send`.

        What may be on a GPU is left out: to read it may mean to wait for a rank that is gone.
        """
        self._values = {name: v for name, v in self._values.items() if _is_in_memory(v)}
        for names in (self._reported, self._before):
            for name in names.keys() - self._values.keys():
                del names[name]
        if self._reported or self._before:
            self.send(planned, reads_rate=False)

    def send(self, planned: Callable[[], Mapping[str, Any]], *, reads_rate: bool = True) -> None:
        """Send metrics now, if this is rank 0; ``planned`` returns the planner's metrics."""
        worker, now = self._worker, time.monotonic()
        self._due = now + _INTERVAL_S
        reported, self._reported = self._reported, {}
        names, self._before = {**self._before, **reported}, reported
        if worker.rank != 0:
            return
        self._before = {}
        since, examples = self._window
        done = worker.progress.examples - examples
        size = worker.size
        told = run_events.Metrics(**asdict(worker.position), size=size, **planned(), t=time.time())
        if done > 0 and now > since:
            told.throughput = done / (now - since)
            waited_s = worker.communicator.waited_s - self._waited_s
            told.rank_wait = round(min(1.0, max(0.0, waited_s / (now - since))), 4)
            if told.efficiency is not None:
                told.goodput = told.throughput * told.efficiency
        loop_s, wait_s = (
            now - then for now, then in zip(worker.input_times.waited, self._input, strict=True)
        )
        if loop_s > 0:
            told.data_wait = round(min(1.0, wait_s / loop_s), 4)
        rate = worker.averagers.learning_rate() if reads_rate else None
        if rate is not None:
            told.lr = rate
        if worker.progress.skipped:
            told.skipped_steps = self._told_skipped = worker.progress.skipped
        told.values = {
            name: _plain(worker.frontend.plain(value)) for name, value in self._values.items()
        }
        told.reported = [*names] or None
        self._window = (now, worker.progress.examples)
        self._input = worker.input_times.waited
        self._waited_s = worker.communicator.waited_s
        worker.sink.send(told)


def _one_number(name: str, value: Any) -> Any:
    """Return a metric as it is kept: a number, or a tensor that is read when metrics are due."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        if isinstance(value, numbers.Real):
            return _plain(value)
    elif math.prod(shape) == 1 and _REAL.match(getattr(dtype, "name", str(dtype))):
        return _plain(value.item()) if isinstance(value, (np.ndarray, np.generic)) else value
    what = type(value).__name__ if shape is None else f"{type(value).__name__} of {dtype}"
    if shape is not None and math.prod(shape) != 1:
        what += f" with the shape {tuple(shape)}"
    raise ScriptError(
        f"the metric {name!r} is a {what}, and a metric is one number: a Python number, or a "
        f"tensor or array with one element. Give its mean, for example: {name}=float(value.mean())"
    )


def _is_in_memory(value: Any) -> bool:
    return isinstance(value, (int, float)) or "cpu" in str(getattr(value, "device", "")).lower()


def _plain(number: Any) -> bool | int | float:
    """Return a number as a Python number that fits into an event."""
    if isinstance(number, bool):
        return number
    if isinstance(number, numbers.Integral) and int(number) in _INTEGERS:
        return int(number)
    return float(number)


def average_over_ranks(
    communicator: Communicator,
    examples: int,
    values: Mapping[str, float],
    known: Mapping[str, float] | None,
) -> tuple[dict[str, float], bool]:
    """Return the numbers of all ranks, averaged by examples; all ranks must call it.

    Args:
        examples: number of examples that this rank has computed its numbers from.
        values: numbers of this rank by name.
        known: what has come out before a failure that this call repeats, on this rank; None: it
            has not come so far. A rank may have used it already, so all take it over.

    Returns:
        The averages, or what a rank knew; and whether it is the latter.
    """
    own = json.dumps([examples, values, known]) + "\n"
    told = communicator.gather(np.frombuffer(own.encode(), np.uint8).copy(), "hvd_elastic.metrics")
    rows = [json.loads(line) for line in told.tobytes().splitlines()]
    for *_, earlier in rows:
        if earlier is not None:
            return dict(earlier), True
    return average_by_examples([(row[0], row[1]) for row in rows]), False


def average_by_examples(rows: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return the averages of numbers that several ranks have computed.

    Args:
        rows: number of examples, and numbers by name, of each rank.

    >>> average_by_examples([(3, {"loss": 1.0}), (1, {"loss": 2.0}), (0, {})])
    {'loss': 1.25}
    """
    found: dict[str, float] = {}
    for key in dict.fromkeys(key for _, logs in rows for key in logs):
        known = [(examples, logs[key]) for examples, logs in rows if key in logs]
        total = sum(examples for examples, _ in known)
        if total:
            found[key] = sum(examples * value for examples, value in known if examples) / total
    return found
