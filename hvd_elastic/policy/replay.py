"""What a run measured before: its recorded events told to the evidence once more.

A leader that resumes a run goes on from what the one before had learnt, and a plan for other
clusters rests on the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hvd_elastic.policy.evidence import Evidence

__all__ = ["replay"]


def replay(records: Iterable[Mapping[str, Any]]) -> Evidence:
    """The evidence in a run's events, oldest first.

    What is known of the present (windows timed on the slots in use, when the last one came) is not
    part of it: nothing trains until a generation is formed.

    >>> events = [{"kind": "rescale_started", "generation": 1, "hosts": ["a"], "slots": [2]},
    ...           {"kind": "rescale_finished", "generation": 1, "mono": 0.0}]
    >>> events += [{"kind": "metrics", "mono": 2.0 * n, "step": 20 * n, "examples": 640 * n}
    ...            for n in range(6)]
    >>> round(float(replay(events).model().step_s(1, 2, 16, 0)), 2)
    0.1
    """
    evidence = Evidence()
    begun: tuple[Any, list[str]] = (None, [])
    for record in records:
        kind, now = record.get("kind"), record.get("mono")
        if kind == "rescale_started":
            begun = (record.get("generation"), _hosts_of_ranks(record))
        elif not isinstance(now, (int, float)):
            continue
        elif kind == "rescale_finished" and begun[0] == record.get("generation"):
            evidence.formed(begun[1])
            evidence.note(kind, record, now)
        elif kind in ("metrics", "batch_plan", "agent_started"):
            evidence.note(kind, record, now)
    evidence.formed([])
    evidence.news = False
    return evidence


def _hosts_of_ranks(record: Mapping[str, Any]) -> list[str]:
    """The host of each rank: a host's ranks are neighbours."""
    hosts, slots = record.get("hosts"), record.get("slots")
    if not isinstance(hosts, list) or not isinstance(slots, list) or len(hosts) != len(slots):
        return []
    return [str(host) for host, number in zip(hosts, slots, strict=True) for _ in range(number)]
