"""Read a trace from JSON: a cluster, a workload, and the changes of the cluster over time.

::

    {
      "duration_s": 86400, "np": 4, "min_np": 1, "max_np": 32, "pause_s": 2.0, "jitter": 0.03,
      "unequal_shares": true,
      "hosts": [{"name": "n[0-7]", "slots": 4, "price": 1.0, "slowness": 1.0}],
      "workload": {"alpha_c": 0.01, "beta_c": 0.001, "alpha_r": 0.002, "beta_r": 1e-4,
                   "alpha_n": 0.005, "beta_n": 2e-4, "gamma": 1.5, "initial_batch_size": 128,
                   "max_batch_size": 4096, "noise_scale": [500, 5000], "examples": 1e8},
      "changes": [{"at_s": 3600, "link": 10}, {"at_s": 7200, "slow": {"n1": 3}},
                  {"at_s": 9000, "add": [{"name": "m0", "slots": 4}]},
                  {"at_s": 9900, "remove": ["n2"]}]
    }

``link`` multiplies the times of the all-reduce across hosts and ``slow`` those of a host's passes,
both relative to their first values. Times are in seconds.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count
from hvd_elastic.model.goodput import BatchLimits
from hvd_elastic.model.step_time import StepTimeModel
from hvd_elastic.policy.snapshot import Allocation, HostOffer

_MOST_SLOTS = 65_536
"""Limit of a hostfile too: a typing error in a range must not fill the memory."""
_Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
_Whole = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class Workload:
    """The true properties of a training; the policy only gets measurements of them.

    Attributes:
        alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n, gamma: parameters of the step time; see
            :class:`hvd_elastic.model.step_time.StepTimeModel`.
        noise_scale: gradient noise scale at the start and after ``examples`` [examples]; its
            logarithm is linear in between.
        examples: number of useful examples of the whole training.
    """

    alpha_c: float
    beta_c: float
    alpha_r: float
    beta_r: float
    alpha_n: float
    beta_n: float
    gamma: float
    limits: BatchLimits
    noise_scale: tuple[float, float]
    examples: float

    def model(self, link: float = 1.0) -> StepTimeModel:
        """Return the true step-time model, with a factor on the all-reduce across hosts."""
        return StepTimeModel(
            self.alpha_c,
            self.beta_c,
            self.alpha_r,
            self.beta_r,
            self.alpha_n * link,
            self.beta_n * link,
            self.gamma,
            covariance=np.eye(7),
            noise=0.0,
        )

    def noise_at(self, done: float) -> float:
        """Return the noise scale after a number of useful examples [examples]."""
        first, last = self.noise_scale
        return float(first * (last / first) ** min(done / self.examples, 1.0))


@dataclass(frozen=True)
class Change:
    """A change of the cluster.

    Attributes:
        at_s: time of the change [s].
        link: new factor on the times of the all-reduce across hosts; None: as before.
        slow: new factors on the passes of hosts, by name.
        remove: names of hosts that are removed.
    """

    at_s: float
    link: float | None = None
    slow: Mapping[str, float] = field(default_factory=dict)
    add: tuple[HostOffer, ...] = ()
    remove: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Input of a simulation.

    Attributes:
        hosts: hosts with their true slowness.
        duration_s: virtual time to simulate [s].
        min_np, max_np: bounds of the number of slots; None: no upper bound.
        pause_s: typical pause of a rescale [s].
        jitter: relative standard deviation of measured step times, pauses and noise scales.
        changes: changes of the cluster, in order of time.
        unequal_shares: whether slow ranks get fewer examples of a step, as in a real job whose
            batch adapts; else all wait for the slowest.
    """

    hosts: tuple[HostOffer, ...]
    workload: Workload
    duration_s: float
    np: int = 1
    min_np: int = 1
    max_np: int | None = None
    pause_s: float = 2.0
    jitter: float = 0.03
    changes: tuple[Change, ...] = ()
    unequal_shares: bool = True


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    """An object of the file."""


class _Hosts(_Part):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    slots: _Whole = 1
    price: _NotNegative | None = None
    slowness: _Positive = 1.0


class _Workload(_Part):
    alpha_c: _Positive
    beta_c: _Positive
    alpha_r: _Positive
    beta_r: _Positive
    alpha_n: _Positive
    beta_n: _Positive
    initial_batch_size: _Whole
    noise_scale: _Positive | Annotated[list[_Positive], msgspec.Meta(min_length=2, max_length=2)]
    examples: _Positive
    gamma: Annotated[float, msgspec.Meta(gt=1, lt=10)] = 1.5
    max_batch_size: _Whole | None = None
    max_atomic_batch_size: _Whole | None = None
    max_accumulation_steps: Annotated[int, msgspec.Meta(ge=0)] = 15


class _Change(_Part):
    at_s: _NotNegative
    link: _Positive | None = None
    slow: dict[str, _Positive] = {}
    add: list[_Hosts] = []
    remove: tuple[str, ...] = ()


class _File(_Part):
    duration_s: _Positive
    hosts: list[_Hosts]
    workload: _Workload
    np: _Whole = Trace.np
    min_np: _Whole = Trace.min_np
    max_np: _Whole | None = Trace.max_np
    pause_s: _Positive = Trace.pause_s
    jitter: _NotNegative = Trace.jitter
    unequal_shares: bool = Trace.unequal_shares
    changes: list[_Change] = []


class _TraceError(Exception):
    pass


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        UsageError: the file is missing, is not JSON, or a part of it is not valid; says which.
    """
    try:
        return _trace(msgspec.json.decode(path.read_bytes(), type=_File))
    except OSError as error:
        raise UsageError(f"trace {path} cannot be read: {error.strerror}") from error
    except (msgspec.ValidationError, _TraceError) as error:
        raise UsageError(f"trace {path}: {error}; docs/autoscaling.md has an example") from error
    except ValueError as error:
        raise UsageError(f"trace {path} is not JSON: {error}") from error


def _trace(file: _File) -> Trace:
    changes = (
        Change(each.at_s, each.link, each.slow, _hosts(each.add), each.remove)
        for each in sorted(file.changes, key=lambda change: change.at_s)
    )
    made = {"hosts": _hosts(file.hosts), "workload": _workload(file.workload)}
    trace = Trace(**{**msgspec.structs.asdict(file), **made, "changes": tuple(changes)})
    if not trace.hosts:
        raise _TraceError("hosts is empty: at least one is needed")
    slots = sum(host.slots for host in trace.hosts)
    if trace.max_np is not None and trace.max_np < trace.min_np:
        raise _TraceError(f"min_np {trace.min_np} is above max_np {trace.max_np}")
    for name, value in (("np", trace.np), ("min_np", trace.min_np)):
        if value > slots:
            raise _TraceError(f"{name} {value} is above the {count(slots, 'slot')} of the hosts")
    if trace.max_np is not None and trace.np > trace.max_np:
        raise _TraceError(f"np {trace.np} is above max_np {trace.max_np}")
    _check_changes(trace)
    return trace


def _check_changes(trace: Trace) -> None:
    here = {host.name for host in trace.hosts}
    known = set(here)
    for change in trace.changes:
        here |= {host.name for host in change.add}
        known |= here
        unknown = [name for name in (*change.slow, *change.remove) if name not in known]
        if unknown:
            raise _TraceError(f"the change at {change.at_s:g} s names no host: {unknown[0]!r}")
        here -= set(change.remove)
        if not here:
            raise _TraceError(f"the change at {change.at_s:g} s leaves no host to train on")


def _hosts(entries: Sequence[_Hosts]) -> tuple[HostOffer, ...]:
    found: dict[str, HostOffer] = {}
    for entry in entries:
        for name in _names(entry.name):
            if name in found:
                raise _TraceError(f"host {name} is there twice")
            found[name] = HostOffer(name, entry.slots, entry.price, entry.slowness)
    if sum(host.slots for host in found.values()) > _MOST_SLOTS:
        raise _TraceError(f"the hosts have more than {_MOST_SLOTS} slots together")
    return tuple(found.values())


def _names(name: str) -> list[str]:
    """Return the host names of a range such as ``n[0-7]``, or the one name."""
    head, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    low, _, high = rest.rstrip("]").partition("-")
    if not (low.isdigit() and high.isdigit() and int(low) <= int(high)):
        raise _TraceError(f"host name {name!r} is not a range; valid: n[0-7]")
    if int(high) - int(low) >= _MOST_SLOTS:
        raise _TraceError(f"host name {name!r} is more than {_MOST_SLOTS} hosts")
    return [f"{head}{number:0{len(low)}}" for number in range(int(low), int(high) + 1)]


def _workload(part: _Workload) -> Workload:
    initial, noise = part.initial_batch_size, part.noise_scale
    largest = part.max_batch_size or initial
    if largest < initial:
        raise _TraceError(f"max_batch_size {largest} is below initial_batch_size {initial}")
    return Workload(
        *(part.alpha_c, part.beta_c, part.alpha_r, part.beta_r, part.alpha_n, part.beta_n),
        gamma=part.gamma,
        limits=BatchLimits(
            initial,
            largest,
            max_atomic_batch_size=part.max_atomic_batch_size,
            max_accumulation_steps=part.max_accumulation_steps,
        ),
        noise_scale=(noise[0], noise[1]) if isinstance(noise, list) else (noise, noise),
        examples=part.examples,
    )


class Cluster:
    """Hosts and link at the present time; :meth:`advance` applies the changes of the trace.

    Attributes:
        link: factor on the times of the all-reduce across hosts.
    """

    def __init__(self, trace: Trace) -> None:
        self.hosts = trace.hosts
        self.link = 1.0
        self._to_come = list(trace.changes)
        self._first_slowness = {host.name: host.slowness for host in trace.hosts}

    def next_change_at(self) -> float | None:
        """Return the time of the next change [s]; None if there is none."""
        return self._to_come[0].at_s if self._to_come else None

    def advance(self, now: float) -> bool:
        """Apply all changes up to ``now`` [s]; return whether there was one."""
        before = len(self._to_come)
        while self._to_come and self._to_come[0].at_s <= now:
            self._apply(self._to_come.pop(0))
        return len(self._to_come) < before

    def slowness_of_ranks(self, allocation: Allocation) -> list[float]:
        """Return the true slowness of each rank's host."""
        slowness = {host.name: host.slowness for host in self.hosts}
        return [slowness[host] for host, number in allocation.counts for _ in range(number)]

    def filled(self, wanted: Allocation, least: int) -> Allocation:
        """Return the wanted slots that exist, with free slots in place of missing ones.

        Args:
            least: fewest slots to return, as far as there are any.
        """
        asked = dict(wanted.counts)
        counts = {h.name: min(asked.get(h.name, 0), h.slots) for h in self.hosts}
        left = max(wanted.slots, least) - sum(counts.values())
        for host in self.hosts:
            more = min(max(left, 0), host.slots - counts[host.name])
            counts[host.name] += more
            left -= more
        return Allocation.of(counts)

    def _apply(self, change: Change) -> None:
        self.link = self.link if change.link is None else change.link
        for host in change.add:
            self._first_slowness[host.name] = host.slowness
        there = {host.name: host for host in (*self.hosts, *change.add)}
        for name in change.remove:
            there.pop(name, None)
        for name, factor in change.slow.items():
            if name in there:
                first = self._first_slowness[name]
                there[name] = dataclasses.replace(there[name], slowness=first * factor)
        self.hosts = tuple(there.values())
