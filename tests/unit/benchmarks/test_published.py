"""Many jobs in virtual time, on a small profile that is written here."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published.fairness import EqualShares
from benchmarks.published.policies import POLICIES
from benchmarks.published.profiles import SubmittedJob, read_applications, read_workload
from benchmarks.published.simulate import simulate_jobs
from hvd_elastic.errors import UsageError
from hvd_elastic.policy.schedule.decide import decide
from hvd_elastic.policy.schedule.jobs import Assignment
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.records.cluster import summarize_cluster
from hvd_elastic.sim.jobs.run import JobInTime, as_jobs, queue_events, run_jobs

HOSTS = [HostOffer("a", 2), HostOffer("b", 2)]
STEP_S, EPOCHS, STEPS = 0.5, 4, 1000


def write(path: Path, columns: list[str], rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """A profile without noise in the gradient: a larger batch brings nothing."""
    app = tmp_path / "profiles" / "app"
    times = [[size, STEP_S * size / 64, 0.0] for size in (8, 64, 256)]
    shapes = ["1", "2", "11", "22", "12"]
    rows = [[shape, *row] for shape in shapes for row in times]
    write(app / "placements.csv", ["placement", "local_bsz", "step_time", "sync_time"], rows)
    scales = [[6, 24, *row] for row in times]
    columns = ["num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"]
    write(app / "scalability.csv", columns, scales)
    for batch in (64, 256):
        ends = [STEPS * (epoch + 1) for epoch in range(EPOCHS)]
        epochs = [[end, end, 0, 1.0, 0.0] for end in ends]
        columns = ["progress", "iteration", "metric", "grad_sqr", "grad_var"]
        write(app / f"validation-{batch}.csv", columns, epochs)
    limits = {"init_batch_size": 64, "max_batch_size": 256, "min_local_bsz": 8}
    entry = {**limits, "max_local_bsz": 256, "max_epochs": EPOCHS}
    (tmp_path / "constants.json").write_text(json.dumps({"applications": {"app": entry}}))
    return tmp_path


def jobs(profiles: Path, count: int) -> list[SubmittedJob]:
    application = read_applications(profiles)["app"]
    return [SubmittedJob(f"j{n}", 0.0, application, 2, 64) for n in range(count)]


def test_first_come_first_served_takes_the_time_of_the_profile(profiles: Path) -> None:
    outcome = simulate_jobs(jobs(profiles, 3), HOSTS, POLICIES["fifo"], 60.0, 30.0)
    alone_s = STEPS * EPOCHS * STEP_S / 2 + 60 + 30
    assert outcome.completion_s["j0"] == outcome.completion_s["j1"] == pytest.approx(alone_s)
    # The third starts at the first decision after the end of the others.
    assert outcome.completion_s["j2"] == pytest.approx(2 * alone_s, abs=60)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_ends_every_job(profiles: Path, policy: str) -> None:
    outcome = simulate_jobs(jobs(profiles, 6), HOSTS, POLICIES[policy], 30.0, 1.0)
    assert len(outcome.completion_s) == 6
    assert all(change.reason for change in outcome.changes)
    assert outcome.mean_fairness <= outcome.worst_fairness


def test_finish_time_fairness_is_relative_to_an_equal_share(profiles: Path) -> None:
    application = read_applications(profiles)["app"]
    shares = EqualShares(capacity=4, per_host=2, pause_s=0.0)
    alone_s = STEPS * EPOCHS * STEP_S
    assert shares.completion_s(application, 4) == pytest.approx(alone_s)
    assert shares.completion_s(application, 2) == pytest.approx(alone_s / 2)
    assert shares.completion_s(application, 8) == pytest.approx(2 * alone_s), "half a slot"
    assert shares.completion_s(application, 8 / 3) == pytest.approx(alone_s / 1.5)
    # Two jobs that ask for all slots: the second waits half of its time, in which there are two.
    both = [SubmittedJob(f"j{n}", 0.0, application, 4, 64) for n in range(2)]
    outcome = simulate_jobs(both, HOSTS, POLICIES["fifo"], 10.0, 0.0)
    expected = outcome.completion_s["j1"] / (1.5 * alone_s / 4)
    assert outcome.fairness["j1"] == pytest.approx(expected, rel=0.05)


def test_what_happened_can_be_told_as_the_events_of_a_queue(profiles: Path) -> None:
    outcome = simulate_jobs(jobs(profiles, 6), HOSTS, POLICIES["goodput"], 30.0, 1.0)
    cluster = summarize_cluster(queue_events(outcome, HOSTS))
    assert cluster.hosts == {"a": 2, "b": 2}
    assert [job.status for job in cluster.jobs.values()] == ["succeeded"] * 6
    for name, job in cluster.jobs.items():
        assert job.ended_s == pytest.approx(outcome.completion_s[name])
    held = sum(job.slot_s for job in cluster.jobs.values())
    assert held == pytest.approx(outcome.slot_s, rel=0.01)
    changes = [(made.at_s, made.job, made.after) for made in cluster.decisions]
    told = [(change.at_s, change.job, change.slots) for change in outcome.changes]
    assert sorted(changes) == sorted(told)


def test_one_job_grows_to_the_whole_cluster(profiles: Path) -> None:
    outcome = simulate_jobs(jobs(profiles, 1), HOSTS, POLICIES["goodput"], 10.0, 1.0)
    assert [change.slots for change in outcome.changes] == [1, 2, 4]


def test_a_workload_names_the_line_of_a_mistake(profiles: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    columns = ["name", "time", "application", "num_replicas", "batch_size"]
    write(path, columns, [["a", 1, "app", 1, 64], ["b", 1, "nothing", 1, 64]])
    with pytest.raises(UsageError, match=r"line 3: 'nothing' is not known.*applications app"):
        read_workload(path, read_applications(profiles))
    with pytest.raises(UsageError, match="is not a folder of profiles"):
        read_applications(tmp_path / "profiles")


class Flat(JobInTime):
    """A job that is as fast on any number of slots; what differs is the noise of its figures."""

    max_slots = 4
    remaining_examples = math.inf

    def goodput(self) -> np.ndarray:
        return np.array([0.0, 10.0, 10.0, 10.0, 10.0])

    def _train(self, now: float, seconds: float) -> None:
        self.finished_s = now + seconds if now >= 2000 else None


def test_a_job_of_constant_speed_keeps_its_slots_whatever_the_noise() -> None:
    def rescales(known: float) -> int:
        job = Flat("flat", 0.0)
        job.noise = 0.03

        def choose(active: Sequence[Flat], now: float) -> Mapping[str, Assignment]:
            (seen,) = as_jobs(active, 1.0, tells_length=False)
            return decide([dataclasses.replace(seen, noise=known)], HOSTS, now)

        sizes = {host.name: host.slots for host in HOSTS}
        return run_jobs([job], choose, 10.0, 1.0, sizes).rescales

    assert rescales(known=0.0) > 20, "200 decisions on noise"
    assert rescales(known=0.03) <= 5


def test_jobs_wait_for_slots_until_the_processes_of_others_have_left(profiles: Path) -> None:
    submitted = [
        dataclasses.replace(job, submitted_s=400.0 * number)
        for number, job in enumerate(jobs(profiles, 3))
    ]
    outcomes = [
        simulate_jobs(submitted, HOSTS, POLICIES["goodput"], 10.0, 1.0, leave_s=leave_s)
        for leave_s in (0.0, 60.0)
    ]
    assert outcomes[0].waited_s == 0 < outcomes[1].waited_s
    assert outcomes[0].mean_completion_s < outcomes[1].mean_completion_s
