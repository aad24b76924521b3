"""Collect measurements from the events of a run: step times, noise scale, pauses, progress.

What workers report was checked where it was read; a number without a meaning, such as a negative
noise scale, is ignored.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from msgspec import structs

from hvd_elastic import run_events as ev
from hvd_elastic.formatting import count
from hvd_elastic.model.goodput import BatchLimits, BatchPlan, statistical_efficiency
from hvd_elastic.model.step_time import Observation, StepTimeModel
from hvd_elastic.model.timings import LEADER_RULES, Configuration, StepTimings
from hvd_elastic.policy.input import InputSupply
from hvd_elastic.policy.snapshot import Allocation
from hvd_elastic.policy.speeds import RankSpeeds
from hvd_elastic.run_events import Input, Metrics, ReadEvent, RescaleFinished, RescaleStarted

_WINDOW_S = 1.0
"""Shortest window; shorter ones are joined, since times of metrics are exact to a step only."""
_MIXED = 3
"""Windows in a row with the end of an epoch, from which on their examples count as full steps."""
_SHORTEST_S = 1e-9
"""Shortest compute time accepted."""
_SETTLING = 1
"""Windows after a change that are not timed: readers start, memory is allocated."""
_NOISE_PATIENCE = 20
"""Windows without a finite noise scale after which it counts as infinite."""
_FIRST_PAUSE_S = 1.0
"""Pause of a rescale that is assumed before the first."""
_PAUSES = 8
"""Most recent pauses that are kept."""


class Evidence:
    """Collects measurements of one run.

    Attributes:
        done: number of useful examples so far.
        noise_scale: gradient noise scale reported last [examples]; NaN: not known.
        limits: limits of the batch plan; None: not known.
        plan: batch plan in use; None: not known.
        allocation: slots that train now.
        measured: number of windows timed since they began to train.
        cores: cores that ranks share.
        news: whether something has changed that requires a decision soon.
    """

    def __init__(self) -> None:
        self.done = 0.0
        self.noise_scale = math.nan
        self.limits: BatchLimits | None = None
        self.plan: BatchPlan | None = None
        self.cores = CoreSharing()
        self.news = False
        self._adaptive = False
        self.allocation = Allocation()
        self.speeds = RankSpeeds()
        self.timings = StepTimings(LEADER_RULES)
        self._windows = _ProgressWindows()
        self._noise_at = 0
        """Number of windows when a noise scale was reported last."""
        self._pauses: deque[float] = deque(maxlen=_PAUSES)
        self.measured = 0
        self._core_s: float | None = None
        """Processor time to read an example [s]; None: ranks do not wait for it."""
        self._present: Configuration | None = None
        """Configuration that trains now; None until it was timed."""

    # -- events ----------------------------------------------------------------------------

    def formed(self, hosts_of_ranks: Sequence[str]) -> None:
        """Begin another generation with ranks on these hosts, in rank order."""
        self.allocation = Allocation.of(Counter(hosts_of_ranks))
        self.speeds.formed(hosts_of_ranks)
        self._windows.restart(self._planned_passes)
        self.measured = 0
        self._present = None

    def note_event(self, event: ReadEvent) -> None:
        """Take measurements from an event of the run; others are ignored."""
        match event:
            case Metrics():
                self._take_metrics(event)
            case ev.BatchPlan(global_batch_size=batch, accumulation_steps=extra, limits=limits):
                self.plan = BatchPlan(batch, extra)
                self._present = None
                self._windows.restart(self._planned_passes)
                self.limits, self._adaptive = BatchLimits(**structs.asdict(limits)), True
            case ev.AgentStarted(host=host, machine=machine, cpus=cores):
                self.cores.add_host(host, machine, cores)
            case ev.Input(core_s=core_s, bound=bound, helpers=helpers):
                # Input hosts have cores of their own, which bound nothing here.
                is_bound = bound == "cores" and not helpers
                before, self._core_s = self._core_s, core_s if is_bound else None
                self.news |= (before is None) != (self._core_s is None)
            case ev.RescaleFinished(pause_s=pause_s) if pause_s is not None:
                self._pauses.append(pause_s)

    def _take_metrics(self, event: Metrics) -> None:
        if event.size != self.allocation.slots:
            self._windows.interrupt()  # a late report of another generation
            return
        if event.noise_scale is not None and 0 <= event.noise_scale < math.inf:
            self.noise_scale, self._noise_at = event.noise_scale, self._windows.count
        if event.shares is not None:
            self._take_shares(event.shares)
        if event.rank_s:
            self._take_compute_times(event.rank_s, event.mono)
        window = self._windows.add_report(event, self._planned_passes)
        if window is not None:
            self._take_window(window, event)
        # Steps outside of windows count too, such as the first ones after a rescale.
        # After a return to a checkpoint they are trained again, and count once.
        since = self._windows.examples_since(event.examples)
        self.done = max(0.0, self.done + since * self._efficiency())

    def _take_window(self, window: _Window, event: Metrics) -> None:
        batch = window.examples / window.steps
        if not self._adaptive:
            # Take the batch of full steps; the last step of an epoch is smaller.
            known = self.plan.global_batch_size if self.plan else 0
            whole = event.global_batch_size or max(known, math.ceil(batch - 0.01))
            if whole > 0 and whole != known:
                self.plan = BatchPlan(whole)
                self.limits = BatchLimits(whole, whole, max_accumulation_steps=0)
        if window.settling or self.speeds.rebalancing:
            return
        plan, ranks = self.plan, self.allocation.slots
        if plan is None:
            return
        steps = window.steps
        if batch < 0.97 * plan.global_batch_size:  # an epoch ended in this window
            self._windows.mixed += 1
            if self._windows.mixed < _MIXED:
                return
            steps = window.examples / plan.global_batch_size
        else:
            self._windows.mixed = 0
        # If the steps have different numbers of passes, their mean scatters.
        extra = round(4 * self._windows.passes) / 4 - 1
        atomic = plan.global_batch_size / ranks / (extra + 1)
        slowness = self.speeds.steps_slowness(plan)
        where = Configuration(self.allocation.hosts, ranks, atomic, extra, slowness)
        self._present = where
        self.measured += 1
        self.cores.note_timed(self.allocation.counts)
        if self.timings.add_window(where, window.seconds / steps, now=event.mono):
            self.news = True

    def _take_shares(self, shares: Sequence[int]) -> None:
        """Take the examples of each rank in a full step; not reported if shares are equal."""
        if len(shares) == len(self.speeds.hosts) and min(shares, default=0) > 0:
            if self.speeds.note_shares(tuple(shares)):
                self._windows.restart(self._windows.passes)

    def _take_compute_times(self, reported: Sequence[float | None], now: float) -> None:
        if len(reported) != len(self.speeds.hosts) or not self.speeds.is_new(reported):
            return
        times = [seconds if seconds and seconds >= _SHORTEST_S else 0.0 for seconds in reported]
        fastest = None if self.plan is None else self.speeds.fastest(times, self.plan)
        if fastest is not None and self.plan is not None and round(fastest.examples) >= 1:
            examples, extra = round(fastest.examples), self.plan.accumulation_steps
            where = Configuration(1, 1, examples / (extra + 1), extra, fastest.slowness)
            self.timings.add_alone(where, fastest.compute_s * examples / fastest.examples)
        if self.speeds.add_report(times, self.plan, round(self._windows.passes), now):
            # The steps on these hosts and ranks were timed with a wrong slowness.
            self.timings.forget_world(self.allocation.hosts, self.allocation.slots)
            self.measured = 0
            self.news = True

    # -- results ---------------------------------------------------------------------------

    @property
    def present(self) -> Observation | None:
        """Step time of the present configuration; None if it was not timed yet."""
        return self.timings.observation(self._present)

    @property
    def pause_s(self) -> float:
        """Typical pause of a rescale [s]; an assumption before the first."""
        return median(self._pauses) if self._pauses else _FIRST_PAUSE_S

    @property
    def supply(self) -> InputSupply | None:
        """Examples/s that the hosts' cores can read; None: ranks do not wait for that."""
        return None if self._core_s is None else InputSupply(self._core_s, self.cores.machines)

    def silent_s(self, now: float) -> float:
        """Return the time since the last measurement [s]."""
        return now - self._windows.measured_at

    @property
    def noise(self) -> float:
        """Gradient noise scale for decisions [examples]; NaN: not known yet.

        It is infinite for a fixed batch, whose efficiency is always 1. It is infinite as well if
        the batch adapts and no finite value was reported for a while: then gradients are so noisy
        that every example counts.
        """
        if not self._adaptive:
            return math.inf
        if self._windows.count - self._noise_at >= _NOISE_PATIENCE:
            return math.inf
        return self.noise_scale

    def model(self) -> StepTimeModel | None:
        """Return the step-time model; see :meth:`StepTimings.model`."""
        return self.timings.model()

    @property
    def _planned_passes(self) -> float:
        return 1.0 if self.plan is None else self.plan.accumulation_steps + 1.0

    def _efficiency(self) -> float:
        if self.plan is None or self.limits is None or not math.isfinite(self.noise):
            return 1.0
        initial = self.limits.initial_batch_size
        size = max(self.plan.global_batch_size, initial)
        return float(statistical_efficiency(self.noise, initial, size))


class _Window(NamedTuple):
    """Steps between two reports; ``settling`` if it is too soon after a change to be timed."""

    seconds: float
    steps: float
    examples: float
    settling: bool


class _ProgressWindows:
    """Turns reports of progress into windows of at least a second.

    Attributes:
        passes: mean number of passes of a step in the last window.
        count: number of windows so far.
        measured_at: end of the last window [s].
        mixed: latest windows in a row that had the smaller last step of an epoch.
    """

    def __init__(self) -> None:
        self.passes = 1.0
        self.count = 0
        self.mixed = 0
        self.measured_at = -math.inf
        self._last: Metrics | None = None
        self._examples = 0.0
        self._settling = _SETTLING

    def examples_since(self, examples: float) -> float:
        """Return how many examples more than at the last call were trained; below 0: fewer."""
        before, self._examples = self._examples, examples
        return examples - before

    def interrupt(self) -> None:
        """Begin with the next report."""
        self._last = None

    def restart(self, passes: float) -> None:
        """Begin with the next report; the first window is settling."""
        self._last = None
        self.passes = passes
        self._settling = _SETTLING

    def add_report(self, report: Metrics, planned_passes: float) -> _Window | None:
        """Add a report; return the window that it ends, or None."""
        last = self._last
        if (
            last is None
            or report.step < last.step
            or report.examples < last.examples
            or report.mono < last.mono
        ):
            self._last = report
            return None
        seconds, steps = report.mono - last.mono, report.step - last.step
        if steps < 1 or seconds < _WINDOW_S:
            return None
        self._last = report
        self.passes = planned_passes
        if report.passes is not None and last.passes is not None:
            self.passes = max(1.0, (report.passes - last.passes) / steps)
        self.count += 1
        self.measured_at = report.mono
        settling = self._settling > 0
        self._settling = max(0, self._settling - 1)
        return _Window(seconds, steps, report.examples - last.examples, settling)


class Sharing(NamedTuple):
    """Number of ranks that share the cores of one machine."""

    ranks: int
    cores: int

    @property
    def ranks_per_core(self) -> float:
        return self.ranks / self.cores


class CoreSharing:
    """Tracks which ranks share cores: several hosts can be parts of one machine.

    Attributes:
        densest: the most ranks per core that steps were timed with; None: not known.
    """

    def __init__(self) -> None:
        self.densest: Sharing | None = None
        self._timed: Sequence[tuple[str, int]] = ()
        """What :attr:`densest` counts last."""
        self._machines: dict[str, tuple[str, int]] = {}

    def add_host(self, host: str, machine: str, cores: int) -> None:
        """Record the machine of a host, if it is known, and its number of cores."""
        self._machines[host] = (machine or host, cores)
        self._timed = ()

    @property
    def machines(self) -> tuple[tuple[str, str, int], ...]:
        """Machine and number of cores of each known host."""
        return tuple((host, *found) for host, found in self._machines.items())

    def note_timed(self, counts: Sequence[tuple[str, int]]) -> None:
        """Record that steps were timed with these numbers of ranks on hosts."""
        if counts != self._timed:
            self._timed = counts
            self.densest = max(self.of(counts), self.densest, key=_density)

    def why_unknown(self, counts: Iterable[tuple[str, int]]) -> str:
        """Return why a size cannot be predicted: more ranks share a core than were timed; else "".

        Args:
            counts: pairs of host and number of ranks on it.
        """
        sharing, timed = self.of(counts), self.densest
        if sharing is None or timed is None:
            return ""
        if sharing.ranks_per_core <= max(1.0, timed.ranks_per_core):
            return ""
        ranks, cores = count(sharing.ranks, "rank"), count(sharing.cores, "core")
        most = f"{count(timed.ranks, 'rank')} on {count(timed.cores, 'core')}"
        return f"{ranks} would share {cores} of one machine, and at most {most} were timed"

    def of(self, counts: Iterable[tuple[str, int]]) -> Sharing | None:
        """Return the machine with the most ranks per core; None if no host is known.

        If all known hosts are parts of one machine, unknown hosts count as further parts of it;
        else each of them counts as a machine like the others.

        Args:
            counts: pairs of host and number of ranks on it.
        """
        if not self._machines:
            return None
        known = list(self._machines.values())
        machines = {machine for machine, _ in known}
        common = max((cores for _, cores in known), key=[c for _, c in known].count)
        one = known[0] if len(machines) == 1 < len(known) else None
        ranks: Counter[str] = Counter()
        cores_of: dict[str, int] = {}
        for number, (host, slots) in enumerate(counts):
            machine, cores = self._machines.get(host) or one or (f"machine {number}", common)
            ranks[machine] += slots
            cores_of[machine] = cores
        found = [Sharing(ranks[machine], cores_of[machine]) for machine in ranks]
        return max(found, key=_density, default=None)


def _density(sharing: Sharing | None) -> float:
    return 0.0 if sharing is None else sharing.ranks_per_core


def replay(events: Iterable[ReadEvent]) -> Evidence:
    """Return the measurements in a run's events, which come oldest first.

    The result has no present generation: nothing counts as measured until one is formed.

    >>> events = [RescaleStarted(1, 0, 2, ["a"], [2], "start"), RescaleFinished(1, 2, None)]
    >>> for n in range(6):
    ...     events.append(Metrics(20 * n, 0, 0, 640 * n, 2, mono=2.0 * n))
    >>> round(float(replay(events).model().step_s(1, 2, 16, 0)), 2)
    0.1
    """
    replaying = Replay()
    for event in events:
        replaying.add_event(event)
    evidence = replaying.evidence
    evidence.formed([])
    evidence.news = False
    return evidence


class Replay:
    """Takes the events of a run as they come, oldest first."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self._begun: RescaleStarted | None = None

    def add_event(self, event: ReadEvent) -> None:
        """Take measurements from an event."""
        begun = self._begun
        match event:
            case Metrics():
                pass  # nearly all are
            case RescaleStarted():
                self._begun = event
                return
            case RescaleFinished(generation=generation):
                if begun is None or begun.generation != generation:
                    return
                ranks = zip(begun.hosts, begun.slots, strict=False)  # those of a host in a row
                self.evidence.formed([host for host, number in ranks for _ in range(number)])
            case Input():
                return  # of the run's past: it waits for other things by now
        self.evidence.note_event(event)
