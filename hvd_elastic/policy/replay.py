"""Restore the measurements of a run from its recorded events.

A leader that resumes a run continues with the measurements of the one before, and
``hvd-elastic plan`` uses them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hvd_elastic.policy.evidence import Evidence


def replay(records: Iterable[Mapping[str, Any]]) -> Evidence:
    """Return the measurements in a run's events, which come oldest first.

    The result has no present generation: nothing counts as measured until one is formed.

    >>> events = [{"kind": "rescale_started", "generation": 1, "hosts": ["a"], "slots": [2]},
    ...           {"kind": "rescale_finished", "generation": 1, "mono": 0.0}]
    >>> events += [{"kind": "metrics", "mono": 2.0 * n, "step": 20 * n, "examples": 640 * n}
    ...            for n in range(6)]
    >>> round(float(replay(events).model().step_s(1, 2, 16, 0)), 2)
    0.1
    """
    replaying = Replay()
    for record in records:
        replaying.add(record)
    evidence = replaying.evidence
    evidence.formed([])
    evidence.news = False
    return evidence


class Replay:
    """Takes the events of a run as they come, oldest first.

    Attributes:
        evidence: the measurements so far.
    """

    def __init__(self) -> None:
        self.evidence = Evidence()
        self._begun: tuple[Any, list[str]] = (None, [])

    def add(self, record: Mapping[str, Any]) -> None:
        """Take measurements from an event."""
        kind, now = record.get("kind"), record.get("mono")
        if kind == "rescale_started":
            self._begun = (record.get("generation"), _hosts_of_ranks(record))
        elif not isinstance(now, (int, float)):
            return
        elif kind == "rescale_finished" and self._begun[0] == record.get("generation"):
            self.evidence.formed(self._begun[1])
            self.evidence.note(kind, record, now)
        elif kind in ("metrics", "batch_plan", "agent_started"):
            self.evidence.note(kind, record, now)


def _hosts_of_ranks(record: Mapping[str, Any]) -> list[str]:
    """Return the host of each rank; the ranks of a host are consecutive."""
    hosts, slots = record.get("hosts"), record.get("slots")
    if not isinstance(hosts, list) or not isinstance(slots, list) or len(hosts) != len(slots):
        return []
    return [str(host) for host, number in zip(hosts, slots, strict=True) for _ in range(number)]
