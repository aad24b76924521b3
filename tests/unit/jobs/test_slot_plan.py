"""From jobs and what their runs have measured to slots, reasons and expected times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_elastic.jobs.host_wish import HostWish
from hvd_elastic.jobs.job import Job, JobKind, JobRequest, JobStatus
from hvd_elastic.jobs.progress import READ_KINDS, Measured, RunProgress
from hvd_elastic.jobs.slot_plan import Candidate, expected_starts, plan_slots
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.run_folder import RunFolder
from tests.unit.records.made_events import made, whole

HOSTS = [HostOffer("a", 2), HostOffer("b", 2)]
NOW = 10_000.0


def job(number: int, **more: Any) -> Job:
    keys = ("kind", "min_np", "max_np", "priority", "time_limit_s")
    asked = {key: more.pop(key) for key in keys if key in more}
    request = JobRequest("train", {"command": ["python"]}, **asked)
    times = {"submitted_at": NOW - 100 + number, "queued_at": NOW - 100 + number}
    return Job(number, request, f"train-{number}", **{**times, **more})


def running(number: int, held: dict[str, int], for_s: float = 1000.0, **more: Any) -> Job:
    return job(number, status=JobStatus.RUNNING, held=held, started_at=NOW - for_s, **more)


class Written:
    """A run folder with the events of a run."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.folder = RunFolder(path)
        self.log = EventLog(self.folder.events)
        self.step = self.examples = 0

    def trains(
        self, hosts: dict[str, int], step_s: float, generation: int = 1, done: float = 0.0
    ) -> None:
        """Add a minute of training; each line has a clock of its own."""
        size = sum(hosts.values())
        fields = {"hosts": list(hosts), "slots": list(hosts.values()), "generation": generation}
        self.add("rescale_started", 0.0, from_size=0, to_size=size, reason="", **fields)
        self.add("rescale_finished", 0.0, size=size, generation=generation, pause_s=0.1)
        at = 0.0
        for _ in range(30):
            at += 2.0
            self.step += round(2.0 / step_s)
            self.examples = self.step * 64
            self.add(
                "metrics",
                at,
                step=self.step,
                epoch=0,
                examples=self.examples,
                size=size,
                global_batch_size=64,
                done=done,
            )

    def add(self, kind: str, mono: float, **fields: Any) -> None:
        import json

        with self.folder.events.open("a") as file:
            file.write(json.dumps(whole({"t": mono, "mono": mono, "kind": kind, **fields})) + "\n")


class Read(RunProgress):
    """Progress that is read from the events of a run as they are written."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self._events = folder.follow_events()

    def poll(self) -> bool:
        """Read what a keeper would send."""
        self.add(event for event in self._events.poll() if event.kind in READ_KINDS)
        return super().poll()


@pytest.fixture
def run(tmp_path: Path) -> Written:
    return Written(tmp_path / "run")


def test_an_array_starts_in_its_order() -> None:
    together = {"submitted_at": NOW, "queued_at": NOW}
    array = [job(number, kind=JobKind.PLAIN, **together) for number in range(5, 18)]
    plan = plan_slots([Candidate(each) for each in array], HOSTS, NOW)
    assert [number for number, slots in plan.slots.items() if slots] == [5, 6, 7, 8]


def test_new_jobs_start_small_and_nobody_waits_while_there_are_slots() -> None:
    plan = plan_slots([Candidate(job(number)) for number in (1, 2, 3)], HOSTS, NOW)
    assert [sum(slots.values()) for slots in plan.slots.values()] == [1, 1, 1]
    assert "nothing is measured yet" in plan.reasons[1]


def test_a_job_that_waits_says_whether_others_only_came_earlier() -> None:
    holds = [
        Candidate(running(n, {host: 1}, kind=JobKind.PLAIN)) for n, host in ((1, "a"), (2, "b"))
    ]
    hosts = [HostOffer("a", 1), HostOffer("b", 1)]

    def why(*holders: Candidate) -> str:
        return plan_slots([*holders, Candidate(job(9, kind=JobKind.PLAIN))], hosts, NOW).reasons[9]

    assert why(*holds) == "waits: all 2 slots are held by 2 jobs that came earlier"
    urgent = Candidate(running(10, {"b": 1}, kind=JobKind.PLAIN, priority=5.0))
    told = "waits: all 2 slots are held by 2 jobs of higher priority or that came earlier"
    assert why(holds[0], urgent) == told
    later = Candidate(running(10, {"b": 1}, kind=JobKind.PLAIN))
    assert why(holds[0], later) == "waits: all 2 slots are worth more to 2 other jobs"


def test_what_was_not_measured_is_called_expected(run: Written) -> None:
    run.trains({"a": 2}, 0.1)
    progress = Read(run.folder)
    progress.poll()
    one = plan_slots([Candidate(running(1, {"a": 2}, max_np=2), progress.measured)], HOSTS, NOW)
    assert one.reasons[1] == ("keeps 2 slots on 1 host: measured with no other number of slots yet")
    grows = plan_slots([Candidate(running(1, {"a": 2}), progress.measured)], HOSTS, NOW)
    assert "grows from 2 to 4 slots on 2 hosts: expected " in grows.reasons[1]
    assert "times the speed of 2" in grows.reasons[1]


@pytest.mark.parametrize("seed", range(2))
def test_a_job_of_constant_speed_keeps_its_slots_on_a_busy_machine(seed: int) -> None:
    """Other work slows its steps for a while again and again, by half on average."""
    rng = np.random.default_rng(seed)
    measured, sizes = Measured(), list[int]()
    held: dict[str, int] = {}
    wanted, step, busy_until, factor = {"a": 1}, 0.0, 0.0, 1.0
    for second in range(900):
        at = {"t": float(second), "mono": float(second)}
        if wanted != held:
            held = wanted
            sizes.append(sum(held.values()))
            fields = {"generation": len(sizes), "hosts": [*held], "slots": [*held.values()], **at}
            measured.note_event(made({"kind": "rescale_started", **fields}))
            fields = {"generation": len(sizes), "size": sizes[-1], "pause_s": 0.3, **at}
            measured.note_event(made({"kind": "rescale_finished", **fields}))
        if second >= busy_until:
            factor, busy_until = 1 + 0.5 * rng.exponential(), second + 3 + rng.exponential(25.0)
        step += 10 / factor * rng.normal(1.0, 0.04)
        progress = {"step": int(step), "examples": 48 * int(step), "global_batch_size": 48}
        measured.note_event(
            made({"kind": "metrics", "size": sizes[-1], "done": 0.1, **progress, **at})
        )
        if second % 10 == 9:
            candidate = Candidate(running(1, held), measured, held)
            wanted = plan_slots([candidate], [*HOSTS, HostOffer("c", 2)], NOW + second).slots[1]
    assert len(sizes) <= 9, sizes


def test_the_first_jobs_of_a_long_queue_start() -> None:
    plan = plan_slots([Candidate(job(number)) for number in range(1, 1001)], HOSTS, NOW)
    assert [number for number, slots in plan.slots.items() if slots] == [1, 2, 3, 4]
    assert plan.reasons[5].startswith("waits: ")
    assert plan.reasons[1000].startswith("waits: jobs of higher priority")


def test_no_host_can_be_used_while_a_job_runs() -> None:
    plan = plan_slots([Candidate(running(1, {"a": 2})), Candidate(job(2))], [], NOW)
    assert plan.slots == {1: {}, 2: {}}
    assert "the hosts that can be used have 0" in plan.reasons[1]


def test_priority_comes_first() -> None:
    waiting = [Candidate(job(number)) for number in range(1, 7)]
    urgent = Candidate(job(7, priority=50.0))
    plan = plan_slots([*waiting, urgent], HOSTS, NOW)
    assert plan.slots[7]


def test_equal_jobs_take_no_turns_every_minute() -> None:
    """What a preempted job has waited and trained before gives it no weight when it waits again."""
    holds = Candidate(running(1, {"a": 1}, for_s=120.0))
    preempted = {"submitted_at": NOW - 36_000.0, "started_at": NOW - 20_000.0, "attempts": 1}

    def holders(queued_for_s: float) -> list[int]:
        waits = Candidate(job(2, queued_at=NOW - queued_for_s, **preempted))
        plan = plan_slots([holds, waits], [HostOffer("a", 1)], NOW)
        return [number for number, slots in plan.slots.items() if slots]

    assert holders(120.0) == [1]
    assert holders(500.0) == [1]
    assert holders(3600.0) == [2], "but it does not wait for ever"


def test_long_queue_of_equal_jobs_takes_no_turns_every_minute() -> None:
    """Those that wait have all waited for long when one of them starts."""
    starts = Candidate(running(1, {"a": 1}, for_s=120.0, queued_at=NOW - 900.0))
    others = [Candidate(job(number, queued_at=NOW - 900.0)) for number in (2, 3, 4)]
    plan = plan_slots([starts, *others], [HostOffer("a", 1)], NOW)
    assert [number for number, slots in plan.slots.items() if slots] == [1]
    later = Candidate(running(1, {"a": 1}, for_s=3600.0, queued_at=NOW - 3600.0 - 780.0))
    plan = plan_slots([later, *others], [HostOffer("a", 1)], NOW)
    assert plan.slots[2], "what it waited before counts for as long as it runs"


def test_job_of_low_priority_does_not_starve_behind_many() -> None:
    many = [Candidate(job(number, priority=2.0)) for number in range(2, 40)]
    low = Candidate(job(1, queued_at=NOW - 10 * 3600.0))
    assert plan_slots([*many, low], HOSTS, NOW).slots[1]


def test_jobs_of_one_host_neither_starve_nor_keep_others_from_the_rest() -> None:
    every = [running(n, {"ab"[n % 2]: 1}, priority=2.0) for n in (2, 3, 4, 5)]
    only_a = frozenset("a")
    low = Candidate(job(1, queued_at=NOW - 10 * 3600.0), hosts=only_a)
    plan = plan_slots([*map(Candidate, every), low], HOSTS, NOW)
    assert plan.slots[1] == {"a": 1}
    crowd = [Candidate(job(n, queued_at=NOW - 5 * 3600.0 + n), hosts=only_a) for n in range(10, 60)]
    plan = plan_slots([*crowd, Candidate(job(1))], HOSTS, NOW)
    assert plan.slots[1].keys() == {"b"}, "though those that came before would fill the cluster"
    assert [plan.slots[n] for n in range(10, 13)] == [{"a": 1}, {"a": 1}, {}]
    asks = replace(crowd[0].job.request, wish=HostWish("a,c", exclude="b"))
    waits = Candidate(replace(crowd[0].job, request=asks), hosts=only_a)
    plan = plan_slots([waits], HOSTS[1:], NOW)
    told = "waits: it needs 1 slot, the hosts that it asks for (--hosts a,c --exclude b) have 0"
    assert (plan.slots[10], plan.reasons[10]) == ({}, told)


def test_jobs_of_fixed_size_get_all_or_nothing() -> None:
    fixed = Candidate(job(1, kind=JobKind.FIXED, min_np=3, max_np=3))
    others = [
        Candidate(running(number, {host: 1}, for_s=5.0)) for number, host in ((2, "a"), (3, "b"))
    ]
    plan = plan_slots([fixed, *others], HOSTS, NOW)
    assert plan.slots[1] == {}, "the others have just begun"
    assert sum(plan.slots[2].values()) == 1
    alone = plan_slots([fixed], HOSTS, NOW)
    assert sum(alone.slots[1].values()) == 3


def test_a_plain_command_is_never_preempted() -> None:
    plain = [Candidate(running(n, {"a": 1}, kind=JobKind.PLAIN, max_np=1)) for n in (1, 2)]
    plain += [Candidate(running(n, {"b": 1}, kind=JobKind.PLAIN, max_np=1)) for n in (3, 4)]
    plan = plan_slots([*plain, Candidate(job(5, priority=100.0))], HOSTS, NOW)
    assert all(plan.slots[number] for number in (1, 2, 3, 4))
    assert plan.slots[5] == {}


def test_job_that_keeps_its_size_is_not_said_to_start_small() -> None:
    plain = Candidate(running(1, {"a": 1}, kind=JobKind.PLAIN, max_np=1))
    fixed = Candidate(job(2, kind=JobKind.FIXED, min_np=2, max_np=2))
    reasons = plan_slots([plain, fixed], HOSTS, NOW).reasons
    assert reasons == {
        1: "1 slot on 1 host, from start to end",
        2: "2 slots on 1 host, from start to end",
    }


def test_job_that_needs_more_than_the_usable_hosts_have_says_so() -> None:
    plan = plan_slots([Candidate(job(1, min_np=4))], HOSTS[:1], NOW)
    assert plan.reasons[1] == "waits: it needs 4 slots, the hosts that can be used have 2"
    assert plan_slots([Candidate(job(1))], [], NOW).slots == {1: {}}


def test_measured_job_grows_to_twice_what_was_timed_and_tells_when_it_ends(run: Written) -> None:
    run.trains({"a": 1}, step_s=0.1, done=0.25)
    progress = Read(run.folder)
    assert progress.poll(), "a size was measured"
    assert not progress.poll()
    assert progress.measured.slots == 1
    assert progress.hosts.occupied == {"a": 1}
    candidate = Candidate(running(1, {"a": 1}), progress.measured)
    plan = plan_slots([candidate], HOSTS, NOW)
    assert plan.slots[1] == {"a": 2}
    eta = plan.etas[1]
    assert eta is not None
    assert progress.measured.remaining(None, None) == pytest.approx(3 * progress.measured.done)
    assert 50 < eta - NOW < 180
    unheard = Candidate(running(1, {"a": 1}), progress.measured, unheard="a is silent")
    assert plan_slots([unheard], HOSTS, NOW).etas == {1: None}


def test_idle_cluster_is_given_to_one_job_and_shared_with_the_next(run: Written) -> None:
    for generation, (hosts, step_s) in enumerate(
        [({"a": 1}, 0.2), ({"a": 2}, 0.1), ({"a": 2, "b": 2}, 0.05)], 1
    ):
        run.trains(hosts, step_s, generation, done=0.05)
    progress = Read(run.folder)
    progress.poll()
    alone = Candidate(running(1, {"a": 2, "b": 1}), progress.measured)
    assert sum(plan_slots([alone], HOSTS, NOW).slots[1].values()) == 4
    shared = plan_slots(
        [
            Candidate(running(1, {"a": 2, "b": 2}), progress.measured),
            *(Candidate(job(n)) for n in (2, 3)),
        ],
        HOSTS,
        NOW,
    )
    assert sum(shared.slots[1].values()) == 2
    assert shared.slots[2]
    assert shared.slots[3]
    assert "shrinks from 4 to 2 slots" in shared.reasons[1]


def test_expected_starts_follow_the_ends_of_those_that_hold_slots() -> None:
    assert expected_starts([], [1], 1) == [None]
    assert expected_starts([(5.0, 1), (9.0, 1)], [1, 1, 1], 2) == [5.0, 9.0, None]


def test_processes_that_ended_without_a_leader_occupy_no_slots(run: Written) -> None:
    progress = Read(run.folder)
    run.trains({"a": 2}, 0.1)
    run.add("leader_cut_off", 9.0, silent_s=5.0, grace_s=60.0)
    progress.poll()
    assert progress.hosts.occupied == {"a": 2}, "they may train on"
    run.add("hosts_changed", 70.0, hosts=[["a", 2]])
    progress.poll()
    assert progress.hosts.occupied == {}, "the grace is over, and no host has told of any"
    assert progress.hosts.silent == {"a": 4.0}
    assert "has not reached a again" in progress.hosts.unheard
    run.add("agent_started", 71.0, host="a")
    progress.poll()
    assert not progress.hosts.unheard


def test_processes_that_a_new_leader_finds_occupy_their_slots(run: Written) -> None:
    progress = Read(run.folder)
    run.trains({"a": 2, "b": 1}, 0.1)
    run.add("run_started", 80.0)
    run.add("hosts_changed", 81.0, hosts=[["a", 2], ["b", 1]])
    found = {"generation": 1, "size": 2, "workers": 2, "processes": [["a", 0], ["a", 1]]}
    run.add("taken_over", 81.0, **found)
    progress.poll()
    assert progress.hosts.occupied == {"a": 2}


def test_end_of_a_run_and_lost_hosts_are_told_once(run: Written) -> None:
    run.add("run_started", 1.0)
    run.add("host_lost", 2.0, host="a", cause="the agent ended")
    progress = Read(run.folder)
    progress.poll()
    assert progress.hosts.take_lost() == {"a": "the agent ended"}
    assert progress.hosts.take_lost() == {}
    assert progress.ending is None
    run.add("run_finished", 3.0, status="failed", message="broken")
    progress.poll()
    assert progress.ending is not None
    assert (progress.ending.at, progress.ending.status) == (3.0, "failed")
    run.add("run_started", 4.0)
    progress.poll()
    assert progress.ending is None, "it is tried again"


def test_what_a_job_of_another_user_makes_up_is_left_out(run: Written) -> None:
    run.trains({"a": 1}, 0.1)
    progress = Read(run.folder)
    progress.poll()
    made_up = Measured()
    made_up.goodput = lambda per_host: np.full(sum(per_host) + 1, np.nan)  # type: ignore[method-assign]
    asked = replace(job(1).request, user=4001)
    for measured, most in ((progress.measured, 2), (made_up, 1)):
        candidate = Candidate(replace(running(1, {"a": 1}), request=asked), measured)
        assert sum(plan_slots([candidate], HOSTS, NOW).slots[1].values()) == most


@pytest.mark.parametrize(
    ("kind", "length_s", "latest_s"), [(JobKind.PLAIN, 100.0, 700), (JobKind.ELASTIC, 50.0, 1800)]
)
def test_job_that_needs_several_slots_starts_behind_an_endless_row_of_others(
    kind: JobKind, length_s: float, latest_s: int
) -> None:
    """In virtual time: four jobs of one slot run at any time, and others wait."""
    wide = job(1, kind=JobKind.FIXED, min_np=4, max_np=4, submitted_at=NOW, queued_at=NOW)
    one = {"kind": kind, "max_np": 1}
    runs = {n: running(n, {"ab"[n % 2]: 1}, length_s * (n - 1) / 5, **one) for n in range(2, 6)}
    for second in range(0, latest_s, 10):
        now = NOW + second
        runs = {n: each for n, each in runs.items() if now - (each.started_at or 0.0) < length_s}
        numbers = range(10_000 + second, 10_009 + second)
        queued = [Candidate(job(n, queued_at=now - 60.0, **one)) for n in numbers]
        plan = plan_slots([*map(Candidate, runs.values()), Candidate(wide), *queued], HOSTS, now)
        if plan.slots[1]:
            assert second >= 600
            reasons = {plan.reasons[n] for n in numbers}
            told = "waits: job 1 (train-1) is before it and needs 4 slots"
            assert (reasons == {told}) == (kind is JobKind.PLAIN)
            return
        for each in queued:
            if held := plan.slots[each.job.number]:
                started = replace(each.job, status=JobStatus.RUNNING, started_at=now, held=held)
                runs[started.number] = started
        assert second >= 600 or len(runs) == 4, "slots are kept for who has waited for long"
    pytest.fail("it has not started")


def test_commands_that_do_not_delay_a_job_before_them_start() -> None:
    limit = {"kind": JobKind.PLAIN, "time_limit_s": 600.0}
    runs = [Candidate(running(n, {"a": 1}, for_s=100.0, **limit)) for n in (2, 3)]
    wide = Candidate(job(1, kind=JobKind.FIXED, min_np=3, max_np=3, queued_at=NOW - 700.0))
    short, long, any_length = (
        Candidate(job(number, kind=JobKind.PLAIN, max_np=1, time_limit_s=limit_s))
        for number, limit_s in ((4, 500.0), (5, 501.0), (6, None))
    )
    plan = plan_slots([*runs, wide, long, any_length, short], HOSTS, NOW)
    assert [bool(plan.slots[n]) for n in (1, 4, 5, 6)] == [False, True, False, False]
    spare = plan_slots([runs[0], wide, long, any_length], [*HOSTS, HostOffer("c", 1)], NOW)
    assert [bool(spare.slots[n]) for n in (1, 5, 6)] == [True, True, False], "one slot is left"
    there = replace(wide, hosts=frozenset("a"))
    asks = replace(there.job, request=replace(there.job.request, min_np=2, max_np=2))
    plan = plan_slots([runs[0], replace(there, job=asks), long, any_length], HOSTS, NOW)
    assert [plan.slots[n] for n in (1, 5, 6)] == [{}, {"b": 1}, {"b": 1}], "on another host"


class Claims(Measured):
    """What a job says of itself: by default, that it gains by each slot and lasts an hour."""

    timed = {1, 2}  # noqa: RUF012
    rescale_s = noise = 0.0

    def __init__(self, goodput: Sequence[float] = range(5), left: float = 3600.0) -> None:
        super().__init__()
        self._goodput, self._left = np.asarray(goodput, np.float64), left

    def goodput(self, per_host: Sequence[int]) -> np.ndarray:
        return self._goodput

    def remaining(self, target_examples: float | None, epochs: float | None) -> float:
        return self._left


def test_a_user_wins_little_by_measurements_that_are_made_up() -> None:
    """The claim of another user's job is bounded by what a job can be."""
    theirs = replace(job(1).request, user=4001)
    hosts = [HostOffer(name, 1) for name in "abcd"]

    def slots(claims: Claims, honest: Claims, own: str, other: str) -> int:
        held, others = (dict.fromkeys(names, 1) for names in (own, other))
        liar = Candidate(replace(running(1, held), request=theirs), claims)
        jobs = [liar, Candidate(running(2, others), honest)]
        return sum(plan_slots(jobs, hosts, NOW).slots[1].values())

    gains = Claims([0.0, 1.0, 1e3, 1e6, 1e9])
    keeps = Claims()
    keeps.noise = 1e9
    for claims in (Claims(), gains, keeps):
        assert slots(claims, Claims(left=60.0), "abc", "d") == 1
    for name, value in (("rescale_s", -1e9), ("rescale_s", 1e300), ("_left", 1e300)):
        nonsense = Claims()
        setattr(nonsense, name, value)
        assert slots(nonsense, Claims(), "a", "bc") == 1, "as if nothing were measured"
