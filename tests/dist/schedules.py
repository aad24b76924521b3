"""Random courses of a run, as data: what happens to its hosts, and after how many steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Act", "Kind", "make_schedule"]

Kind = Literal[
    "hosts", "kill_worker", "kill_rank_0", "kill_host", "kill_agent", "kill_all", "crash"
]
WEIGHTS: dict[Kind, int] = {
    "hosts": 8,
    "kill_worker": 3,
    "kill_rank_0": 2,
    "kill_host": 2,
    "kill_agent": 2,
    "kill_all": 1,
    "crash": 2,
}
MAX_PROCESSES = 4
MOST_STEPS_BETWEEN = 12


@dataclass(frozen=True)
class Act:
    """One disturbance.

    Attributes:
        after_steps: steps of training since the last act; with 0 the run is still busy with it.
        kind: ``hosts`` writes the hostfile, the others kill.
        hosts: host → slots, what the hostfile says from now on.
        host: whom it hits.
        slot: which of its workers, for ``kill_worker``.
    """

    after_steps: int
    kind: Kind
    hosts: dict[str, int]
    host: str = ""
    slot: int = 0


def make_schedule(seed: int, hosts: Sequence[str], acts: int = 5) -> tuple[Act, ...]:
    """The schedule of a seed, for a run that begins with one process on the first two hosts.

    >>> make_schedule(3, ["a", "b", "c"]) == make_schedule(3, ["a", "b", "c"])
    True
    """
    rng = random.Random(seed)
    listed = dict.fromkeys(hosts[:2], 1)
    found = []
    for _ in range(acts):
        (kind,) = rng.choices([*WEIGHTS], [*WEIGHTS.values()])
        if kind == "hosts":
            listed = _change(rng, listed, hosts)
        host = rng.choice([*listed])
        after = rng.choice([0, rng.randrange(1, MOST_STEPS_BETWEEN)])
        found.append(Act(after, kind, dict(listed), host, rng.randrange(listed[host])))
    return tuple(found)


def _change(rng: random.Random, listed: dict[str, int], hosts: Sequence[str]) -> dict[str, int]:
    """Another hostfile: hosts come, go, or change their slots or places."""
    while True:
        size = rng.randint(1, len(hosts))
        new = {host: rng.choice([1, 1, 2]) for host in rng.sample(hosts, size)}
        if [*new.items()] != [*listed.items()] and sum(new.values()) <= MAX_PROCESSES:
            return new
