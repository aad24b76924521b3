"""Summarizes a run from its events."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, groupby, islice
from operator import attrgetter
from typing import Any

from msgspec import UNSET

from hvd_elastic import run_events as ev
from hvd_elastic.formatting import worker_name
from hvd_elastic.records.events import as_record
from hvd_elastic.records.spending import Spending
from hvd_elastic.records.wording import TRAINS, batch_words, cut_off_words, shares_words
from hvd_elastic.run_events import Metrics

_STALE_S = 60.0
"""Age from which a sample of a host is not shown as present [s]; of many hosts more."""
_STALE_S_PER_HOST = 0.75
"""The same for each host of the run [s]: of many hosts, each samples once in a quarter second for
each of them."""
_TOGETHER = 10_000
"""Most events that are taken together, since they are in memory meanwhile."""
_OUTDATED = ("noise_scale", "efficiency", "goodput")
"""Metrics that are not known in an event of a step that lacks them: infinite, for one."""
_UNPLOTTED = ("step", "epoch", "examples", "late_s", "t", "mono", "values")
_SERIES = [(n, attrgetter(n)) for n in Metrics.__struct_fields__ if n not in _UNPLOTTED]
"""Fields of ``metrics`` events that are kept over time."""
_FREQUENT = frozenset({Metrics, ev.HostSample})
_RATES = frozenset({"throughput", "goodput"})
"""Metrics that have no value while no process trains."""


@dataclass(frozen=True)
class Rescale:
    """One change of the set of workers.

    Attributes:
        generation: number of the new generation; 1 is the start of the run.
        at_s: time after the start of the run [s].
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
class Exit:
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
class NewestSave:
    """The newest file that the script saved under a name.

    Attributes:
        at_s: when it was in the run folder, after the start of the run [s].
    """

    at_s: float
    step: int
    size_bytes: int


@dataclass(frozen=True)
class HostUse:
    """Use of a host when it was sampled last; see the event ``host_sample``.

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

    def add_value(self, at_s: float, value: float) -> None:
        """Add a value at a time [s]."""
        self.at_s.append(at_s)
        self.values.append(value)


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
        size: number of processes that trained last, as far as the events tell; 0 after the end. See
            :meth:`trains_now`.
        hosts: last known hostfile, ``(host, slots)``.
        draining: its drained hosts, by name.
        faults: faults of the hardware of its hosts, by name.
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
        misfits: number of events that this version cannot read.
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
    hosts: list[ev.HostSlots] = field(default_factory=list)
    draining: dict[str, Draining] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)
    waiting: str = ""
    cut_off: str = ""
    rescales: list[Rescale] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    placements: list[tuple[float, list[tuple[str, int]]]] = field(default_factory=list)
    joined: list[Arrival] = field(default_factory=list)
    left: list[Exit] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    saved: dict[str, NewestSave] = field(default_factory=dict)
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
    batch_plan: ev.BatchPlan | None = None
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

    def trains_now(self, state: str) -> int:
        """Return the number of processes that train in a state of :func:`run_state`; 0: none.

        The events do not tell that a leader died, nor that the workers of a run that waits stopped.
        """
        return self.size if state in TRAINS else 0

    def present_use(self, state: str) -> dict[str, HostUse]:
        """Return the newest samples of the hosts that still send them, if the run trains.

        Args:
            state: state of the run; see :meth:`trains_now`.
        """
        if not self.trains_now(state):
            return {}
        stale_s = max(_STALE_S, _STALE_S_PER_HOST * len(self.hosts))
        return {host: use for host, use in self.use.items() if self.duration_s - use.at_s < stale_s}

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
        """Return plain data for ``--json``; ``status`` has to be the state that users are shown."""
        data = asdict(self)
        data["size"] = self.trains_now(self.status)
        del data["series"], data["sizes"], data["placements"]
        data["batch_plan"] = as_record(self.batch_plan) if self.batch_plan else {}
        data["spending"] = data["spending"]["by_cause"]
        data["duration_s"] = self.duration_s
        data["longest_pause_s"] = self.longest_pause_s
        data["mean_throughput"] = self.mean_throughput
        data["final_metrics"] = self.final_metrics()
        return data


def summarize(events: Iterable[ev.ReadEvent]) -> RunSummary:
    """Return the summary of a run from its events, oldest first.

    >>> events = [
    ...     ev.RescaleStarted(1, 0, 2, ["n1"], [2], "start with 2 slots", t=6.0),
    ...     ev.RescaleFinished(1, 2, None, t=8.0),
    ...     Metrics(10, 0, 20, 20, 2, values={"loss": 0.5, "accuracy": 0.9}, t=9.0),
    ... ]
    >>> run = summarize(events)
    >>> run.steps, run.size, run.first_step_s, run.final_metrics()
    (10, 2, 2.0, {'loss': 0.5, 'accuracy': 0.9})
    """
    run = RunSummary()
    take_events(run, events)
    return run


def take_events(run: RunSummary, events: Iterable[ev.ReadEvent]) -> None:
    """Update the summary with the next events, oldest first.

    Nearly all events of a long run are metrics and samples of hosts: they are taken together, the
    metrics field by field, which is ten times as fast, and of the samples the newest.
    """
    for are_frequent, group in groupby(events, lambda event: type(event) in _FREQUENT):
        while some := list(islice(group, _TOGETHER)):
            if are_frequent:
                _take_frequent(run, some)
            else:
                for event in some:
                    _take_event(run, event)


def _take_frequent(run: RunSummary, events: Sequence[ev.ReadEvent]) -> None:
    timed = [*zip(events, _times(run, events), strict=True)]
    metrics = [(event, at_s) for event, at_s in timed if isinstance(event, Metrics)]
    if metrics:
        _take_metrics(run, [event for event, _ in metrics], [at_s for _, at_s in metrics])
    samples = {event.host: (event, at) for event, at in timed if isinstance(event, ev.HostSample)}
    for host, (sample, at_s) in samples.items():
        fields = as_record(sample).items()
        figures = {name: value for name, value in fields if isinstance(value, (int, float))}
        run.use[host] = HostUse(at_s, figures, [(gpu.busy, gpu.memory) for gpu in sample.gpus])


def _take_event(run: RunSummary, event: ev.ReadEvent) -> None:
    """Update the summary with the next event, which is none of the frequent ones."""
    (at_s,) = _times(run, [event])
    match event:
        case ev.RunStarted():
            _begin_run(run, event, at_s)
        case ev.LeaderCutOff():
            run.cut_off = cut_off_words(event)
        case ev.RescaleStarted():
            _begin_rescale(run, event, at_s)
        case ev.RescaleFinished():
            _finish_rescale(run, event, at_s)
        case ev.TakenOver(size=size):
            # The leader's start did not stop them.
            _set_size(run, at_s, size, since_s=math.nextafter(run.began_s, 0))
            run.spending.size = size
        case ev.CommandDone(op="scale", ok=True, values=asked):
            np = asked.get("np")
            run.scaled_to, run.scaled_slots = np if isinstance(np, int) else None, []
        case ev.WorkerStarted():
            if run.plain:  # it never joins a generation
                run.waiting = ""
                _set_size(run, at_s, 1)
        case ev.WorkerJoined():
            run.joined.append(Arrival(at_s, event.host, event.local_rank, event.rank))
        case ev.WorkerLeft(host=host, local_rank=local_rank, cause=cause, how=how):
            run.left.append(Exit(at_s, host, local_rank, cause))
            run.spending.failed |= not how.in_order
        case ev.HostLost(host=host, cause=cause):
            run.left.append(Exit(at_s, host, None, cause))
            run.spending.failed = True
        case ev.Checkpoint():
            fields = (event.step, event.path, event.bytes, event.seconds)
            made = Checkpoint(at_s, *fields, event.blocked_s, event.not_finite)
            run.checkpoints.append(made)
        case ev.Saved():
            run.saved[event.name] = NewestSave(at_s, event.step, event.bytes)
        case ev.Restored():
            run.steps, run.examples = event.step, event.examples
            run.last.update({"step": run.steps, "examples": run.examples})
            run.stopped_for = ""
            for saved_at_s in [c.at_s for c in run.checkpoints if c.step == run.steps][-1:]:
                run.spending.went_back(saved_at_s)
        case ev.TrainingStopped(reason=reason):
            run.stopped_for = reason
        case ev.TrainingGoesOn():
            run.stopped_for = ""
        case ev.ExampleSkipped():
            run.skipped[event.example] = event.reason
        case ev.Warned(message=message):
            run.warnings.append(TimedEvent(at_s, "warning", message))
        case ev.Waiting(reason=reason):
            run.waiting = reason
        case ev.ScriptFailed():
            if not run.failure:
                run.failure = event.traceback
                run.failed_worker = worker_name(event.host, event.local_rank)
        case ev.RunFinished():
            _finish_run(run, event, at_s)
        case ev.Decision() | ev.Input() | ev.Shares() | ev.BatchPlan() | ev.PredictionMissed():
            text = _decide(run, event)
            if text:
                run.decisions.append(TimedEvent(at_s, event.kind, text))
        case ev.Unread():
            run.misfits += 1
        case _:
            _take_host_event(run, event, at_s)


def _take_host_event(run: RunSummary, event: ev.ReadEvent, at_s: float) -> None:
    match event:
        case ev.HostsChanged():
            _change_hosts(run, event.hosts)
            run.prices |= event.prices
        case ev.HostFaults(host=host, faults=faults):
            run.faults.pop(host, None)
            if faults:
                run.faults[host] = [fault.text for fault in faults]
                text = f"host {host}: {'; '.join(run.faults[host])}"
                run.warnings.append(TimedEvent(at_s, "warning", text))
        case ev.HostDraining(host=host, cause=cause, leave_in_s=leave_in_s):
            before = run.draining.get(host)
            # A preemption notice does not cancel the user's request to drain the host.
            asked = event.asked or (before is not None and before.asked)
            run.draining[host] = Draining(at_s, cause, leave_in_s, asked=asked)
        case ev.HostDrained(host=host):
            if host in run.draining:
                run.draining[host] = replace(run.draining[host], empty=True)
        case ev.HostReturned(host=host):
            run.draining.pop(host, None)
        case ev.InputHostJoined():
            run.input_hosts[event.host] = event.processes
        case ev.InputHostLeft(host=host):
            run.input_hosts.pop(host, None)


def _times(run: RunSummary, events: Sequence[ev.ReadEvent]) -> list[float]:
    """Note the times of events; return them from the start of the run [s].

    A clock that was set back stops meanwhile.
    """
    times = [event.t for event in events]
    if run.started is None or run.ended is None:
        run.started = run.ended = times[0]
    *clock, run.ended = accumulate(times, max, initial=run.ended)
    return [max(0.0, t - run.started) for t in (*clock[1:], run.ended)]


def _begin_run(run: RunSummary, event: ev.RunStarted, at_s: float) -> None:
    run.run_id = event.run_id or run.run_id
    run.status = "running"
    run.message = run.failure = run.failed_worker = run.waiting = ""
    run.plain = event.plain
    run.ended_in = None
    run.attempts += 1
    run.began_s = at_s
    run.use = {}
    run.min_np, run.max_np, run.pinned = event.min_np, event.max_np, event.pinned
    if event.np != run.np:
        run.np, run.scaled_to, run.scaled_slots = event.np, None, []
    _change_hosts(run, event.hosts)
    if run.attempts > 1:
        _set_size(run, at_s, 0)
        run.spending.failed = False
    run.shares = ""
    run.input_hosts = {}


def _change_hosts(run: RunSummary, hosts: list[ev.HostSlots]) -> None:
    run.cut_off = ""  # it leads again
    run.hosts = hosts
    names = {name for name, _ in hosts}
    run.draining = {name: found for name, found in run.draining.items() if name in names}
    run.faults = {name: found for name, found in run.faults.items() if name in names}


def _begin_rescale(run: RunSummary, event: ev.RescaleStarted, at_s: float) -> None:
    run.waiting = run.missed = ""
    run.shares = ""  # a new generation begins with equal shares
    run.generation_hosts = event.hosts
    if len(event.slots) == len(event.hosts):
        run.placements.append((at_s, [*zip(event.hosts, event.slots, strict=True)]))
    before, after, failed = event.from_size, event.to_size, run.spending.failed
    run.rescales.append(
        Rescale(event.generation, at_s, before, after, event.reason, failure=failed)
    )
    run.spending.failed = False
    run.spending.rate = run.hourly_price


def _finish_rescale(run: RunSummary, event: ev.RescaleFinished, at_s: float) -> None:
    size, pause_s = event.size, event.pause_s
    for place in reversed(range(len(run.rescales))):
        begun = run.rescales[place]
        if begun.generation == event.generation and not begun.finished:
            run.rescales[place] = replace(begun, to_size=size, pause_s=pause_s, finished=True)
            _spend_on_rescale(run, run.rescales[place], at_s)
            break
    _set_size(run, at_s, size)
    if run.first_step_s is None:
        run.first_step_s = at_s
    run.spending.size = size
    run.spending.trains_from(at_s)


def _spend_on_rescale(run: RunSummary, rescale: Rescale, at_s: float) -> None:
    """Add the time of a rescale to its cause; the processes that were there before waited."""
    if not rescale.from_size:
        since_s = run.spending.stopped()
        if run.sizes:
            _set_size(run, since_s, 0, since_s=since_s)
            for name in run.series.keys() & _RATES:
                run.series[name].add_value(since_s, math.nan)
        unused_s = max(0.0, run.began_s - since_s)
        if unused_s and len(run.placements) > 1 and run.placements[-2][1]:
            run.placements.insert(-1, (since_s, []))  # it died, and did not say so
        run.spending.size = rescale.to_size
        cause = "failures" if rescale.failure else "start-up"
        run.spending.add_time("interruption", unused_s, unused_s)
        run.spending.add_time(cause, at_s - since_s - unused_s)
        return
    run.spending.size = min(rescale.from_size, rescale.to_size)
    pause_s = at_s - rescale.at_s if rescale.pause_s is None else rescale.pause_s
    run.spending.add_time("failures" if rescale.failure else "rescales", pause_s)


def _decide(
    run: RunSummary,
    event: ev.Decision | ev.Input | ev.Shares | ev.BatchPlan | ev.PredictionMissed,
) -> str:
    """Take what was decided or found out; return it as text, empty if it is not worth a line."""
    match event:
        case ev.Decision(action=action, reason=reason, np=np):
            if np:
                slots = [(host, index) for host, n in event.target or [] for index in range(n)]
                run.scaled_to, run.scaled_slots = np, slots
            return f"{action}: {reason}".strip(": ")
        case ev.Input(bound=bound, reason=reason):
            run.input = reason
            return reason if bound != "nothing" else ""
        case ev.Shares(shares=shares):
            text, before = shares_words(event), run.shares
            run.shares = text if shares else ""
            return text if text != before else ""  # a new leader is told them again
        case ev.BatchPlan():
            text = batch_words(event, run.batch_plan)
            run.batch_plan = event
            return text
        case ev.PredictionMissed(reason=reason):
            run.missed = reason
            return f"prediction missed: {reason}"


def _finish_run(run: RunSummary, event: ev.RunFinished, at_s: float) -> None:
    run.status, run.message, run.exact = event.status, event.message, event.exact
    run.steps = event.steps or run.steps
    run.examples = event.examples or run.examples
    run.ended_in = event.epochs
    run.epochs = run.ended_in or run.epochs
    run.waiting = run.cut_off = ""
    run.placements.append((at_s, []))
    _set_size(run, at_s, 0)
    run.spending.stopped()
    run.spending.idle_s = at_s


def _take_metrics(run: RunSummary, events: Sequence[Metrics], at_s: list[float]) -> None:
    """Take ``metrics`` events that follow each other; ``at_s``: their times [s]."""
    last = events[-1]
    # What arrives late, as after a takeover, belongs to the time when it was measured.
    for place, event in enumerate(events):
        if event.late_s:
            heard_s = at_s[place - 1] if place else run.spending.heard_s
            at_s[place] = max(at_s[place] - event.late_s, min(at_s[place], heard_s))
    run.spending.heard_s = at_s[-1]
    run.last.update({"step": last.step, "epoch": last.epoch, "examples": last.examples})
    run.steps, run.examples = last.step, last.examples
    run.epochs = last.epoch + 1
    if run.first_step_s is None:
        run.first_step_s = next((at for at, e in zip(at_s, events, strict=True) if e.step), None)
    shares = [event.shares for event in events if event.shares is not None]
    run.rank_shares = [*shares[-1]] if shares else run.rank_shares
    # Without a throughput, the script reports between two of them.
    timed = [place for place, event in enumerate(events) if event.throughput is not None]
    if timed:
        data = [events[place].data_wait or 0.0 for place in timed]
        ranks = [events[place].rank_wait or 0.0 for place in timed]
        run.spending.trained([at_s[place] for place in timed], data, ranks)
    for name, field_of in _SERIES:
        column = [*map(field_of, events)]
        if name in _OUTDATED and None in column:
            steps = [event.global_batch_size is not None for event in events]
            _take_known(run, name, column, at_s, steps)
        else:
            _take_column(run, name, column, at_s, None if name != "lr" else UNSET)
    for name in dict.fromkeys(name for event in events for name in event.values):
        column = [event.values.get(name, UNSET) for event in events]
        _take_column(run, name, column, at_s, UNSET)
        if name in run.last and name != "loss" and name not in run.user_metrics:
            run.user_metrics.append(name)


def _take_known(
    run: RunSummary,
    name: str,
    column: Sequence[float | None],
    at_s: Sequence[float],
    steps: Sequence[bool],
) -> None:
    """Take a metric that has no value any more where the event of a step lacks it."""
    for value, at, is_of_step in zip(column, at_s, steps, strict=True):
        if value is not None:
            _take_metric(run, name, value, at)
        elif is_of_step and run.last.pop(name, None) is not None:
            run.series.setdefault(name, MetricSeries()).add_value(at, math.nan)


def _take_column(
    run: RunSummary, name: str, column: Sequence[Any], at_s: Sequence[float], absent: Any
) -> None:
    """Take the values of a metric at several times; ``absent``: what stands for none."""
    if absent in column:
        known = [(at, value) for at, value in zip(at_s, column, strict=True) if value is not absent]
        if not known:
            return
        at_s, column = [at for at, _ in known], [value for _, value in known]
    if {*map(type, column)} <= {int, float} and _all_finite(column):
        series = run.series.setdefault(name, MetricSeries())
        series.at_s.extend(at_s)
        series.values.extend(column)
        run.last[name] = column[-1]
        return
    for value, at in zip(column, at_s, strict=True):
        _take_metric(run, name, value, at)


def _all_finite(column: Sequence[float]) -> bool:
    return min(column) >= -sys.float_info.max and max(column) <= sys.float_info.max


def _take_metric(run: RunSummary, name: str, value: Any, at_s: float) -> None:
    if value is None and name in run.series:
        value = math.nan  # the event log writes NaN as null
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = value if abs(value) <= sys.float_info.max else math.nan
        run.series.setdefault(name, MetricSeries()).add_value(at_s, float(value))
    elif not isinstance(value, (str, bool)):
        return
    run.last[name] = value


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
