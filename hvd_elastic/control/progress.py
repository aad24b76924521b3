"""Checks whether workers are alive and whether they make progress.

A worker is *alive* while its heartbeats arrive. They come from a separate thread, so long steps,
garbage collection, validation or compilation do not stop them, but a frozen process does. Whether
it *makes progress* is decided by comparing with the run itself: how long its steps, and its waits
for other ranks, have taken so far.

When all ranks wait for each other, they are either in *different* collectives (an error in the
script) or their data does not arrive (a network failure). Heartbeats tell the two apart: each names
the collective that the worker waits for, and how often the worker has begun each collective. If
every worker waits for a collective that some other worker has not begun, none can continue, however
old the heartbeats are: to end the first wait, another worker would have to begin a collective, and
all of them are waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hvd_elastic.control.events import GenerationStuck, WorkerSilent
from hvd_elastic.formatting import count, duration_words, plural
from hvd_elastic.policy.input import Reading

_STUCK_FACTOR = 5.0
"""Multiple of the run's longest wait after which ranks that all wait count as stuck."""
_FIRST_WAIT_S = 30.0
"""Shortest time before that until a generation has made a step [s], as Gloo's own timeout: waits of
before were for little data, or for fewer ranks."""
_BUSY_FACTOR = 3.0
"""Multiple of the run's longest step after which a rank that others wait for is reported."""
_BUSY_AT_LEAST_S = 5.0
"""Shortest time before that [s], since short steps vary much."""
_NAMED = 4
"""Number of ranks listed by name of those that wait in the same place, to keep messages short."""
_HOPELESS_FACTOR = 20.0
"""Multiple of the run's longest step after which a rank that others wait for counts as stuck."""
_HOPELESS_AT_LEAST_S = 600.0
"""Shortest time before that [s], since a rare validation or compilation may take long."""
_AFTER_TRAINING_S = 60.0
"""Silence allowed after training [s]: an exiting process sends no heartbeats, and no other rank
waits for it in a collective."""


@dataclass(frozen=True)
class Position:
    """A point in training.

    Attributes:
        epoch, position: current epoch, and number of its examples that were consumed.
        examples: number of examples consumed since training began.
    """

    step: int
    epoch: int
    position: int
    examples: int


@dataclass(frozen=True)
class Activity:
    """The content of a worker's last heartbeat.

    Attributes:
        silent_s: time without a heartbeat and without use of a processor [s].
        generation: generation it refers to, which may still be the previous one.
        step_s: duration of the current step so far [s].
        waiting_s: how long the worker has waited for other ranks in it [s]; 0: it computes.
        waited_s: how long this process has waited for other ranks in all [s].
        longest_step_s, longest_wait_s: longest completed step and wait of this process [s].
        longest_period_s: longest time of this process between two steps with which the ranks
            agreed on what is to be done [s].
        line: current line of the script; empty unless it has computed or waited for some seconds.
        waiting_for: name of the collective it waits for; empty unless it has waited for some
            seconds.
        begun: how often it has begun each collective in this generation; empty likewise.
        progress: its point in training; None likewise.
        reading: what it has read of its data; None: nothing yet.
    """

    silent_s: float = 0.0
    generation: int = 0
    step: int = 0
    step_s: float = 0.0
    waiting_s: float = 0.0
    waited_s: float = 0.0
    longest_step_s: float = 0.0
    longest_wait_s: float = 0.0
    longest_period_s: float = 0.0
    line: str = ""
    waiting_for: str = ""
    begun: Mapping[str, int] = field(default_factory=dict)
    progress: Position | None = None
    reading: Reading | None = None


_NOT_HEARD = Activity()


class ProgressWatch:
    """Finds workers that are silent, stuck or slow, from their heartbeats.

    Args:
        failure_timeout_s: silence after which a worker counts as lost [s].
    """

    def __init__(self, failure_timeout_s: float) -> None:
        self._failure_timeout_s = failure_timeout_s
        self._activities: dict[str, Activity] = {}
        self._named: set[tuple[str, int]] = set()
        self._finished: set[str] = set()
        self._began = (0, 0)
        """Generation that trains, and the step at which all its members were first heard of."""

    def store_heartbeat(self, worker: str, activity: Activity) -> None:
        self._activities[worker] = activity

    def forget(self, worker: str) -> None:
        """Remove a worker that has ended."""
        self._activities.pop(worker, None)

    def keep_only(self, workers: Collection[str]) -> None:
        """Remove all workers but these, since the others have ended."""
        for worker in self._activities.keys() - set(workers):
            del self._activities[worker]

    def finished(self, worker: str) -> None:
        """Note that a worker's training function returned."""
        self._finished.add(worker)

    def silent(self) -> list[WorkerSilent]:
        """Return an event for each worker whose heartbeats have stopped."""
        return [
            WorkerSilent(worker, f"gave no sign of life for {duration_words(activity.silent_s)}")
            for worker, activity in self._activities.items()
            if activity.silent_s >= self._silence_limit(worker)
        ]

    def stuck(
        self, generation: int, members: Sequence[str]
    ) -> GenerationStuck | list[WorkerSilent]:
        """Return events for what keeps a training generation from making progress.

        Args:
            members: names of its live members, by rank.

        Returns:
            ``GenerationStuck`` if no member can continue; otherwise the members that have made no
            progress for very long while others wait, usually none.
        """
        nothing = Activity(generation=generation)
        heard = {worker: self._activities.get(worker, nothing) for worker in members}
        # A wait in an earlier generation has ended with it.
        seen = {w: a if a.generation == generation else nothing for w, a in heard.items()}
        if not seen:
            return []
        if _cannot_go_on(seen.values()):
            return GenerationStuck(generation, _who_waits_where(seen), by_script=True)
        waits = [activity.waiting_s for activity in seen.values()]
        if self._began[0] != generation and nothing not in seen.values():
            self._began = (generation, max(activity.step for activity in seen.values()))
        limit = self._wait_limit(seen.values())
        if min(waits) >= limit:
            waited = duration_words(min(waits))
            text = f"all {len(seen)} workers have waited for each other for {waited}"
            return GenerationStuck(generation, f"{text}: data between some hosts does not arrive")
        hopeless = self._limit(seen.values(), _HOPELESS_FACTOR, _HOPELESS_AT_LEAST_S)
        return [
            WorkerSilent(
                worker,
                f"made no progress for {duration_words(activity.step_s)} while the others waited",
            )
            for worker, activity in seen.items()
            if activity.waiting_s == 0 and activity.step_s >= hopeless and max(waits) > 0
        ]

    def busy(self, generation: int, members: Sequence[str]) -> list[tuple[str, float, str]]:
        """Return members that compute unusually long while others wait, each once per step.

        Members that have left the generation already wait for the others in the next one.

        Returns:
            (worker, duration of its step so far [s], current line of the script) of each.
        """
        seen = {worker: self._activities.get(worker, _NOT_HEARD) for worker in members}
        if not any(a.waiting_s or a.generation > generation for a in seen.values()):
            return []
        limit = self._limit(seen.values(), _BUSY_FACTOR, _BUSY_AT_LEAST_S)
        found = []
        for worker, activity in seen.items():
            if (
                activity.waiting_s == 0
                and activity.generation <= generation
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

    @property
    def longest_period_s(self) -> float:
        """Return the longest time between two steps with which the ranks agreed [s]."""
        return max((each.longest_period_s for each in self._activities.values()), default=0.0)

    def furthest(self, members: Sequence[str]) -> Position | None:
        """Return the position of the member that is furthest; None if none has reported one."""
        known = [self._activities[worker] for worker in members if worker in self._activities]
        said = [activity.progress for activity in known if activity.progress is not None]
        return max(said, key=lambda progress: progress.step, default=None)

    def _wait_limit(self, activities: Collection[Activity]) -> float:
        longest = max(activity.longest_wait_s for activity in activities)
        has_stepped = max(activity.step for activity in activities) > self._began[1]
        least_s = 0.0 if longest and has_stepped else _FIRST_WAIT_S
        return max(self._failure_timeout_s, least_s, _STUCK_FACTOR * longest)

    @staticmethod
    def _limit(activities: Collection[Activity], factor: float, at_least_s: float) -> float:
        longest = max((activity.longest_step_s for activity in activities), default=0.0)
        return max(at_least_s, factor * longest)


def _cannot_go_on(seen: Collection[Activity]) -> bool:
    """Return whether every worker waits for a collective that some other has not begun."""
    if not all(one.waiting_for for one in seen):
        return False
    collectives = {one.waiting_for for one in seen}
    least = {name: min(one.begun.get(name, 0) for one in seen) for name in collectives}
    return all(least[one.waiting_for] < one.begun.get(one.waiting_for, 0) for one in seen)


def _who_waits_where(seen: Mapping[str, Activity]) -> str:
    """Return a message that says which ranks wait in which collective, grouped by place."""
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
        f"the ranks wait for each other in different collectives, so none can continue: "
        f"{'; '.join(where)}. All ranks have to call the same collectives in the same order, "
        "make the same steps and end training after the same one, which hvd.stop() sees to"
    )
