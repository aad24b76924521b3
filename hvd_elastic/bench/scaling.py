"""Figures of training at different numbers of slots, their prediction, cost and comparison."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import bytes_words, count
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.model.step_time import Observation, StepTimeModel, fit_step_time
from hvd_elastic.policy.evidence import CoreSharing
from hvd_elastic.policy.objective import hourly_price

MODELS = ("resnet50", "gpt2")
PRECISIONS = ("fp32", "fp16", "bf16")
_PACKAGES = {"torch": "torch", "tensorflow": "tensorflow"}
_NORMAL = 1.96
"""Standard deviations either way that hold 95 % of a normal distribution."""
_KNEE = 0.5
"""Least growth of the throughput for each growth of the price up to the knee."""


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement; results of different settings cannot be compared.

    Attributes:
        framework: ``torch`` or ``tensorflow``.
        model: name of a model, or ``module:function``.
        batch_size: examples of each slot in a step.
        precision: ``fp32``, ``fp16`` or ``bf16``.
        emulated: (a, b) for a device that takes a + b m for the passes over m examples [s]; None:
            the passes are computed.
    """

    framework: str = "torch"
    model: str = "resnet50"
    batch_size: int = 64
    precision: str = "fp32"
    emulated: tuple[float, float] | None = None

    def check(self) -> None:
        """Raise UsageError if the settings are not valid on this machine."""
        if self.framework not in _PACKAGES:
            raise UsageError(f"--framework {self.framework}: it is torch or tensorflow")
        if self.precision not in PRECISIONS:
            raise UsageError(f"--precision {self.precision}: it is {', '.join(PRECISIONS)}")
        if importlib.util.find_spec(_PACKAGES[self.framework]) is None:
            raise UsageError(
                f"--framework {self.framework}: {_PACKAGES[self.framework]} is not installed here; "
                f"install it, or see: hvd-elastic doctor"
            )
        if self.framework == "tensorflow":
            if self.precision == "fp16":
                raise UsageError(
                    "--precision fp16 needs loss scaling, which hvd_elastic has for PyTorch only; "
                    "use bf16 or fp32 with --framework tensorflow"
                )
            if self.emulated is not None:
                raise UsageError("--emulate-device is for --framework torch")
        elif self.model not in MODELS and ":" not in self.model:
            raise UsageError(
                f"--model {self.model}: it is {' or '.join(MODELS)}, or module:function, which is "
                "called with the batch size and returns a model and a function of its loss"
            )

    def command(self, seconds: float, ranks: int) -> list[str]:
        """Return the command of a worker.

        Args:
            seconds: time to measure each size for [s].
            ranks: most ranks on a host.
        """
        worker = f"hvd_elastic.bench.synthetic_{self.framework}"
        words = ["--model", self.model, "--batch-size", str(self.batch_size)]
        words += ["--precision", self.precision, "--seconds", str(seconds), "--ranks", str(ranks)]
        if self.emulated is not None:
            constant, each = self.emulated
            words += ["--emulate", str(constant + each * self.batch_size)]
        return [sys.executable, "-m", worker, *words]


@dataclass(frozen=True)
class Size:
    """Figures of one number of slots.

    Attributes:
        slots, hosts: number of processes, and of the hosts that they are on.
        step_s, half_s: mean time of a step, and half of its 95 % interval [s].
        compute_s: time of the passes and the update on rank 0 [s]; None: not told apart.
        exposed_s: time that rank 0 waits for gradients of the others, beyond its own passes [s].
        rest_s: rest of the step [s]; there is no input.
        throughput, low, high: examples/s of all slots, and its 95 % interval.
        efficiency: throughput of a slot relative to that at the smallest size.
        price: of the hosts [currency per hour]; None: not known.
    """

    slots: int
    hosts: int
    step_s: float
    half_s: float
    compute_s: float | None
    exposed_s: float
    rest_s: float
    throughput: float
    low: float
    high: float
    efficiency: float
    price: float | None


@dataclass(frozen=True)
class Predicted:
    """Predicted figures of a number of slots that was not measured; see :class:`Size`.

    The interval ends at the throughput of the smallest size times the slots.
    """

    slots: int
    hosts: int
    throughput: float
    low: float
    high: float
    efficiency: float
    price: float | None


@dataclass(frozen=True)
class Scaling:
    """Result of the benchmark.

    Attributes:
        sizes: measured sizes, the smallest first.
        predicted: further sizes.
        unknown: sizes that cannot be predicted, and why.
        check: largest measured size, and the ratio of its predicted to its measured throughput if
            it is predicted from the others; None: fewer than three sizes.
        conditions: time, hosts and versions.
    """

    settings: Settings
    parameters: int
    sizes: tuple[Size, ...]
    predicted: tuple[Predicted, ...]
    unknown: tuple[tuple[int, str], ...]
    check: tuple[int, float] | None
    words: str
    conditions: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the result for a file, which ``bench compare`` reads."""
        return {"benchmark": "synthetic", **asdict(self)}


def check_prices(hosts: Sequence[Host]) -> None:
    """Raise UsageError if some hosts have a price and others have none."""
    without = [host.name for host in hosts if host.price is None]
    if without and len(without) < len(hosts):
        raise UsageError(
            f"price= is missing for {', '.join(without[:5])}; give every host one, or none"
        )


# -- figures ---------------------------------------------------------------------------------


def scaling_of(
    settings: Settings,
    hosts: Sequence[Host],
    found: Mapping[int, tuple[int, Mapping[str, Any]]],
    cores: CoreSharing | None = None,
) -> Scaling:
    """Return the result of what workers have reported.

    Args:
        hosts: hosts of the hostfile, in its order.
        found: number of hosts and the figures of a :class:`StepTimer`, by number of slots.
    """
    cores = cores or CoreSharing()
    slots = sorted(found)
    alone = float(found[slots[0]][1]["step_s"])
    sizes = tuple(_size(settings, hosts, each, *found[each], alone) for each in slots)
    model = fit_step_time([_observation(settings, each) for each in sizes])
    for each in slots:
        cores.note_timed(_counts(hosts, each))
    further = {each: cores.why_unknown(_counts(hosts, each)) for each in _further(hosts, slots)}
    versions = {"python": sys.version.split()[0]}
    return Scaling(
        settings,
        int(found[slots[0]][1]["parameters"]),
        sizes,
        tuple(
            _predict(model, settings, hosts, each, alone)
            for each, unknown in further.items()
            if not unknown
        ),
        tuple((each, unknown) for each, unknown in further.items() if unknown),
        _check(settings, sizes),
        efficiency_words(sizes),
        {
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "hosts": {host.name: host.slots for host in hosts},
            "versions": versions,
        },
    )


def _size(
    settings: Settings,
    hosts: Sequence[Host],
    slots: int,
    used: int,
    figures: Mapping[str, Any],
    alone: float,
) -> Size:
    step_s, half_s = float(figures["step_s"]), float(figures["half_s"])
    compute_s = figures.get("compute_s")
    examples = slots * settings.batch_size
    exposed_s = max(0.0, figures.get("exposed_s", step_s - alone))
    return Size(
        slots,
        used,
        step_s,
        half_s,
        compute_s,
        exposed_s,
        max(0.0, step_s - exposed_s - (alone if compute_s is None else compute_s)),
        examples / step_s,
        examples / (step_s + half_s),
        examples / max(step_s - half_s, 1e-9),
        alone / step_s,
        _price(hosts, slots),
    )


def _observation(settings: Settings, size: Size) -> Observation:
    own_s = size.compute_s if size.slots > 1 else None
    return Observation(size.hosts, size.slots, settings.batch_size, 0, size.step_s, own_s=own_s)


def _used(hosts: Sequence[Host], slots: int) -> list[Host]:
    """Return the hosts that so many slots need, in the order of the hostfile."""
    used: list[Host] = []
    for host in hosts:
        if sum(each.slots for each in used) >= slots:
            break
        if host.slots:
            used.append(host)
    return used


def _counts(hosts: Sequence[Host], slots: int) -> list[tuple[str, int]]:
    """Return the number of ranks on each of the hosts that so many slots need."""
    counts = []
    for host in _used(hosts, slots):
        counts.append((host.name, min(host.slots, slots)))
        slots -= counts[-1][1]
    return counts


def _price(hosts: Sequence[Host], slots: int) -> float | None:
    used = _used(hosts, slots)
    return None if any(host.price is None for host in used) else hourly_price(used)


def _further(hosts: Sequence[Host], measured: Sequence[int]) -> list[int]:
    """Return sizes to predict: powers of two that were not measured, and all slots."""
    most = sum(host.slots for host in hosts)
    powers = [1 << power for power in range(most.bit_length())]
    return sorted({*powers, most} - set(measured))


def _predict(
    model: StepTimeModel, settings: Settings, hosts: Sequence[Host], slots: int, alone: float
) -> Predicted:
    used = len(_used(hosts, slots))
    times = model.predict(used, slots, settings.batch_size, 0)
    step_s, spread = float(times.step_s), float(times.uncertainty)
    rate = slots * settings.batch_size / step_s
    factor = (1 + spread) ** _NORMAL
    ideal = slots * settings.batch_size / alone
    high = max(rate, min(rate * factor, ideal))
    price = _price(hosts, slots)
    return Predicted(slots, used, rate, rate / factor, high, alone / step_s, price)


def _check(settings: Settings, sizes: Sequence[Size]) -> tuple[int, float] | None:
    if len(sizes) < 3:
        return None
    *others, last = sizes
    model = fit_step_time([_observation(settings, each) for each in others])
    predicted_s = float(model.step_s(last.hosts, last.slots, settings.batch_size, 0))
    return last.slots, last.step_s / predicted_s


def efficiency_words(sizes: Sequence[Size]) -> str:
    """Return in words what ate the efficiency of the largest size."""
    first, last = sizes[0], sizes[-1]
    if len(sizes) == 1:
        return ""
    lost_s = last.step_s - first.step_s
    share = 100 * last.efficiency
    begin = f"{count(last.slots, 'slot')} work at {share:.0f} % of the speed of {first.slots}"
    if lost_s <= last.half_s + first.half_s:
        return f"{begin}: nothing is lost beyond the noise"
    parts = {
        "waiting for gradients of others (exposed communication)": last.exposed_s - first.exposed_s,
        "the rest of the step": last.rest_s - first.rest_s,
    }
    if last.compute_s is not None and first.compute_s is not None:
        slower = "slower passes (shared cores, memory or power)"
        parts[slower] = last.compute_s - first.compute_s
    told = [
        f"{100 * part / last.step_s:.0f} % for {name}"
        for name, part in sorted(parts.items(), key=lambda item: -item[1])
        if part > 0.01 * last.step_s
    ]
    return f"{begin}; of each step go {', '.join(told)}" if told else begin


def gradient_words(parameters: int) -> str:
    """Return what a step sends, in words."""
    return f"{parameters:,} parameters, {bytes_words(4 * parameters)} of gradients in float32"


# -- cost ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Time and cost of a training at one size."""

    slots: int
    measured: bool
    epoch_cost: float
    hours: float
    cost: float


def costs(scaling: Scaling, examples: int, epochs: float) -> list[Cost]:
    """Return the cost of a training at every size with a known price, by slots.

    Args:
        scaling: result of the benchmark.
    """
    found = []
    every: list[Size | Predicted] = [*scaling.sizes, *scaling.predicted]
    for each in sorted(every, key=lambda size: size.slots):
        if each.price is not None:
            epoch_h = examples / each.throughput / 3600
            measured = isinstance(each, Size)
            epoch_cost = epoch_h * each.price
            hours = epochs * epoch_h
            found.append(Cost(each.slots, measured, epoch_cost, hours, epochs * epoch_cost))
    return found


def knee(found: Sequence[Cost]) -> Cost:
    """Return the largest size up to which speed grows at least half as fast as the price."""
    best = found[0]
    for before, after in pairwise(found):
        faster = before.hours / after.hours - 1
        price = before.cost / before.hours  # 0 for hosts that cost nothing
        dearer = after.cost / after.hours - price
        if faster < 0 or faster * price < _KNEE * dearer:
            break
        best = after
    return best


def cheapest_by(found: Sequence[Cost], deadline_h: float) -> Cost | None:
    """Return the cheapest size that trains within so many hours; None: none does."""
    return min(
        (each for each in found if each.hours <= deadline_h),
        key=lambda each: each.cost,
        default=None,
    )


# -- comparison ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A size in two results.

    Attributes:
        first, second: throughput [examples/s].
        ratio, low, high: second / first, and its 95 % interval.
    """

    slots: int
    first: float
    second: float
    ratio: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Return whether the difference is beyond the noise."""
        return not self.low <= 1 <= self.high


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Return the sizes that two results of the benchmark have in common.

    Raises:
        UsageError: they are not of the same benchmark with the same settings, or have no size in
            common.
    """
    for name in ("benchmark", "settings"):
        if first.get(name) != second.get(name):
            raise UsageError(f"the results cannot be compared: {_differing(first, second)}")
    sizes = [{each["slots"]: each for each in result["sizes"]} for result in (first, second)]
    common = sorted(sizes[0].keys() & sizes[1].keys())
    if not common:
        raise UsageError("the results cannot be compared: no number of slots is in both")
    found = []
    for slots in common:
        a, b = sizes[0][slots], sizes[1][slots]
        ratio = b["throughput"] / a["throughput"]
        noise = sum((each["half_s"] / each["step_s"]) ** 2 for each in (a, b)) ** 0.5
        found.append(
            Difference(
                slots, a["throughput"], b["throughput"], ratio, ratio - ratio * noise,
                ratio + ratio * noise,
            )
        )  # fmt: skip
    return found


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    if first.get("benchmark") != second.get("benchmark"):
        return f"one is of {first.get('benchmark')}, the other of {second.get('benchmark')}"
    a, b = first.get("settings") or {}, second.get("settings") or {}
    return ", ".join(
        f"{name} is {a.get(name)} in one and {b.get(name)} in the other"
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    )
