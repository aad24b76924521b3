"""Alive, and getting on? Two questions about a worker, judged apart.

*Alive* is a matter of its heartbeat, which comes from a thread of its own: long steps, garbage
collection, a validation pass or a compilation do not stop it; a frozen process does. *Getting on*
is judged by what the run itself has shown: how long its steps and its waits for the others have
taken so far.

Ranks that wait for each other in *different* collectives are told from ranks whose data do not
arrive by counting. A worker says which collective it waits for and how often it has begun each. If
every worker waits for one that some other worker has not begun, none of them can go on, however
old the heartbeats are: the first wait to end would need another worker to begin something, and all
of them wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hvd_elastic.control.events import GenerationStuck, WorkerSilent
from hvd_elastic.formatting import count, plural

__all__ = ["Activity", "Position", "ProgressWatch"]

_STUCK_FACTOR = 5.0
_FIRST_WAIT_S = 30.0  # Gloo's own patience; nothing is known of this run yet
_BUSY_FACTOR = 3.0
_BUSY_AT_LEAST_S = 5.0
_NAMED = 4
"""Ranks that are named of those that wait in the same place."""
_HOPELESS_FACTOR = 20.0
_HOPELESS_AT_LEAST_S = 600.0
_AFTER_TRAINING_S = 60.0
"""A process that ends has no heartbeat any more, and nobody waits for it in a collective."""


@dataclass(frozen=True)
class Position:
    """How far training is.

    Attributes:
        step: optimizer steps taken.
        epoch, position: the current epoch, and the examples of it that are consumed.
        examples: examples consumed since training began.
    """

    step: int
    epoch: int
    position: int
    examples: int


@dataclass(frozen=True)
class Activity:
    """What one worker's last heartbeat said.

    Attributes:
        silent_s: since when there was neither a heartbeat nor any use of a processor [s].
        generation: in which this was; a heartbeat may still tell of the one before.
        step: optimizer steps taken.
        step_s: how long the step in progress has taken so far [s].
        waiting_s: how long the worker has been waiting for the others in it [s]; 0: it computes.
        longest_step_s, longest_wait_s: of those that came to their end, in this process [s].
        line: where in the script it is; empty unless it has computed or waited for some seconds.
        waiting_for: the collective it waits for; empty unless it has waited for some seconds.
        begun: how often it has begun each collective in this generation; empty likewise.
        progress: how far its training is; None likewise.
    """

    silent_s: float = 0.0
    generation: int = 0
    step: int = 0
    step_s: float = 0.0
    waiting_s: float = 0.0
    longest_step_s: float = 0.0
    longest_wait_s: float = 0.0
    line: str = ""
    waiting_for: str = ""
    begun: Mapping[str, int] = field(default_factory=dict)
    progress: Position | None = None


class ProgressWatch:
    """Judges the workers of a run by their heartbeats.

    Args:
        failure_timeout_s: silence after which a worker counts as lost [s].
    """

    def __init__(self, failure_timeout_s: float) -> None:
        self._failure_timeout_s = failure_timeout_s
        self._activities: dict[str, Activity] = {}
        self._named: set[tuple[str, int]] = set()
        self._finished: set[str] = set()

    def note(self, worker: str, activity: Activity) -> None:
        """A heartbeat."""
        self._activities[worker] = activity

    def forget(self, worker: str) -> None:
        """It is gone."""
        self._activities.pop(worker, None)

    def finished(self, worker: str) -> None:
        """Its training function returned."""
        self._finished.add(worker)

    def silent(self) -> list[WorkerSilent]:
        """Workers that give no sign of life."""
        return [
            WorkerSilent(worker, f"gave no sign of life for {activity.silent_s:.1f} s")
            for worker, activity in self._activities.items()
            if activity.silent_s >= self._silence_limit(worker)
        ]

    def stuck(
        self, generation: int, members: Sequence[str]
    ) -> GenerationStuck | list[WorkerSilent]:
        """What holds up a generation that is training: all of it, or some of its members.

        Args:
            generation: its number.
            members: names of its live members, by rank.
        """
        nothing = Activity(generation=generation)
        heard = {worker: self._activities.get(worker, nothing) for worker in members}
        # Who waited in the generation before does not do so any more.
        seen = {w: a if a.generation == generation else nothing for w, a in heard.items()}
        if not seen:
            return []
        if _cannot_go_on(seen.values()):
            return GenerationStuck(generation, _who_waits_where(seen), by_script=True)
        waits = [activity.waiting_s for activity in seen.values()]
        limit = self._wait_limit(seen.values())
        if min(waits) >= limit:
            text = f"all {len(seen)} workers have waited for each other for {min(waits):.1f} s"
            return GenerationStuck(generation, f"{text}: data between some hosts does not arrive")
        hopeless = self._limit(seen.values(), _HOPELESS_FACTOR, _HOPELESS_AT_LEAST_S)
        return [
            WorkerSilent(
                worker, f"made no progress for {activity.step_s:.0f} s while the others waited"
            )
            for worker, activity in seen.items()
            if activity.waiting_s == 0 and activity.step_s >= hopeless and max(waits) > 0
        ]

    def busy(self, members: Sequence[str]) -> list[tuple[str, float, str]]:
        """Members that compute while others wait for them, each named once a step.

        Returns:
            (worker, how long its step has taken [s], where in the script it is).
        """
        seen = {worker: self._activities.get(worker, Activity()) for worker in members}
        limit = self._limit(seen.values(), _BUSY_FACTOR, _BUSY_AT_LEAST_S)
        found = []
        for worker, activity in seen.items():
            others = [other.waiting_s for name, other in seen.items() if name != worker]
            waited_for = activity.waiting_s == 0 and any(others)
            if (
                waited_for
                and activity.step_s >= limit
                and (worker, activity.step) not in self._named
            ):
                self._named.add((worker, activity.step))
                found.append((worker, activity.step_s, activity.line))
        return found

    def _silence_limit(self, worker: str) -> float:
        if worker not in self._finished:
            return self._failure_timeout_s
        return max(self._failure_timeout_s, _AFTER_TRAINING_S)

    def furthest(self, members: Sequence[str]) -> Position | None:
        """Return the progress of the member that is furthest, of those that have said it."""
        known = [self._activities[worker] for worker in members if worker in self._activities]
        said = [activity.progress for activity in known if activity.progress is not None]
        return max(said, key=lambda progress: progress.step, default=None)

    def _wait_limit(self, activities: Collection[Activity]) -> float:
        longest = max(activity.longest_wait_s for activity in activities)
        known = _STUCK_FACTOR * longest if longest else _FIRST_WAIT_S
        return max(self._failure_timeout_s, known)

    @staticmethod
    def _limit(activities: Collection[Activity], factor: float, at_least_s: float) -> float:
        longest = max((activity.longest_step_s for activity in activities), default=0.0)
        return max(at_least_s, factor * longest)


def _cannot_go_on(seen: Collection[Activity]) -> bool:
    """Whether each waits for a collective that not all have begun."""
    return all(
        one.waiting_for
        and any(
            other.begun.get(one.waiting_for, 0) < one.begun.get(one.waiting_for, 0)
            for other in seen
        )
        for one in seen
    )


def _who_waits_where(seen: Mapping[str, Activity]) -> str:
    """The ranks, those in one place together."""
    places: dict[tuple[str, str, int], list[str]] = {}
    for rank, (worker, activity) in enumerate(seen.items()):
        place = (activity.waiting_for, activity.line or "a line unknown", activity.step)
        places.setdefault(place, []).append(f"{rank} ({worker.rsplit('.', 1)[0]})")
    where = [
        f"{plural('rank', len(ranks))} {', '.join(ranks[:_NAMED])}"
        f"{f' and {len(ranks) - _NAMED} more' if len(ranks) > _NAMED else ''} "
        f"{'waits' if len(ranks) == 1 else 'wait'} for {name} at {line}, "
        f"after {count(step, 'step')}"
        for (name, line, step), ranks in places.items()
    ]
    return (
        f"the ranks wait for each other in different collectives, so none can go on: "
        f"{'; '.join(where)}. All ranks have to call the same collectives in the same order and "
        "make the same steps"
    )
