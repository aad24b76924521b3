"""Restore the measurements of a run from its recorded events.

A leader that resumes a run continues with the measurements of the one before, and
``hvd-elastic plan`` uses them too.
"""

from __future__ import annotations

from collections.abc import Iterable

from hvd_elastic.policy.evidence import Evidence
from hvd_elastic.run_events import Input, Metrics, ReadEvent, RescaleFinished, RescaleStarted


def replay(events: Iterable[ReadEvent]) -> Evidence:
    """Return the measurements in a run's events, which come oldest first.

    The result has no present generation: nothing counts as measured until one is formed.

    >>> events = [RescaleStarted(1, 0, 2, ["a"], [2], "start"), RescaleFinished(1, 2, None)]
    >>> for n in range(6):
    ...     events.append(Metrics(20 * n, 0, 0, 640 * n, 2, mono=2.0 * n))
    >>> round(float(replay(events).model().step_s(1, 2, 16, 0)), 2)
    0.1
    """
    replaying = Replay()
    for event in events:
        replaying.add_event(event)
    evidence = replaying.evidence
    evidence.formed([])
    evidence.news = False
    return evidence


class Replay:
    """Takes the events of a run as they come, oldest first."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self._begun: RescaleStarted | None = None

    def add_event(self, event: ReadEvent) -> None:
        """Take measurements from an event."""
        begun = self._begun
        match event:
            case Metrics():
                pass  # nearly all are
            case RescaleStarted():
                self._begun = event
                return
            case RescaleFinished(generation=generation):
                if begun is None or begun.generation != generation:
                    return
                ranks = zip(begun.hosts, begun.slots, strict=False)  # those of a host in a row
                self.evidence.formed([host for host, number in ranks for _ in range(number)])
            case Input():
                return  # of the run's past: it waits for other things by now
        self.evidence.note_event(event)
