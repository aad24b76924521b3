"""The schedule of a soak: a seed always gives the same faults in the same order.

Pure functions: nothing is started here and no clock is read. A fault contains the number that
selects its host or rank, so a shortened schedule (``--only``, ``--faults``) still hits the same
ones.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

from hvd_elastic.errors import UsageError


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        meaning: description for the help text and the report.
        weight: frequency relative to the other kinds.
        shortest_s, longest_s: bounds of its duration; 0 and 0: it is over at once.
        beyond_timeout: whether the failure timeout is added to both, so that the leader notices it.
        stops: whether training cannot continue, and need not, until the fault is over.
        may_overlap: whether it may begin before the run has recovered from the previous fault.
        namespaces: whether it needs hosts in network namespaces.
    """

    meaning: str
    weight: int
    shortest_s: float = 0.0
    longest_s: float = 0.0
    beyond_timeout: bool = False
    stops: bool = False
    may_overlap: bool = False
    namespaces: bool = False


# Bounds of a long silence's duration beyond the failure timeout: longer than a recovery may take.
_SILENT = (20.0, 28.0)

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "kill_worker": Kind("kill -9 of a worker", 6, may_overlap=True),
        "kill_host": Kind("kill -9 of all workers of a host", 3, may_overlap=True),
        "kill_agent": Kind("kill -9 of an agent", 3, may_overlap=True),
        "kill_leader": Kind("kill -9 of the leader, then --resume", 3, 0.0, 12.0, stops=True),
        "kill_workers": Kind("kill -9 of every worker", 2, stops=True),
        "kill_all": Kind("kill -9 of leader, agents, workers; --resume", 2, 0.0, 6.0, stops=True),
        "corrupt": Kind("every worker killed, newest checkpoint damaged", 2, stops=True),
        "crash": Kind("a host dies and boots again", 4, 0.5, 10.0, may_overlap=True),
        "power_off": Kind(
            "a host dies without a word and boots again",
            *(2, *_SILENT),
            beyond_timeout=True,
            namespaces=True,
        ),
        "blip": Kind("a cable is pulled for a moment", 3, 0.2, 2.0, namespaces=True),
        "cut": Kind(
            "a cable is pulled beyond the failure timeout",
            *(2, *_SILENT),
            beyond_timeout=True,
            namespaces=True,
        ),
        "pause_worker": Kind("SIGSTOP of a worker for a moment", 3, 0.2, 2.0),
        "pause_agent": Kind("SIGSTOP of an agent for a moment", 3, 0.2, 2.0),
        "pause_leader": Kind("SIGSTOP of the leader for a moment", 2, 0.2, 2.0),
        "freeze_worker": Kind(
            "SIGSTOP of a worker beyond the failure timeout", 2, *_SILENT, beyond_timeout=True
        ),
        "freeze_agent": Kind(
            "SIGSTOP of an agent beyond the failure timeout", 2, *_SILENT, beyond_timeout=True
        ),
        "freeze_leader": Kind(
            "SIGSTOP of the leader beyond the failure timeout", 1, *_SILENT, beyond_timeout=True
        ),
        "full_run_disk": Kind("no space in the run folder", 2, 3.0, 8.0, namespaces=True),
        "full_spool": Kind("no space in the spool of a host", 2, 3.0, 8.0, namespaces=True),
        "hosts": Kind("the hostfile names other hosts or slots", 6, may_overlap=True),
        "broken_hostfile": Kind("the hostfile cannot be read for a while", 2, 1.0, 5.0),
        "scale": Kind("hvd-elastic scale, and back", 3, 2.0, 8.0),
        "rate": Kind("the link of a host becomes slow", 2, 3.0, 8.0, namespaces=True),
    }
)

MIN_NP = 2
"""The run's ``--min-np``; hostfiles are chosen so that any one host can be lost."""

MOST_PROCESSES = 5
_OVERLAP = 0.2  # fraction of faults that begin before the previous one is over
_RATES_MBIT = (5, 20, 100)


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule.

    Attributes:
        number: place in the schedule of the seed, from 1.
        kind: one of :data:`KINDS`.
        after_s: time since the recovery from the previous fault; with ``overlaps`` since that
            fault began [s].
        duration_s: time until it is undone; 0 if it is over at once [s].
        where: number that selects the host, the rank or the file, modulo their count.
        overlaps: whether it does not wait for the recovery from the previous fault.
        hosts: (host, slots) pairs for the kind ``hosts``; else empty.
        amount: processes wanted for ``scale``, Mbit/s for ``rate``; for ``corrupt`` 0 means
            truncated, 1 damaged in the middle.
    """

    number: int
    kind: str
    after_s: float
    duration_s: float
    where: int
    overlaps: bool = False
    hosts: tuple[tuple[str, int], ...] = ()
    amount: int = 0

    def text(self) -> str:
        """Return the fault as text for a progress line.

        >>> Fault(7, "cut", 2.0, 25.5, 1).text()
        '#7 cut for 25.5 s'
        """
        told = f"#{self.number} {self.kind}"
        if self.hosts:
            told += " " + " ".join(f"{host}:{slots}" for host, slots in self.hosts)
        if self.kind == "scale":
            told += f" to {self.amount}"
        if self.kind == "rate":
            told += f" {self.amount} Mbit/s"
        if KINDS[self.kind].longest_s:
            told += f" for {self.duration_s:g} s"
        return told + (" (on top of the last)" if self.overlaps else "")


def starting_hosts(hosts: Sequence[str]) -> dict[str, int]:
    """Return the first hostfile of a soak: one slot on each host but the last.

    >>> starting_hosts(["a", "b", "c", "d"])
    {'a': 1, 'b': 1, 'c': 1}
    """
    return dict.fromkeys(hosts[:-1], 1)


def faults_of_seed(
    seed: int, hosts: Sequence[str], failure_timeout_s: float = 5.0
) -> Iterator[Fault]:
    """Yield the endless schedule of a seed.

    Args:
        seed: any whole number.
        hosts: names of the hosts, at least four.
        failure_timeout_s: failure timeout of the run, which long silences exceed [s].

    >>> first, again = (next(faults_of_seed(4, list("abcd"))) for _ in range(2))
    >>> first == again
    True
    """
    if len(hosts) <= MIN_NP + 1:
        raise UsageError(f"a soak needs at least {MIN_NP + 2} hosts, and was given {len(hosts)}")
    rng = random.Random(f"soak {seed}")
    listed = starting_hosts(hosts)
    previous: Kind | None = None
    number = 0
    while True:
        number += 1
        (name,) = rng.choices([*KINDS], [kind.weight for kind in KINDS.values()])
        kind = KINDS[name]
        both = previous is not None and previous.may_overlap and kind.may_overlap
        overlaps = both and rng.random() < _OVERLAP
        after_s = rng.uniform(0.0, 2.0) if overlaps else rng.choice([0.0, rng.uniform(0.2, 4.0)])
        duration_s = rng.uniform(kind.shortest_s, kind.longest_s)
        if kind.beyond_timeout:
            duration_s += failure_timeout_s
        if name in ("kill_leader", "kill_all") and rng.random() < 0.5:
            duration_s = 0.0
        if name == "hosts":
            listed = _other_hosts(rng, listed, hosts)
        yield Fault(
            number=number,
            kind=name,
            after_s=round(after_s, 1),
            duration_s=round(duration_s, 1),
            where=rng.randrange(1000),
            overlaps=overlaps,
            hosts=tuple(listed.items()) if name == "hosts" else (),
            amount=_amount(rng, name),
        )
        previous = kind


def selected(
    faults: Iterable[Fault], kinds: Collection[str], only: range | None = None
) -> Iterator[Fault]:
    """Yield the faults of given kinds and numbers, with their original numbers.

    A fault that would overlap one that is left out waits like any other.

    >>> endless = faults_of_seed(1, list("abcd"))
    >>> [fault.number for fault in selected(endless, KINDS, range(3, 5))]
    [3, 4]
    """
    wanted = faults if only is None else islice(faults, only.start - 1, only.stop - 1)
    last = 0
    for fault in wanted:
        if fault.kind in kinds:
            alone = fault.overlaps and fault.number != last + 1
            yield replace(fault, overlaps=False) if alone else fault
            last = fault.number


def hosts_before(
    faults: Iterable[Fault], kinds: Collection[str], number: int, start: Mapping[str, int]
) -> dict[str, int]:
    """Return the hostfile before a fault if only faults of these kinds are caused."""
    found = dict(start)
    for fault in islice(faults, number - 1):
        if fault.kind == "hosts" and "hosts" in kinds:
            found = dict(fault.hosts)
    return found


def parse_kinds(text: str | None, possible: Collection[str] = tuple(KINDS)) -> tuple[str, ...]:
    """Parse ``--faults``: comma-separated kinds, or with ``-`` before each all kinds but these.

    Args:
        text: value of the option; None: all possible kinds.
        possible: kinds that can be caused on this machine.

    Raises:
        UsageError: a kind is unknown, or not possible here.

    >>> parse_kinds("kill_worker, cut")
    ('kill_worker', 'cut')
    """
    if text is None:
        return tuple(possible)
    names = [word.strip() for word in text.split(",") if word.strip()]
    without = [name.removeprefix("-") for name in names if name.startswith("-")]
    for name in [*without, *(name for name in names if not name.startswith("-"))]:
        if name not in KINDS:
            raise UsageError(f"--faults: there is no {name!r}; valid: {', '.join(KINDS)}")
    if without:
        if len(without) < len(names):
            raise UsageError(f"--faults {text}: name either those to make or those to leave out")
        chosen = tuple(name for name in possible if name not in without)
    else:
        for name in names:
            if name not in possible:
                raise UsageError(
                    f"--faults: {name} needs virtual hosts in network namespaces; run as root"
                )
        chosen = tuple(names)
    if not chosen:
        raise UsageError("--faults leaves no fault to make")
    return chosen


def parse_only(text: str | None) -> range | None:
    """Parse ``--only``: ``12-17`` or ``12``.

    >>> parse_only("12-17")
    range(12, 18)
    """
    if text is None:
        return None
    first, _, last = text.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        found = range(0)
    if not found or found.start < 1:
        raise UsageError(f"--only {text}: write the numbers of faults as 12-17 or 12, from 1")
    return found


def _other_hosts(
    rng: random.Random, listed: Mapping[str, int], hosts: Sequence[str]
) -> dict[str, int]:
    """Return a different hostfile that has enough slots left if any one host is lost."""
    while True:
        chosen = rng.sample(hosts, rng.randint(2, len(hosts)))
        new = {host: rng.choice([1, 1, 2]) for host in chosen}
        slots = sum(new.values())
        enough = slots - max(new.values()) >= MIN_NP
        if enough and slots <= MOST_PROCESSES and [*new.items()] != [*listed.items()]:
            return new


def _amount(rng: random.Random, kind: str) -> int:
    if kind == "scale":
        return rng.randint(MIN_NP, MIN_NP + 1)
    if kind == "rate":
        return rng.choice(_RATES_MBIT)
    return rng.randrange(2) if kind == "corrupt" else 0
