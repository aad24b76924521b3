"""Follows the run of a job by its events: its hosts, its measurements and its end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_elastic import run_events as ev
from hvd_elastic.control.backoff import Retry
from hvd_elastic.model.goodput import goodput_curve
from hvd_elastic.model.step_time import StepTimeModel
from hvd_elastic.policy.evidence import Replay
from hvd_elastic.records.wording import cut_off_words, silent_words
from hvd_elastic.run_events import ReadEvent

READ_KINDS = frozenset(
    kind.__struct_config__.tag
    for kind in (
        *(ev.RunStarted, ev.TakenOver, ev.LeaderCutOff, ev.RunFinished),
        *(ev.RescaleStarted, ev.RescaleFinished, ev.HostsChanged, ev.HostLost, ev.AgentStarted),
        ev.HostFaults,
        *(ev.WorkerStarted, ev.WorkerStandby, ev.WorkerLeft, ev.Warned),
        *(ev.Metrics, ev.BatchPlan, ev.Input),
    )
)
"""Kinds of events from which the progress of a run is read."""

_MOST_SLOTS = 4096
"""Slots of one host, far above what there is: events may be those of a user who means no good."""
_MOST_PROCESSES = 1 << 14
"""Processes of one run that live at a time, and hosts that it ever had: far above what there is."""
_MOST_NAME = 255
"""Characters of the name of a host or machine."""
_HOST_FIELDS = ("host", "unusable_host", "machine")
"""Fields of events with such a name."""
_MOST_CAUSE = 1000
"""Characters that are kept of why a host was lost."""
_BARRED_S = (5.0, 30.0, 120.0, 600.0)
"""Time for which a job gets no slots of a host on which its run could start no agent 1, 2, … times
in a row [s]: the cause may be mended, and each try holds slots for seconds."""
_WARMING_S = 1.0
"""Training time that a change of slots costs beside its pause [slot seconds]: the new processes
warm up in their slots meanwhile."""


class Measured:
    """Measurements of a run, for the scheduler; :meth:`note_event` takes its events.

    Attributes:
        rescales: number of changes of its slots while it trained.
    """

    def __init__(self) -> None:
        self.rescales = 0
        self._replay = Replay()
        self._attained_slot_s = 0.0
        """Slots times seconds of training, before the present size."""
        self._size, self._size_since = 0, 0.0
        self._part = 0.0
        """Part of the training that is done, as the script reports it."""
        self._epochs: tuple[float, float] = (0.0, 0.0)
        """Number of whole epochs, and useful examples at the end of the last."""
        self._curve: tuple[StepTimeModel, float, tuple[int, ...], np.ndarray] | None = None

    def note_event(self, event: ReadEvent) -> None:
        """Take an event of the run."""
        self._replay.add_event(event)
        match event:
            case ev.RescaleFinished(size=size) | ev.TakenOver(size=size):
                self._resized(size, event.t)
            case ev.RunFinished():
                self._resized(0, event.t)
            case ev.Metrics(epoch=epoch, done=part):
                if epoch > self._epochs[0]:
                    self._epochs = (float(epoch), self.done)
                if part is not None and 0 < part <= 1:
                    self._part = part

    @property
    def timed(self) -> set[int]:
        """Numbers of slots with which steps were timed."""
        return {slots for _, slots in self._replay.evidence.timings.worlds}

    @property
    def slots(self) -> int:
        """Largest number of slots with which steps were timed."""
        return max(self.timed, default=0)

    @property
    def rescale_s(self) -> float:
        """Training time that a change of its slots costs [s]."""
        return self._replay.evidence.pause_s + _WARMING_S

    @property
    def done(self) -> float:
        """Useful examples so far."""
        return self._replay.evidence.done

    @property
    def noise(self) -> float:
        """Relative standard error of the goodput that was measured."""
        return self._replay.evidence.timings.error

    def service(self, now: float) -> float:
        """Return slots times seconds that the run has trained, until ``now`` [Unix s]."""
        going = self._size * max(0.0, now - self._size_since) if self._size else 0.0
        return self._attained_slot_s + going

    def remaining(self, target_examples: float | None, epochs: float | None) -> float | None:
        """Return the useful examples that are left; None: not known.

        What the script itself reports is better than what its user says.
        """
        if target_examples is not None:
            return max(target_examples - self.done, 1.0)
        if self._part > 0 and self.done > 0:
            return max(self.done * (1 / self._part - 1), 1.0)
        passed, useful = self._epochs
        if epochs is None or passed <= 0 or useful <= 0:
            return None
        return max(epochs * useful / passed - self.done, 1.0)

    def goodput(self, per_host: Sequence[int]) -> np.ndarray | None:
        """Return useful examples/s by number of slots on as few hosts as possible; None: unknown.

        Args:
            per_host: slots of the cluster's hosts, most first.
        """
        evidence = self._replay.evidence
        model, limits, noise = evidence.model(), evidence.limits, evidence.noise
        if model is None or limits is None or math.isnan(noise):
            return None
        cached = self._curve
        shape = tuple(per_host)
        if cached and cached[0] is model and cached[2] == shape and _near(cached[1], noise):
            return cached[3]
        most = sum(per_host)
        edges = np.cumsum(per_host)
        slots = np.unique(np.concatenate([_sizes(most), edges]))
        hosts = np.searchsorted(edges, slots) + 1
        found = goodput_curve(model, noise, limits, hosts, slots).goodput
        every = np.interp(np.arange(most + 1), np.append(0, slots), np.append(0.0, found))
        self._curve = (model, noise, shape, every)
        return every

    def _resized(self, size: int, at: float) -> None:
        if self._size:
            self._attained_slot_s += self._size * max(0.0, at - self._size_since)
            self.rescales += bool(size) and size != self._size
        self._size, self._size_since = size, at


def _sizes(most: int) -> np.ndarray:
    """Return numbers of slots at which the curve is computed; others are interpolated."""
    return np.unique(np.rint(np.geomspace(1, most, 24)).astype(np.int64))


def _near(one: float, other: float) -> bool:
    return one == other or abs(math.log1p(one) - math.log1p(other)) < 0.1


@dataclass(frozen=True)
class Ending:
    """End of a run.

    Attributes:
        at, mono: when, by the wall clock [Unix s] and by the monotonic clock of the machine [s].
        status: ``succeeded``, ``failed`` or ``stopped``.
    """

    at: float
    mono: float
    status: str
    message: str


class RunProgress:
    """Progress of a run by its events; :meth:`add` takes new ones, and :meth:`poll` reads them.

    Attributes:
        ending: how the run ended; None: it runs, as far as its events say.
        began: event with which its present or last leader began; None: none has.
        cut_off_at: when its leader noted last that it hears from none of its hosts [Unix s].
        is_tried: whether the daemon has tried those hosts since.
        trained_at: when the run finished its last rescale, so that it has trained [Unix s].
        seen_at: time of its last event, or when the daemon saw last that it has a leader [Unix s].
    """

    def __init__(self) -> None:
        self.seen_at = 0.0
        self.ending: Ending | None = None
        self.began: ev.RunStarted | None = None
        self.cut_off_at, self.is_tried = 0.0, False
        self.trained_at: float | None = None
        self.hosts = RunHosts()
        self.measured = Measured()
        self._new: list[ReadEvent] = []

    def add(self, events: Iterable[ReadEvent]) -> None:
        """Take events, which :meth:`poll` reads."""
        self._new += events

    def poll(self) -> bool:
        """Read new events; return whether they may change a decision of the scheduler."""
        before = self.measured.slots, self.hosts.unheard
        new, self._new = self._new, []
        for event in new:
            self.measured.note_event(event)
            self.hosts.note_event(event)
            self._note_event(event)
            self.seen_at = max(self.seen_at, event.t)
        return before != (self.measured.slots, self.hosts.unheard)

    def _note_event(self, event: ReadEvent) -> None:
        match event:
            case ev.RunStarted():
                self.ending, self.began = None, event
            case ev.LeaderCutOff():
                self.cut_off_at, self.is_tried = event.t, False
            case ev.RescaleFinished():
                self.trained_at = event.t
            case ev.RunFinished(status=status, message=message):
                self.ending = Ending(event.t, event.mono, status, message)


class ClaimedHosts:
    """The hosts that events of another user's run name: they may be made up."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def checked(self, events: Iterable[ReadEvent]) -> Iterator[ReadEvent]:
        """Yield events, as long as they name no more than a run can have.

        Raises:
            ValueError: they do.
        """
        for event in events:
            named: list[Any] = [getattr(event, name, None) for name in _HOST_FIELDS]
            processes = 0
            match event:
                case ev.RescaleStarted(hosts=hosts, slots=slots):
                    named, processes = hosts, sum(slots)
                case ev.TakenOver(processes=found):
                    named, processes = [host for host, _ in found], len(found)
            names = [name for name in named if isinstance(name, str)]
            self._names.update(names)
            if max(processes, len(self._names)) > _MOST_PROCESSES:
                raise ValueError(f"a run of more than {_MOST_PROCESSES} processes or hosts")
            if any(len(name) > _MOST_NAME for name in names):
                raise ValueError(f"a host's name of more than {_MOST_NAME} characters")
            yield event


class RunHosts:
    """The hosts of a run; :meth:`note_event` takes its events.

    Attributes:
        unfit: hosts on which its present leader can start no agent as they are, with the cause: the
            fault may be the host's or the job's.
        lost: hosts that its present leader has lost, and not reached again.
        silent: hosts that its leader heard from before it was cut off, and has not reached again,
            with the time since when [Unix s].
    """

    def __init__(self) -> None:
        self.unfit: dict[str, str] = {}
        self.lost: set[str] = set()
        self._lost: dict[str, str] = {}
        self._processes: dict[tuple[str, int], bool] = {}
        """Host and slot of each live process of the run; whether it has started."""
        self.silent: dict[str, float] = {}
        self._faults: dict[str, ev.HostFaults] = {}
        self._cut_off = ""
        self._barred: dict[str, tuple[Retry, str]] = {}
        """When to try again hosts on which no agent could be started, and why not."""

    def barred(self, now: float) -> dict[str, str]:
        """Return the hosts on which the run could start no agent lately, with the cause.

        Args:
            now: present time [Unix s].
        """
        return {host: cause for host, (retry, cause) in self._barred.items() if now < retry.at}

    @property
    def unheard(self) -> str:
        """That its leader does not hear from its hosts, in words; empty: it does."""
        if self._cut_off or not self.silent:
            return self._cut_off
        return silent_words(self.silent)

    @property
    def occupied(self) -> dict[str, int]:
        """Number of slots of each host in which processes of the run live or start."""
        found: dict[str, int] = {}
        for host, slot in self._processes:
            found[host] = max(found.get(host, 0), slot + 1)
        return found

    @property
    def used(self) -> set[str]:
        """Hosts on which processes of the run have started."""
        return {host for (host, _), has_started in self._processes.items() if has_started}

    def take_lost(self) -> dict[str, str]:
        """Return hosts that the run has lost since the last call, with the cause."""
        found, self._lost = self._lost, {}
        return found

    def take_faults(self) -> list[ev.HostFaults]:
        """Return the faults of hosts of which the run has told since the last call."""
        found, self._faults = self._faults, {}
        return [*found.values()]

    def note_event(self, event: ReadEvent) -> None:
        """Take an event of the run.

        Raises:
            ValueError: it has more processes than any run.
        """
        if len(self._processes) > _MOST_PROCESSES:
            raise ValueError(f"more than {_MOST_PROCESSES} processes of one run")
        match event:
            case ev.HostFaults(host=host):
                self._faults[host] = event
            case ev.RunStarted():
                self._processes.clear()
                self._lost.clear()
                self.lost.clear()
                self.unfit.clear()
                self.silent.clear()
                self._cut_off = ""
            case ev.LeaderCutOff():
                since = event.t - event.silent_s
                self._cut_off = cut_off_words(event)
                self.silent |= dict.fromkeys([host for host, _ in self._processes], since)
            case ev.HostsChanged() if self._cut_off:
                # It leads again; processes of which it does not say so now have ended meanwhile.
                self._cut_off = ""
                self._processes.clear()
            case ev.TakenOver(processes=found):
                self._processes |= dict.fromkeys(found, True)
                for host, _ in found:
                    self.silent.pop(host, None)
            case ev.RescaleStarted(hosts=hosts, slots=slots):
                # Members of a taken-over run have no event of their own in this leader's life.
                for host, number in zip(hosts, slots, strict=False):
                    slots_here = range(min(number, _MOST_SLOTS))
                    self._processes |= {(host, slot): True for slot in slots_here}
            case ev.RescaleFinished():
                self.silent.clear()
            case ev.WorkerStarted(host=host, local_rank=slot):
                self._processes.setdefault((host, slot), False)
                self.silent.pop(host, None)
            case ev.WorkerStandby(host=host, local_rank=slot):
                self._processes[host, slot] = True
                self._lost.pop(host, None)
            case ev.WorkerLeft(host=host, local_rank=slot):
                self._processes.pop((host, slot), None)
            case ev.HostLost(host=host, cause=cause):
                self._lost[host] = cause[:_MOST_CAUSE]
                self.lost.add(host)
                self.silent.pop(host, None)
                for each in [each for each in self._processes if each[0] == host]:
                    del self._processes[each]
            case ev.Warned(unusable_host=host, message=cause) if host:
                self._lost[host] = cause[:_MOST_CAUSE]
                retry = self._barred.get(host, (Retry(_BARRED_S), ""))[0]
                retry.failed(event.t)
                self._barred[host] = retry, cause[:_MOST_CAUSE]
                if event.fatal:
                    self.unfit[host] = cause[:_MOST_CAUSE]
            case ev.AgentStarted(host=host):
                self._barred.pop(host, None)
                self._lost.pop(host, None)
                self.lost.discard(host)
                self.silent.pop(host, None)
                self.unfit.pop(host, None)
            case ev.RunFinished():
                self._cut_off = ""
                self.silent.clear()
                self._processes.clear()
