"""Traces: a cluster, a workload, and what happens to them over a time; read from JSON.

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

``link`` multiplies the times of the reduction across hosts, ``slow`` the times of a host's passes,
both against their first values. Times are in seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count
from hvd_elastic.model.goodput import BatchLimits
from hvd_elastic.model.step_time import StepTimeModel
from hvd_elastic.policy.snapshot import HostOffer

__all__ = ["Change", "Trace", "Workload", "read_trace"]

_MOST_SLOTS = 65_536
"""As in a hostfile: a slip in a range must end in a message, not in a full memory."""


@dataclass(frozen=True)
class Workload:
    """What is trained, as it truly is; the policy only sees its measurements.

    Attributes:
        alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n, gamma: of the step time; see
            :class:`hvd_elastic.model.step_time.StepTimeModel`.
        limits: of the batch plan.
        noise_scale: at the start and once ``examples`` are done [examples]; between, its
            logarithm is linear in the progress.
        examples: useful examples of the whole training.
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
        """Its true step times, with the reduction across hosts ``link`` times as slow."""
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
        """Noise scale after so many useful examples [examples]."""
        first, last = self.noise_scale
        return float(first * (last / first) ** min(done / self.examples, 1.0))


@dataclass(frozen=True)
class Change:
    """Something happens to the cluster.

    Attributes:
        at_s: when [s].
        link: factor on the times of the reduction across hosts from now on; None: as before.
        slow: factors on the passes of hosts from now on, by name.
        add: hosts that appear.
        remove: names of hosts that go.
    """

    at_s: float
    link: float | None = None
    slow: Mapping[str, float] = field(default_factory=dict)
    add: tuple[HostOffer, ...] = ()
    remove: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """All that a simulation needs.

    Attributes:
        hosts: with their true slowness.
        workload: what is trained.
        duration_s: virtual time [s].
        np: slots at the start.
        min_np, max_np: bounds.
        pause_s: typical pause of a rescale [s].
        jitter: relative standard deviation of measured step times, pauses and noise scales.
        changes: in order of time.
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


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        UsageError: the file is missing, no JSON, or a part of it makes no sense; says which.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"trace {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"trace {path} is not JSON: {error}") from error
    try:
        return _trace(_Part("", data))
    except _TraceError as error:
        raise UsageError(f"trace {path}: {error}") from error


class _TraceError(Exception):
    pass


class _Part:
    """An object of the file; takes fields out of it and complains about those that are left."""

    def __init__(self, name: str, data: Any) -> None:
        if not isinstance(data, dict):
            raise _TraceError(f"{name or 'the file'} must be an object, not {data!r:.40}")
        self.name, self.data = name, dict(data)
        self.known: list[str] = []

    def take(self, name: str, default: Any = ...) -> Any:
        self.known.append(name)
        if name not in self.data and default is ...:
            raise _TraceError(f"{self._path(name)} is missing")
        return self.data.pop(name, default)

    def number(self, name: str, default: Any = ..., above: float = 0.0) -> float:
        return _positive(self._path(name), self.take(name, default), above)

    def whole(self, name: str, default: Any = ..., least: int = 1) -> int:
        return _whole(self._path(name), self.take(name, default), least)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise _TraceError(f"{self._path(name)} must be true or false, not {value!r}")
        return value

    def parts(self, name: str, default: Any = ...) -> list[_Part]:
        value = self.take(name, default)
        if not isinstance(value, list):
            raise _TraceError(f"{self._path(name)} must be a list, not {value!r:.40}")
        return [_Part(f"{self._path(name)}[{i}]", entry) for i, entry in enumerate(value)]

    def end(self) -> None:
        if self.data:
            raise _TraceError(
                f"{self._path(next(iter(self.data)))} is not known; valid: {', '.join(self.known)}"
            )

    def _path(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


def _positive(name: str, value: Any, above: float = 0.0) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not above < value <= sys.float_info.max:
        raise _TraceError(f"{name} must be a number above {above:g}, not {value!r}")
    return float(value)


def _whole(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _TraceError(f"{name} must be a whole number of {least} or more, not {value!r}")
    return value


def _trace(part: _Part) -> Trace:
    hosts = _hosts(part.parts("hosts"))
    if not hosts:
        raise _TraceError("hosts is empty: at least one is needed")
    workload = _Part("workload", part.take("workload"))
    most = part.take("max_np", None)
    trace = Trace(
        hosts=hosts,
        workload=_workload(workload),
        duration_s=part.number("duration_s"),
        np=part.whole("np", 1),
        min_np=part.whole("min_np", 1),
        max_np=None if most is None else _whole("max_np", most),
        pause_s=part.number("pause_s", 2.0),
        jitter=part.number("jitter", 0.03, above=-1e-300),
        changes=tuple(sorted(map(_change, part.parts("changes", [])), key=lambda c: c.at_s)),
        unequal_shares=part.flag("unequal_shares", True),
    )
    part.end()
    if trace.max_np is not None and trace.max_np < trace.min_np:
        raise _TraceError(f"min_np {trace.min_np} is above max_np {trace.max_np}")
    slots = sum(host.slots for host in hosts)
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


def _hosts(parts: Sequence[_Part]) -> tuple[HostOffer, ...]:
    found: dict[str, HostOffer] = {}
    for part in parts:
        price = part.take("price", None)
        slots, slowness = part.whole("slots", 1), part.number("slowness", 1.0)
        for name in _names(part):
            if name in found:
                raise _TraceError(f"{part.name}.name: host {name} is there twice")
            cost = None if price is None else _positive(f"{part.name}.price", price, -1e-300)
            found[name] = HostOffer(name, slots, cost, slowness)
        part.end()
    if sum(host.slots for host in found.values()) > _MOST_SLOTS:
        raise _TraceError(f"the hosts have more than {_MOST_SLOTS} slots together")
    return tuple(found.values())


def _names(part: _Part) -> list[str]:
    """One name, or a range such as ``n[0-7]``."""
    name = part.take("name")
    if not isinstance(name, str) or not name:
        raise _TraceError(f"{part.name}.name must be a host name, not {name!r}")
    head, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    low, _, high = rest.rstrip("]").partition("-")
    if not (low.isdigit() and high.isdigit() and int(low) <= int(high)):
        raise _TraceError(f"{part.name}.name: {name!r} is no range; valid: n[0-7]")
    if int(high) - int(low) >= _MOST_SLOTS:
        raise _TraceError(f"{part.name}.name: {name!r} is more than {_MOST_SLOTS} hosts")
    return [f"{head}{number:0{len(low)}}" for number in range(int(low), int(high) + 1)]


def _workload(part: _Part) -> Workload:
    names = ("alpha_c", "beta_c", "alpha_r", "beta_r", "alpha_n", "beta_n")
    times = {name: part.number(name) for name in names}
    gamma = part.number("gamma", 1.5, above=1.0)
    if gamma >= 10:
        raise _TraceError(f"workload.gamma must be below 10, not {gamma:g}")
    noise = part.take("noise_scale")
    ends = noise if isinstance(noise, list) else [noise, noise]
    if len(ends) != 2:
        raise _TraceError("workload.noise_scale must be a number, or two: at start and end")
    initial = part.whole("initial_batch_size")
    atomic = part.take("max_atomic_batch_size", None)
    limits = BatchLimits(
        initial_batch_size=initial,
        max_batch_size=part.whole("max_batch_size", initial, least=initial),
        max_atomic_batch_size=None
        if atomic is None
        else int(_positive("workload.max_atomic_batch_size", atomic)),
        max_accumulation_steps=part.whole("max_accumulation_steps", 15, least=0),
    )
    workload = Workload(
        **times,
        gamma=gamma,
        limits=limits,
        noise_scale=(
            _positive("workload.noise_scale", ends[0]),
            _positive("workload.noise_scale", ends[1]),
        ),
        examples=part.number("examples"),
    )
    part.end()
    return workload


def _change(part: _Part) -> Change:
    at_s = part.number("at_s", above=-1e-300)
    slow = part.take("slow", {})
    if not isinstance(slow, dict):
        raise _TraceError(f"{part.name}.slow must map host names to factors, not {slow!r:.40}")
    link = part.take("link", None)
    remove = part.take("remove", [])
    if not isinstance(remove, list):
        raise _TraceError(f"{part.name}.remove must be a list of host names, not {remove!r:.40}")
    change = Change(
        at_s=at_s,
        link=None if link is None else _positive(f"{part.name}.link", link),
        slow={h: _positive(f"{part.name}.slow.{h}", f) for h, f in slow.items()},
        add=_hosts(part.parts("add", [])),
        remove=tuple(map(str, remove)),
    )
    part.end()
    return change
