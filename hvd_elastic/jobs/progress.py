"""Follows the run of a job by its events: its slots, its measurements and its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_elastic.model.goodput import goodput_curve
from hvd_elastic.model.step_time import StepTimeModel
from hvd_elastic.policy.replay import Replay
from hvd_elastic.records.json_lines import EventFollower, Record
from hvd_elastic.records.run_folder import RunFolder

_WARMING_S = 1.0
"""Training time that a change of slots costs beside its pause [slot seconds]: the new processes
warm up in their slots meanwhile."""


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        at: when [Unix s].
        status: ``succeeded``, ``failed`` or ``stopped``.
        message: why, in words.
    """

    at: float
    status: str
    message: str


class RunProgress:
    """What the events of a run say so far; :meth:`poll` reads the new ones.

    Attributes:
        folder: the run folder.
        ending: how the run ended; None: it goes on, as far as its events say.
        waiting: what the run waits for; empty: nothing.
        unfit: hosts on which its present leader can start no agent as they are, with the cause: the
            fault may be the host's or the job's.
        attained_slot_s: slots times seconds of training.
        rescales: number of changes of its slots while it trained.
        began_at: when its present or last leader began [Unix s]; None: none has.
        cut_off_at: since when its leader hears from none of its hosts [Unix s]; None: it does.
        trained_at: when the run finished its last rescale, so that it has trained [Unix s].
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.ending: Ending | None = None
        self.waiting = ""
        self.attained_slot_s = 0.0
        self.rescales = 0
        self.began_at: float | None = None
        self.cut_off_at: float | None = None
        self.trained_at: float | None = None
        self._follower = EventFollower(folder.events)
        self._replay = Replay()
        self.unfit: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        self._processes: dict[tuple[str, int], bool] = {}
        """Host and slot of each live process of the run; whether it has started."""
        self._size, self._size_since = 0, 0.0
        self._part = 0.0
        """Part of the training that is done, as the script reports it."""
        self._epochs: tuple[float, float] = (0.0, 0.0)
        """Number of whole epochs, and useful examples at the end of the last."""
        self._curve: tuple[StepTimeModel, float, tuple[int, ...], np.ndarray] | None = None

    def poll(self) -> bool:
        """Read new events; return whether they may change a decision of the scheduler."""
        before = self.measured_slots
        for event in self._follower.poll():
            self._replay.add(event)
            self._note(event)
        return before != self.measured_slots

    def take_lost(self) -> dict[str, str]:
        """Return hosts that the run has lost since the last call, with the cause."""
        found, self._lost = self._lost, {}
        return found

    @property
    def occupied(self) -> dict[str, int]:
        """Number of slots of each host in which processes of the run live or start."""
        found: dict[str, int] = {}
        for host, slot in self._processes:
            found[host] = max(found.get(host, 0), slot + 1)
        return found

    @property
    def hosts(self) -> set[str]:
        """Hosts on which processes of the run have started."""
        return {host for (host, _), has_started in self._processes.items() if has_started}

    @property
    def measured_slots(self) -> int:
        """Largest number of slots with which steps were timed."""
        return max((slots for _, slots in self._replay.evidence.timings.worlds), default=0)

    @property
    def rescale_s(self) -> float:
        """Training time that a change of its slots costs [s]."""
        return self._replay.evidence.pause_s + _WARMING_S

    @property
    def done(self) -> float:
        """Useful examples so far."""
        return self._replay.evidence.done

    def service(self, now: float) -> float:
        """Return slots times seconds that the run has trained, until ``now`` [Unix s]."""
        going = self._size * max(0.0, now - self._size_since) if self._size else 0.0
        return self.attained_slot_s + going

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

    # -- events ----------------------------------------------------------------------------

    def _note(self, event: Record) -> None:
        kind, at = event["kind"], float(event.get("t") or 0.0)
        if kind == "run_started":
            self.ending = None
            self.began_at = at
            self._processes.clear()
            self._lost.clear()
            self.unfit.clear()
            self.cut_off_at = None
        elif kind == "leader_cut_off":
            self.cut_off_at = at
        elif kind == "taken_over":
            self.cut_off_at = None
            self._resized(int(event.get("size") or 0), at)
        elif kind == "rescale_started":
            self._occupy(event)
        elif kind == "rescale_finished":
            self.trained_at = at
            self.waiting = ""
            self._resized(int(event.get("size") or 0), at)
        elif kind == "worker_started":
            self._processes.setdefault(_slot(event), False)
        elif kind == "worker_standby":
            self._processes[_slot(event)] = True
            self._lost.pop(str(event.get("host")), None)
        elif kind == "worker_left":
            self._processes.pop(_slot(event), None)
        elif kind == "host_lost":
            host = str(event.get("host"))
            self._lost[host] = str(event.get("cause") or "lost")
            for slot in [each for each in self._processes if each[0] == host]:
                del self._processes[slot]
        elif kind == "warning" and "unusable_host" in event:
            host, cause = str(event["unusable_host"]), str(event.get("message"))
            self._lost[host] = cause
            if event.get("fatal"):
                self.unfit[host] = cause
        elif kind == "agent_started":
            self._lost.pop(str(event.get("host")), None)
            self.unfit.pop(str(event.get("host")), None)
        elif kind == "waiting":
            self.waiting = str(event.get("reason") or "")
        elif kind == "metrics":
            self._note_progress(event)
        elif kind == "run_finished":
            self._resized(0, at)
            self._processes.clear()
            self.ending = Ending(at, str(event.get("status")), str(event.get("message") or ""))

    def _resized(self, size: int, at: float) -> None:
        if self._size:
            self.attained_slot_s += self._size * max(0.0, at - self._size_since)
            self.rescales += bool(size) and size != self._size
        self._size, self._size_since = size, at

    def _occupy(self, event: Record) -> None:
        # Members of a taken-over run have no event of their own in this leader's life.
        hosts, slots = event.get("hosts") or [], event.get("slots") or []
        for host, number in zip(hosts, slots, strict=False):
            self._processes |= {(str(host), slot): True for slot in range(int(number))}

    def _note_progress(self, event: Record) -> None:
        epoch = event.get("epoch")
        if isinstance(epoch, int) and epoch > self._epochs[0]:
            self._epochs = (float(epoch), self.done)
        part = event.get("done")
        if isinstance(part, (int, float)) and 0 < part <= 1:
            self._part = float(part)


def _slot(event: Record) -> tuple[str, int]:
    return str(event.get("host")), int(event.get("local_rank") or 0)


def _sizes(most: int) -> np.ndarray:
    """Return numbers of slots at which the curve is computed; others are interpolated."""
    return np.unique(np.rint(np.geomspace(1, most, 24)).astype(np.int64))


def _near(one: float, other: float) -> bool:
    return one == other or abs(math.log1p(one) - math.log1p(other)) < 0.1
