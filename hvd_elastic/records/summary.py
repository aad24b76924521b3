"""Summarizes a run from its events."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, groupby, islice
from typing import Any

from hvd_elastic.formatting import worker_name
from hvd_elastic.records.spending import Spending
from hvd_elastic.records.wording import MISFIT, batch_words, cut_off_words, shares_words

METRIC_FIELDS = frozenset(
    {
        "t", "mono", "kind", "step", "epoch", "examples", "throughput", "noise_scale", "efficiency",
        "goodput", "global_batch_size", "skipped_steps", "lr", "loss", "position", "size",
        "generation", "rank", "host", "local_rank", "passes", "rank_s", "shares",
        "data_wait", "rank_wait", "done", "late_s",
    }
)  # fmt: skip
"""Fields of ``metrics`` events that the library sets; all others come from the script."""
_STALE_S = 60.0
"""Age from which a sample of a host is not shown as present [s]."""
_TOGETHER = 10_000
"""Most events that are taken together, since they are in memory meanwhile."""
_NOT_SERIES = frozenset({"t", "mono", "kind", "step", "epoch", "examples", "late_s"})


_RATES = frozenset({"throughput", "goodput"})
"""Metrics that have no value while no process trains."""


@dataclass(frozen=True)
class Rescale:
    """One change of the set of workers.

    Attributes:
        generation: number of the new generation; 1 is the start of the run.
        at_s: time after the start of the run [s].
        from_size: number of processes before.
        to_size: number of processes after.
        reason: why it happened, as text.
        pause_s: time from the last step before to the first step after [s]; None for the start,
            or if there was no step after it.
        finished: whether the new generation has trained.
        failure: whether a worker or host was lost before it, unasked.
    """

    generation: int
    at_s: float
    from_size: int
    to_size: int
    reason: str
    pause_s: float | None = None
    finished: bool = False
    failure: bool = False


@dataclass(frozen=True)
class Arrival:
    """A worker that joined the run."""

    at_s: float
    host: str
    local_rank: int
    rank: int | None


@dataclass(frozen=True)
class Departure:
    """A worker, or a whole host (``local_rank`` None), that left the run."""

    at_s: float
    host: str
    local_rank: int | None
    cause: str


@dataclass(frozen=True)
class Draining:
    """A host that is drained: it is not used until the user allows it again.

    Attributes:
        at_s: when draining began, after the start of the run [s].
        cause: why, as text.
        leave_in_s: time that the host had left then [s]; None: not announced.
        empty: whether it has no workers any more.
        asked: True if the user requested it, False if the host announced its preemption.
    """

    at_s: float
    cause: str
    leave_in_s: float | None
    empty: bool = False
    asked: bool = True


@dataclass(frozen=True)
class Checkpoint:
    """A completed checkpoint.

    Attributes:
        at_s: time after the start of the run [s].
        step: step of its state.
        path: path or URL.
        size_bytes: size of all shards.
        seconds: time from the beginning of the write until it was verified [s].
        blocked_s: how long training was paused for it on the slowest rank [s]; None: unknown.
        not_finite: name of a weight in it that holds NaN or infinity; empty: none.
    """

    at_s: float
    step: int
    path: str
    size_bytes: int
    seconds: float
    blocked_s: float | None = None
    not_finite: str = ""


@dataclass(frozen=True)
class SavedFile:
    """The newest file that the script saved under a name.

    Attributes:
        at_s: when it was in the run folder, after the start of the run [s].
        step: step of training when it was saved.
        size_bytes: its size.
    """

    at_s: float
    step: int
    size_bytes: int


@dataclass(frozen=True)
class HostUse:
    """How busy a host was when it was sampled last; see the event ``host_sample``.

    Attributes:
        at_s: time after the start of the run [s].
        figures: fields of the event that are numbers.
        gpus: part of the time that each GPU computed, and part of its memory in use.
    """

    at_s: float
    figures: dict[str, float]
    gpus: list[tuple[float, float]]


@dataclass(frozen=True)
class TimedEvent:
    """A decision or a warning, as text."""

    at_s: float
    kind: str
    text: str


@dataclass
class MetricSeries:
    """The values of one metric over time; ``values`` may contain NaN, as for a diverged loss."""

    at_s: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class RunSummary:
    """Everything that the events tell about a run.

    Attributes:
        status: ``running`` (as far as the events tell), ``succeeded``, ``failed``, ``stopped``,
            or ``unknown`` before the first event.
        started, ended: times of the first and of the last event [Unix seconds].
        exact: whether ``steps`` and ``examples`` are exact, else there may have been more.
        ended_in: epoch of training when the run ended; None before.
        first_step_s: time from the start of the run to its first completed step [s].
        size: number of processes that train now; 0 after the end.
        hosts: last known hostfile, ``(host, slots)``.
        draining: its drained hosts, by name.
        attempts: how often a leader was started (1 + resumes).
        began_s: when the newest of them began, after the start of the run [s].
        series: metrics over time, by name.
        last: newest value of each metric.
        user_metrics: names of the metrics that the script reports itself.
        np: number of processes that the run was started with; None: not given.
        pinned: hosts that are used before all others.
        scaled_to: number of processes that the user or the policy requested since; None: none.
        scaled_slots: slots that the policy requested, (host, index).
        generation_hosts: hosts of the last announced generation.
        placements: processes on each host over time, as (time [s], (host, processes), …).
        saved: files that the script saved, by name.
        batch_plan: newest plan of an adaptive batch size; empty: it does not adapt.
        input: whether ranks wait for their data, and what would help, in words.
        input_hosts: hosts that read for the ranks, with the number of their processes.
        missed: how the last change fell short of its prediction; empty: it did not.
        skipped: examples that were skipped, since they cannot be decoded, and why.
        stopped_for: why the script has ended training early; empty: it has not.
        rank_shares: newest examples of each rank in a full step; empty: equal shares.
        prices: price of hosts per hour, where the hostfile has any.
        use: newest sample of each host.
        spending: what took time and money besides training.
        misfits: number of events whose fields are not those of their kind.
    """

    run_id: str = ""
    status: str = "unknown"
    message: str = ""
    started: float | None = None
    ended: float | None = None
    first_step_s: float | None = None
    steps: int = 0
    examples: int = 0
    epochs: int = 0
    exact: bool = True
    ended_in: int | None = None
    size: int = 0
    largest_size: int = 0
    min_np: int | None = None
    max_np: int | None = None
    attempts: int = 0
    began_s: float = 0.0
    hosts: list[tuple[str, int]] = field(default_factory=list)
    draining: dict[str, Draining] = field(default_factory=dict)
    waiting: str = ""
    cut_off: str = ""
    rescales: list[Rescale] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    placements: list[tuple[float, list[tuple[str, int]]]] = field(default_factory=list)
    joined: list[Arrival] = field(default_factory=list)
    left: list[Departure] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    saved: dict[str, SavedFile] = field(default_factory=dict)
    decisions: list[TimedEvent] = field(default_factory=list)
    shares: str = ""
    warnings: list[TimedEvent] = field(default_factory=list)
    failure: str = ""
    failed_worker: str = ""
    series: dict[str, MetricSeries] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    user_metrics: list[str] = field(default_factory=list)
    np: int | None = None
    pinned: list[str] = field(default_factory=list)
    scaled_to: int | None = None
    scaled_slots: list[tuple[str, int]] = field(default_factory=list)
    generation_hosts: list[str] = field(default_factory=list)
    batch_plan: dict[str, Any] = field(default_factory=dict)
    input: str = ""
    input_hosts: dict[str, int] = field(default_factory=dict)
    missed: str = ""
    skipped: dict[str, str] = field(default_factory=dict)
    plain: bool = False
    stopped_for: str = ""
    rank_shares: list[float | None] = field(default_factory=list)
    prices: dict[str, float] = field(default_factory=dict)
    use: dict[str, HostUse] = field(default_factory=dict)
    spending: Spending = field(default_factory=Spending)
    misfits: int = 0

    @property
    def duration_s(self) -> float:
        """Return the time from the start of the run to its last event [s]."""
        if self.started is None or self.ended is None:
            return 0.0
        return max(0.0, self.ended - self.started)

    @property
    def kept_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint with finite weights, or the newest if there is none."""
        finite = [each for each in self.checkpoints if not each.not_finite]
        return next(reversed(finite or self.checkpoints), None)

    @property
    def live_rescales(self) -> list[Rescale]:
        """Return the rescales except the start of the run and its resumes."""
        return [rescale for rescale in self.rescales if rescale.from_size > 0]

    @property
    def generation(self) -> int:
        """Return the number of the last announced generation; 0: there is none."""
        return max((rescale.generation for rescale in self.rescales), default=0)

    @property
    def present_use(self) -> dict[str, HostUse]:
        """Return the newest samples of the hosts that still send them, while the run goes on."""
        return {
            host: use
            for host, use in self.use.items()
            if self.size and self.duration_s - use.at_s < _STALE_S
        }

    @property
    def hourly_price(self) -> float:
        """Return the price of the hosts of the newest generation [per hour]; 0: not known."""
        return sum(self.prices.get(name, 0.0) for name in self.generation_hosts)

    @property
    def longest_pause_s(self) -> float | None:
        """Return the longest pause of a rescale [s]; None if there was none."""
        pauses = [r.pause_s for r in self.live_rescales if r.pause_s is not None]
        return max(pauses, default=None)

    @property
    def mean_throughput(self) -> float | None:
        """Return the mean throughput [examples/s] since the first step, pauses included."""
        if self.first_step_s is None or not self.examples:
            return None
        training_s = self.duration_s - self.first_step_s
        return self.examples / training_s if training_s > 0 else None

    def final_metrics(self) -> dict[str, Any]:
        """Return the newest values of the loss and of the metrics that the script reports."""
        names = [*(["loss"] if "loss" in self.last else []), *self.user_metrics]
        return {name: self.last[name] for name in names}

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        data = asdict(self)
        del data["series"], data["sizes"], data["placements"]
        data["spending"] = data["spending"]["by_cause"]
        data["duration_s"] = self.duration_s
        data["longest_pause_s"] = self.longest_pause_s
        data["mean_throughput"] = self.mean_throughput
        data["final_metrics"] = self.final_metrics()
        return data


def summarize(records: Iterable[Mapping[str, Any]]) -> RunSummary:
    """Return the summary of a run from its events, oldest first.

    >>> events = [
    ...     {"t": 5.0, "kind": "run_started", "run_id": "a", "hosts": [["n1", 2]]},
    ...     {"t": 6.0, "kind": "rescale_started", "generation": 1, "from_size": 0, "to_size": 2,
    ...      "reason": "start with 2 slots"},
    ...     {"t": 8.0, "kind": "rescale_finished", "generation": 1, "size": 2, "pause_s": None},
    ...     {"t": 9.0, "kind": "metrics", "step": 10, "epoch": 0, "loss": 0.5, "accuracy": 0.9},
    ... ]
    >>> run = summarize(events)
    >>> run.status, run.steps, run.size, run.first_step_s, run.final_metrics()
    ('running', 10, 2, 3.0, {'loss': 0.5, 'accuracy': 0.9})
    """
    run = RunSummary()
    take_events(run, records)
    return run


def take_events(run: RunSummary, records: Iterable[Mapping[str, Any]]) -> None:
    """Update the summary with the next events, oldest first.

    Nearly all events of a long run are metrics with equal fields: they are taken together, field
    by field, which is ten times as fast.
    """
    for fields, group in groupby(records, _fields_of_metrics):
        while some := list(islice(group, _TOGETHER)):
            first, *more = some
            take_event(run, first)
            if fields is not None and run.first_step_s is not None and _are_timed(some):
                _equal_metrics(run, more)
            else:
                for record in more:
                    take_event(run, record)


def _fields_of_metrics(record: Mapping[str, Any]) -> tuple[str, ...] | None:
    together = record.get("kind") == "metrics" and "late_s" not in record
    return tuple(record) if together else None


def _are_timed(records: Iterable[Mapping[str, Any]]) -> bool:
    return {type(record.get("t")) for record in records} <= {int, float}


def take_event(run: RunSummary, record: Mapping[str, Any]) -> None:
    """Update the summary with the next event; a clock that was set back stands still meanwhile."""
    t = _number(record.get("t"))
    if t is not None:
        if run.started is None:
            run.started = float(t)
        run.ended = max(float(t), run.ended or float(t))
    take = _HANDLERS.get(str(record.get("kind")))
    if take is None:
        return
    try:
        take(run, record, run.duration_s)
    except MISFIT:
        run.misfits += 1


_Handler = Callable[[RunSummary, Mapping[str, Any], float], None]
_HANDLERS: dict[str, _Handler] = {}
"""What updates the summary with an event, by kind; its arguments are those of ``_run_started``."""


def _on(*kinds: str) -> Callable[[_Handler], _Handler]:
    """Register a function for the events of these kinds."""

    def register(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(kinds, handler))
        return handler

    return register


@_on("run_started")
def _run_started(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    """Update the summary with an event, ``at_s`` seconds after the start of the run."""
    run.run_id = str(record.get("run_id") or run.run_id)
    run.status = "running"
    run.cut_off = ""
    run.message = run.failure = run.failed_worker = ""
    run.plain = record.get("plain") is True
    run.ended_in = None
    run.attempts += 1
    run.began_s = at_s
    run.use = {}
    run.min_np = _whole(record.get("min_np"))
    run.max_np = _whole(record.get("max_np"))
    run.pinned = [str(host) for host in record.get("pinned") or []]
    np = _whole(record.get("np"))
    if np != run.np:
        run.np, run.scaled_to, run.scaled_slots = np, None, []
    if "hosts" in record:
        _hosts_changed(run, record, at_s)
    if run.attempts > 1:
        _set_size(run, at_s, 0)
        run.spending.failed = False
    run.shares = ""
    run.input_hosts = {}


@_on("leader_cut_off")
def _leader_cut_off(run: RunSummary, record: Mapping[str, Any], _: float) -> None:
    run.cut_off = cut_off_words(record)


@_on("hosts_changed")
def _hosts_changed(run: RunSummary, record: Mapping[str, Any], _: float) -> None:
    run.cut_off = ""  # it leads again
    run.hosts = [
        (str(entry[0]), int(entry[1]))
        for entry in record.get("hosts") or []
        if isinstance(entry, (list, tuple)) and len(entry) >= 2
    ]
    prices = record.get("prices")
    if isinstance(prices, dict):
        known = {str(name): _number(price) for name, price in prices.items()}
        run.prices |= {name: price for name, price in known.items() if price is not None}
    names = {name for name, _ in run.hosts}
    run.draining = {name: found for name, found in run.draining.items() if name in names}


@_on("host_sample")
def _host_sample(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    numbers = {name: _number(value) for name, value in record.items()}
    gpus = [gpu for gpu in record.get("gpus") or [] if isinstance(gpu, dict)]
    run.use[_host(record)] = HostUse(
        at_s,
        {name: value for name, value in numbers.items() if value is not None},
        [(_number(gpu.get("busy")) or 0.0, _number(gpu.get("memory")) or 0.0) for gpu in gpus],
    )


@_on("host_draining")
def _host_draining(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    host, cause = _host(record), _text(record, "cause")
    before = run.draining.get(host)
    # A preemption notice does not cancel the user's request to drain the host.
    asked = record.get("asked") is not False or (before is not None and before.asked)
    leave_in_s = _number(record.get("leave_in_s"))
    run.draining[host] = Draining(at_s, cause, leave_in_s, asked=asked)


@_on("host_drained")
def _host_drained(run: RunSummary, record: Mapping[str, Any], _: float) -> None:
    host = _host(record)
    if host in run.draining:
        run.draining[host] = replace(run.draining[host], empty=True)


@_on("host_returned")
def _host_returned(run: RunSummary, record: Mapping[str, Any], _: float) -> None:
    run.draining.pop(_host(record), None)


@_on("rescale_started")
def _rescale_started(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    run.waiting = run.missed = ""
    run.shares = ""  # a new generation begins with equal shares
    run.generation_hosts = [str(host) for host in record.get("hosts") or []]
    slots = record.get("slots")
    if isinstance(slots, list) and len(slots) == len(run.generation_hosts):
        ranks = [_whole(number) or 0 for number in slots]
        run.placements.append((at_s, [*zip(run.generation_hosts, ranks, strict=True)]))
    run.rescales.append(
        Rescale(
            generation=_count(record, "generation"),
            at_s=at_s,
            from_size=_count(record, "from_size"),
            to_size=_count(record, "to_size"),
            reason=_text(record, "reason"),
            failure=run.spending.failed,
        )
    )
    run.spending.failed = False
    run.spending.rate = run.hourly_price


@_on("rescale_finished")
def _rescale_finished(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    generation, size = _count(record, "generation"), _count(record, "size")
    pause_s = _number(record.get("pause_s"))
    for place in reversed(range(len(run.rescales))):
        begun = run.rescales[place]
        if begun.generation == generation and not begun.finished:
            run.rescales[place] = replace(begun, to_size=size, pause_s=pause_s, finished=True)
            _spend_on_rescale(run, run.rescales[place], at_s)
            break
    _set_size(run, at_s, size)
    _first_step(run, at_s)
    run.spending.size = size
    run.spending.trains_from(at_s)


@_on("taken_over")
def _taken_over(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    # The leader's start did not stop them.
    _set_size(run, at_s, _count(record, "size"), since_s=math.nextafter(run.began_s, 0))
    run.spending.size = run.size


@_on("command_done")
def _command_done(run: RunSummary, record: Mapping[str, Any], _: float) -> None:
    if record.get("op") == "scale" and record.get("ok"):
        run.scaled_to, run.scaled_slots = _whole(record.get("np")), []


@_on("worker_started")
def _worker_started(run: RunSummary, _record: Mapping[str, Any], at_s: float) -> None:
    if run.plain:  # it never joins a generation
        run.waiting = ""
        _set_size(run, at_s, 1)


@_on("worker_joined")
def _worker_joined(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    local_rank, rank = _count(record, "local_rank"), _whole(record.get("rank"))
    run.joined.append(Arrival(at_s, _host(record), local_rank, rank))


@_on("worker_left", "host_lost")
def _left(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    local_rank, cause = _whole(record.get("local_rank")), _text(record, "cause", "no cause given")
    run.left.append(Departure(at_s, _host(record), local_rank, cause))
    if record.get("how", "host_lost") in ("died", "killed", "host_lost"):
        run.spending.failed = True


def _spend_on_rescale(run: RunSummary, rescale: Rescale, at_s: float) -> None:
    """Add the time of a rescale to its cause; the processes that were there before waited."""
    if not rescale.from_size:
        since_s = run.spending.stopped()
        if run.sizes:
            _set_size(run, since_s, 0, since_s=since_s)
            for name in run.series.keys() & _RATES:
                run.series[name].at_s.append(since_s)
                run.series[name].values.append(math.nan)
        unused_s = max(0.0, run.began_s - since_s)
        if unused_s and len(run.placements) > 1 and run.placements[-2][1]:
            run.placements.insert(-1, (since_s, []))  # it died, and did not say so
        run.spending.size = rescale.to_size
        cause = "failures" if rescale.failure else "start-up"
        run.spending.add("interruption", unused_s, unused_s)
        run.spending.add(cause, at_s - since_s - unused_s)
        return
    run.spending.size = min(rescale.from_size, rescale.to_size)
    pause_s = at_s - rescale.at_s if rescale.pause_s is None else rescale.pause_s
    run.spending.add("failures" if rescale.failure else "rescales", pause_s)


def _progress(run: RunSummary, record: Mapping[str, Any]) -> None:
    """Take how far training is from a ``metrics`` event, and what it says of each rank."""
    for name in ("step", "epoch", "examples"):
        count = _whole(record.get(name))
        if count is not None:
            run.last[name] = count
    run.steps = _whole(run.last.get("step")) or run.steps
    run.examples = _whole(run.last.get("examples")) or run.examples
    epoch = _whole(run.last.get("epoch"))
    if epoch is not None:
        run.epochs = epoch + 1
    shares = record.get("shares")
    if isinstance(shares, list):
        run.rank_shares = [_number(value) for value in shares]


@_on("metrics")
def _metrics(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    _progress(run, record)
    # What arrives late, as after a takeover, belongs to the time when it was measured.
    late_s = _number(record.get("late_s")) or 0.0
    at_s = max(at_s - late_s, min(at_s, run.spending.heard_s))
    run.spending.heard_s = at_s
    if _whole(record.get("step")):
        _first_step(run, at_s)
    if "throughput" in record:  # else the script reports between two of them
        waits = (_number(record.get(name)) for name in ("data_wait", "rank_wait"))
        run.spending.trained([at_s], *([] if wait is None else [wait] for wait in waits))
    if "global_batch_size" in record:
        # These are left out of an event when infinite or unknown, so the last value is outdated.
        for name in {"noise_scale", "efficiency", "goodput"} & run.last.keys() - record.keys():
            del run.last[name]
            series = run.series.setdefault(name, MetricSeries())
            series.at_s.append(at_s)
            series.values.append(math.nan)
    for name, value in record.items():
        if name not in _NOT_SERIES:
            _metric(run, name, value, at_s)


def _metric(run: RunSummary, name: str, value: Any, at_s: float) -> None:
    if value is None and name in run.series:
        value = math.nan  # the event log writes NaN as null
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = math.nan if _number(value) is None else value
        series = run.series.setdefault(name, MetricSeries())
        series.at_s.append(at_s)
        series.values.append(float(value))
    elif not isinstance(value, (str, bool)):
        return
    if name not in METRIC_FIELDS and name not in run.user_metrics:
        run.user_metrics.append(name)
    run.last[name] = value


def _equal_metrics(run: RunSummary, records: Sequence[Mapping[str, Any]]) -> None:
    """Take ``metrics`` events that all have the fields of the one that was taken before them."""
    if not records:
        return
    assert run.started is not None
    assert run.ended is not None
    times = [float(record["t"]) for record in records]
    clock = list(accumulate(times, max, initial=run.ended))[1:]
    run.ended = clock[-1]
    at_s = [max(0.0, t - run.started) for t in clock]
    for name in records[0]:
        if name in _NOT_SERIES:
            continue
        column = [record[name] for record in records]
        series = run.series.get(name)
        if series is not None and _all_finite(column):
            series.at_s.extend(at_s)
            series.values.extend(column)
            run.last[name] = column[-1]
        else:
            for value, at in zip(column, at_s, strict=True):
                _metric(run, name, value, at)
    _progress(run, records[-1])
    run.spending.heard_s = at_s[-1]
    if "throughput" in records[0]:
        data, ranks = (
            [record.get(name, 0.0) for record in records] for name in ("data_wait", "rank_wait")
        )
        run.spending.trained(
            at_s, data if _all_finite(data) else [], ranks if _all_finite(ranks) else []
        )


def _all_finite(column: Sequence[Any]) -> bool:
    if not {*map(type, column)} <= {int, float}:
        return False
    return min(column) >= -sys.float_info.max and max(column) <= sys.float_info.max


@_on("checkpoint")
def _checkpoint(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    run.checkpoints.append(
        Checkpoint(
            at_s=at_s,
            step=_count(record, "step"),
            path=_text(record, "path"),
            size_bytes=_count(record, "bytes"),
            seconds=_number(record.get("seconds")) or 0.0,
            blocked_s=_number(record.get("blocked_s")),
            not_finite=_text({**(record.get("shard") or {}), **record}, "not_finite"),
        )
    )


@_on("saved")
def _saved(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    saved = SavedFile(at_s, _count(record, "step"), _count(record, "bytes"))
    run.saved[_text(record, "name")] = saved


@_on("decision")
def _decision(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    text = f"{record.get('action') or ''}: {record.get('reason') or ''}".strip(": ")
    np = _whole(record.get("np"))
    if np:
        run.scaled_to = np
        run.scaled_slots = [
            (str(host), index)
            for host, number in record.get("target") or []
            for index in range(_whole(number) or 0)
        ]
    run.decisions.append(TimedEvent(at_s, "decision", text))


@_on("restored")
def _restored(run: RunSummary, record: Mapping[str, Any], _: float) -> None:
    run.steps, run.examples = _count(record, "step"), _count(record, "examples")
    run.last.update({"step": run.steps, "examples": run.examples})
    run.stopped_for = ""
    for saved_at_s in [c.at_s for c in run.checkpoints if c.step == run.steps][-1:]:
        run.spending.went_back(saved_at_s)


@_on("training_stopped", "training_goes_on")
def _training_ends(run: RunSummary, record: Mapping[str, Any], _: float) -> None:
    run.stopped_for = _text(record, "reason")  # training that goes on after all has none


@_on("input")
def _input(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    run.input = _text(record, "reason")
    if record.get("bound") != "nothing":
        run.decisions.append(TimedEvent(at_s, "input", run.input))


@_on("input_host_joined")
def _input_host_joined(run: RunSummary, record: Mapping[str, Any], _: float) -> None:
    run.input_hosts[_host(record)] = _count(record, "processes")


@_on("input_host_left")
def _input_host_left(run: RunSummary, record: Mapping[str, Any], _: float) -> None:
    run.input_hosts.pop(_host(record), None)


@_on("shares")
def _shares(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    text = shares_words(record)
    run.decisions.append(TimedEvent(at_s, "shares", text))
    run.shares = text if record.get("shares") else ""


@_on("batch_plan")
def _batch_plan(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    text = batch_words(record, run.batch_plan)
    run.batch_plan = dict(record)
    if text:
        run.decisions.append(TimedEvent(at_s, "batch_plan", text))


@_on("prediction_missed")
def _prediction_missed(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    run.missed = _text(record, "reason")
    text = f"prediction missed: {run.missed}"
    run.decisions.append(TimedEvent(at_s, "prediction_missed", text))


@_on("example_skipped")
def _example_skipped(run: RunSummary, record: Mapping[str, Any], _: float) -> None:
    run.skipped[_text(record, "example")] = _text(record, "reason")


@_on("warning")
def _warning(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    text = _text(record, "message") or _text(record, "reason")
    run.warnings.append(TimedEvent(at_s, "warning", text))


@_on("waiting")
def _waiting(run: RunSummary, record: Mapping[str, Any], _: float) -> None:
    run.waiting = _text(record, "reason", "waiting for hosts")


@_on("script_failed")
def _script_failed(run: RunSummary, record: Mapping[str, Any], _: float) -> None:
    if not run.failure:
        run.failure = _text(record, "traceback")
        run.failed_worker = worker_name(record.get("host"), record.get("local_rank"))


@_on("run_finished")
def _run_finished(run: RunSummary, record: Mapping[str, Any], at_s: float) -> None:
    run.status = _text(record, "status", "finished")
    run.message = _text(record, "message")
    run.steps = _whole(record.get("steps")) or run.steps
    run.examples = _whole(record.get("examples")) or run.examples
    run.exact = record.get("exact") is not False
    run.ended_in = _whole(record.get("epochs"))
    run.epochs = run.ended_in or run.epochs
    run.waiting = run.cut_off = ""
    run.placements.append((at_s, []))
    _set_size(run, at_s, 0)
    run.spending.stopped()
    run.spending.idle_s = at_s


def _first_step(run: RunSummary, at_s: float) -> None:
    if run.first_step_s is None:
        run.first_step_s = at_s


def _set_size(run: RunSummary, at_s: float, size: int, *, since_s: float | None = None) -> None:
    """Take the number of processes; with ``since_s`` in place of what was taken since then."""
    if since_s is not None:
        while run.sizes and run.sizes[-1][0] > since_s:
            del run.sizes[-1]
        if run.sizes and run.sizes[-1][1] == size:
            run.size = size
            return
    run.size = size
    run.largest_size = max(run.largest_size, size)
    run.sizes.append((at_s, size))


def _host(record: Mapping[str, Any]) -> str:
    return str(record.get("host"))


def _text(record: Mapping[str, Any], name: str, default: str = "") -> str:
    return str(record.get(name) or default)


def _count(record: Mapping[str, Any], name: str) -> int:
    """Return a whole number of an event; 0 if it is missing."""
    return _whole(record.get(name)) or 0


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _number(value: Any) -> float | None:
    """Return ``value`` if it is a number within the range of a float, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) <= sys.float_info.max else None
