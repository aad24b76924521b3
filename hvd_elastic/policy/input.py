"""Decides whether training waits for its data, what would help, and by how much.

All ranks of a step wait for the one whose data comes last, so the rank that waits most decides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hvd_elastic.formatting import plural
from hvd_elastic.policy.objective import PricedHost, hourly_price
from hvd_elastic.run_events import Bound, Input

_WINDOW_S = 5.0
"""Least time in the loop that is looked at [s]: a few steps, and ticks of 10 ms of processor time
do not matter."""
_NOTABLE = 0.05
"""Part of the time that is worth a remedy."""
_MOVED = 0.05
"""Change of that part that is recorded again."""
_COMPUTES = 0.6
"""Part of its time that a reader uses a core or waits for one, above which it computes."""
_NOTABLE_LINK = 0.3
"""Part of the time of input hosts in which they wait for the link and could read instead."""
_NOTABLE_DELAY = 0.2
"""Part of the time that readers use a core or wait for one, for which they wait, worth telling."""


@dataclass(frozen=True)
class Reading:
    """A worker's reading of its training data since its process began.

    Attributes:
        loop_s: time in the loop over the loader [s].
        wait_s: part of it that waited for data [s]; on a GPU, the time that the GPU was idle.
        starved_s: part of it in steps that waited, since no batch was ahead: its readers were busy
            all the time [s].
        cpu_s: processor time that reading took, on input hosts too [s]; None: not known.
        delay_s: time in which reading waited for a core, on input hosts too [s].
        processes: number of processes of the worker that read; 0: the training process itself;
            None: not known.
        helpers: number of processes of input hosts that read for it.
        helped_s: time in which these have made batches [s].
        link_s: time in which they could have, and waited for the link [s].
    """

    loop_s: float = 0.0
    wait_s: float = 0.0
    starved_s: float = 0.0
    cpu_s: float | None = None
    delay_s: float = 0.0
    examples: int = 0
    processes: int | None = None
    helpers: int = 0
    helped_s: float = 0.0
    link_s: float = 0.0

    def since(self, then: Reading) -> Reading:
        """Return what was read after an earlier reading of the same process."""
        known = self.cpu_s is not None and then.cpu_s is not None
        return Reading(
            self.loop_s - then.loop_s,
            self.wait_s - then.wait_s,
            self.starved_s - then.starved_s,
            max(0.0, (self.cpu_s or 0.0) - (then.cpu_s or 0.0)) if known else None,
            self.delay_s - then.delay_s,
            self.examples - then.examples,
            self.processes,
            self.helpers,
            self.helped_s - then.helped_s,
            self.link_s - then.link_s,
        )

    @property
    def share(self) -> float:
        """Part of the time in the loop that waited for data, in [0, 1]."""
        return min(1.0, self.wait_s / self.loop_s) if self.loop_s > 0 else 0.0

    @property
    def cores(self) -> float:
        """Mean number of cores that read."""
        return (self.cpu_s or 0.0) / self.loop_s if self.loop_s > 0 else 0.0

    @property
    def demand(self) -> float:
        """Mean number of cores that read, and of readers that wait for one."""
        return self.cores + (self.delay_s / self.loop_s if self.loop_s > 0 else 0.0)

    @property
    def computes(self) -> bool:
        """Return whether what is waited for uses the processor, and not storage or the network."""
        if self.cpu_s is None:
            return False
        busy_s = (self.processes or 0) * self.starved_s + self.helped_s
        if not (self.processes or self.helpers):
            busy_s = self.wait_s
        return self.cpu_s + self.delay_s >= _COMPUTES * busy_s

    @property
    def waits_for_link(self) -> bool:
        """Return whether input hosts make no batches for long, since the link is the limit."""
        return self.link_s > _NOTABLE_LINK * (self.link_s + self.helped_s)


@dataclass(frozen=True)
class InputSupply:
    """Number of examples that the cores of machines can read in a second.

    Attributes:
        core_s: processor time to read one example [s], > 0.
        machines: (host, machine, cores) of known hosts; several hosts can be parts of a machine.
    """

    core_s: float
    machines: tuple[tuple[str, str, int], ...]

    def most(self, counts: Sequence[tuple[str, int]]) -> float:
        """Return the most examples/s of ranks with equal shares; infinite if nothing is known.

        Args:
            counts: pairs of host and number of ranks on it.
        """
        place = {host: (machine, cores) for host, machine, cores in self.machines}
        ranks: dict[tuple[str, int], int] = {}
        for host, number in counts:
            if host in place:
                ranks[place[host]] = ranks.get(place[host], 0) + number
        each = [cores / number for (_, cores), number in ranks.items() if number]
        return min(each, default=math.inf) * sum(n for _, n in counts) / self.core_s


def find_input_bound(
    readings: Sequence[Reading], hosts: Sequence[str], machines: Mapping[str, tuple[str, int]]
) -> Input:
    """Return whether ranks wait for data, and what would end it.

    Args:
        readings: what each rank has read in a window, by rank; at least one.
        machines: machine of each known host, and its number of cores.

    >>> one = Reading(loop_s=10, wait_s=5, starved_s=10, cpu_s=5, examples=100, processes=0)
    >>> find_input_bound([one], ["a"], {"a": ("a", 4)}).reason
    'ranks wait 50 % of the time for data: reading takes 50 ms of a core for each example, and 1.0 \
more core of decoding would end it: num_workers=1'
    """
    shares = [reading.share for reading in readings]
    worst = max(range(len(readings)), key=lambda rank: shares[rank])
    share = shares[worst]
    cpu = [each.cpu_s for each in readings if each.cpu_s is not None]
    examples = sum(each.examples for each in readings)
    cpu_s = sum(cpu)
    is_known = len(cpu) == len(readings) and examples > 0
    core_s = cpu_s / examples if is_known and cpu_s else None
    helpers = sum(each.helpers for each in readings)
    waits = f"ranks wait {100 * share:.0f} % of the time for data"
    more: float | None = None
    bound: Bound
    if share < _NOTABLE:
        bound, reason = "nothing", f"input is no bottleneck: {waits}"
    elif not is_known:
        bound = "unknown"
        reason = (
            f"{waits}; let more of it be read ahead: prefetch and num_parallel_calls of map, "
            "--input-hosts for what the source reads, or a cheaper transform"
        )
    else:
        bound, more, remedy = _remedy(worst, readings, hosts, machines)
        takes = f"reading takes {_milliseconds(core_s or 0.0)} of a core for each example"
        delay_s = sum(each.delay_s for each in readings)
        if delay_s > _NOTABLE_DELAY * (cpu_s + delay_s):
            takes += f" (and waits {_milliseconds(delay_s / examples)} for it)"
        reason = f"{waits}: {takes}, and {remedy}"
    return Input(
        share=round(share, 4),
        shares=[round(each, 4) for each in shares],
        bound=bound,
        more_cores=more,
        core_s=core_s,
        helpers=helpers,
        reason=reason,
    )


def _remedy(
    worst: int,
    readings: Sequence[Reading],
    hosts: Sequence[str],
    machines: Mapping[str, tuple[str, int]],
) -> tuple[Bound, float | None, str]:
    """Return what rank ``worst`` waits for, how many more cores would end it, and what to do."""
    reading = readings[worst]
    processes = reading.processes or 0
    if reading.waits_for_link:
        remedy = (
            "the processes of input hosts wait until their batches are sent: the link to them is "
            "the limit; send less (uint8, cropped pictures), or read more on this host: "
            f"num_workers={processes + 1}"
        )
        return "link", None, remedy
    if not reading.computes:
        remedy = (
            "the rest of the wait is for storage or the network, which more cores do not shorten: "
            f"num_workers={max(2, 2 * processes)} waits for more files at a time; keep the data on "
            "the hosts that read (copyclust), in shards, or smaller"
        )
        return "storage", None, remedy
    idle = _idle_cores(hosts[worst], readings, hosts, machines)
    ranks = Counter(machines[host][0] for host in hosts if host in machines)
    more = 0.0
    for each, host in zip(readings, hosts, strict=True):
        machine, count = machines.get(host, ("", math.inf))
        more += _Need.of(each, count / max(ranks[machine], 1)).more
    here = _Need.of(reading, math.inf)
    helped = any(each.helpers for each in readings)
    if here.more <= idle and not helped:
        remedy = f"num_workers={max(math.ceil(here.needed - 0.01), processes + 1)}"
    else:
        further = "further " if helped else ""
        remedy = (
            f"{further}--input-hosts with so many, or a cheaper transform such as a scaled decode"
        )
    cores = "core" if more <= 1 else "cores"
    return "cores", more, f"{_number(more)} more {cores} of decoding would end it: {remedy}"


@dataclass(frozen=True)
class _Need:
    """Cores that read for a rank without its waiting, and those of them that do not read yet."""

    needed: float
    more: float

    @classmethod
    def of(cls, reading: Reading, cores: float) -> _Need:
        """Return the need of a rank that has ``cores`` of its machine for itself."""
        # Without the wait, the same examples are read in the rest of the time.
        trains = max(1 - reading.share, 0.01)
        needed = reading.cores / trains
        # The training process is not free to read while it trains.
        reads = reading.processes or reading.helpers
        more = needed - (reading.cores if reads else 0.0)
        if not reading.helpers and cores < math.inf:
            # A core at most, and no more than its readers leave it.
            rank = min(1.0, max(0.0, cores - (reading.cores if reads else 0.0)) / trains)
            more = max(more, rank + needed - cores)
        return cls(needed, more)


def _idle_cores(
    host: str,
    readings: Sequence[Reading],
    hosts: Sequence[str],
    machines: Mapping[str, tuple[str, int]],
) -> float:
    """Return how many cores of a host's machine are idle, for each rank on it."""
    if host not in machines:
        return math.inf
    machine, cores = machines[host]
    there = [
        r for r, h in zip(readings, hosts, strict=True) if machines.get(h, ("",))[0] == machine
    ]
    # A rank that does not wait for data is taken to use one core.
    used = sum(
        (reading.demand if reading.processes else 0.0) + 1 - reading.share for reading in there
    )
    return max(0.0, cores - used) / len(there)


class PricedReader(PricedHost, Protocol):
    """An input host of a hostfile."""

    @property
    def cpus(self) -> int | None: ...


@dataclass(frozen=True)
class ReaderChoice:
    """Input hosts that should read from now on.

    Attributes:
        hosts: their names; empty: none of those offered is worth its price.
    """

    hosts: tuple[str, ...]
    reason: str


def choose_readers(
    finding: Input, offered: Sequence[PricedReader], price: float | None
) -> ReaderChoice:
    """Return which input hosts with a price to add, the cheapest for each core first.

    With all cores that are missing, training is faster by 1 / (1 - share), and with a part of them
    by that part of it. So many hosts are added that an example costs least.

    Args:
        finding: what the ranks wait for; it names the missing cores.
        offered: hosts that do not read yet, at least one; one without ``cpus`` counts as one core.
        price: of all hosts that are used now [currency per hour]; None: not known, and then as
            many are added as the missing cores need.
    """
    missing = finding.more_cores or 0.0
    order = sorted(offered, key=lambda host: (host.price or 0.0) / (host.cpus or 1))
    best: list[PricedReader] = []
    for count in range(1, len(order) + 1):
        if _cores(best) >= missing > 0:
            break
        # Without a price each further host makes training faster for nothing.
        if _relative_cost(finding, order[:count], price) < _relative_cost(finding, best, price):
            best = order[:count]
    wait = f"{_number(missing)} more cores would end a wait of {100 * finding.share:.0f} %"
    said = best or order[:1]
    names = ", ".join(host.name for host in said)
    have = "has" if len(said) == 1 else "have"
    reason = (
        f"{wait} of the time, and {plural('host', len(said))} {names} {have} {_cores(said)} for "
        f"{hourly_price(said):g} per hour"
    )
    if price:
        change = _relative_cost(finding, said, price) - 1
        reason += f": an example costs {abs(100 * change):.0f} % {'less' if best else 'more'}"
    return ReaderChoice(tuple(host.name for host in best), reason)


def _relative_cost(finding: Input, added: Sequence[PricedReader], price: float | None) -> float:
    """Return the cost of an example with these hosts added, relative to that without them."""
    ended = min(1.0, _cores(added) / finding.more_cores) if finding.more_cores else 0.0
    gain = 1 / max(1 - finding.share, 0.01) - 1
    return (1 + hourly_price(added) / price if price else 1.0) / (1 + ended * gain)


def _cores(hosts: Sequence[PricedReader]) -> int:
    return sum(host.cpus or 1 for host in hosts)


def _number(cores: float) -> str:
    return f"{max(cores, 0.1):.1f}" if cores < 10 else f"{cores:.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"


class InputWatch:
    """Follows how long the ranks of a run wait for their data.

    Attributes:
        machines: machine and number of cores of each known host.
    """

    def __init__(self) -> None:
        self.machines: dict[str, tuple[str, int]] = {}
        self._now: dict[str, Reading] = {}
        self._then: dict[str, Reading] = {}
        self._said: Input | None = None

    def begin_anew(self) -> None:
        """Forget what was read so far, since others read from now on."""
        self._then.clear()
        self._said = None

    def store_reading(self, worker: str, reading: Reading | None) -> None:
        """Store the reading of a worker's last heartbeat."""
        if reading is not None:
            self._now[worker] = reading
            self._then.setdefault(worker, reading)

    def next_finding(self, members: Sequence[tuple[str, str]]) -> Input | None:
        """Return a finding of a whole window if it is worth recording, else None.

        Args:
            members: worker and host of each rank.
        """
        found = []
        for worker, _ in members:
            if worker not in self._now or worker not in self._then:
                return None
            found.append(self._now[worker].since(self._then[worker]))
        if not found or min(each.loop_s for each in found) < _WINDOW_S:
            return None
        self._then = {worker: self._now[worker] for worker, _ in members}
        finding = find_input_bound(found, [host for _, host in members], self.machines)
        said = self._said
        # Around the least notable part nothing is said each time that it is crossed.
        if said is not None and (
            said.bound == finding.bound or "nothing" in (said.bound, finding.bound)
        ):
            if abs(said.share - finding.share) < _MOVED:
                return None
        self._said = finding
        return finding
