"""What a trial has reported, by its useful examples."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hvd_elastic import run_events as ev
from hvd_elastic.jobs.job import Job, JobRequest, JobStatus
from hvd_elastic.search.progress import TrialProgress
from hvd_elastic.search.trials import Trial, TrialStatus


@pytest.fixture
def progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialProgress:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    found = TrialProgress("val/acc", "t.0-1-abcd")
    found.take([ev.RescaleStarted(1, 0, 2, ["a"], [2], "start", t=0.0)])
    found.take([ev.RescaleFinished(1, 2, None, t=0.0)])
    return found


def metrics(examples: int, **values: float | None) -> ev.Metrics:
    named = {name.replace("_", "/"): value for name, value in values.items()}
    step = examples // 10
    return ev.Metrics(
        step,
        0,
        0,
        examples,
        2,
        values=named,
        reported=[*named],
        t=examples / 50,
        mono=examples / 50,
    )


def test_points_are_the_reports_of_the_metric_alone(progress: TrialProgress) -> None:
    progress.take([metrics(100, loss=2.0), metrics(200, val_acc=0.5), metrics(300, loss=1.0)])
    progress.take([metrics(400, val_acc=0.5), metrics(500, val_acc=None)])
    assert [point.examples for point in progress.points] == [200, 400, 500]
    assert [point.value for point in progress.points[:2]] == [0.5, 0.5]
    assert math.isnan(progress.points[2].value)
    assert progress.others == {"loss"}
    job = Job(7, JobRequest("t.0", {}), "t.0-7", JobStatus.RUNNING, held={"a": 2})
    trial = progress.of(Trial(0), job, 12.0)
    assert (trial.status, trial.job, trial.slots, trial.examples) == (
        TrialStatus.RUNNING,
        7,
        2,
        500,
    )
    assert trial.speed == pytest.approx(50)
    assert trial.slot_s == pytest.approx(24)


def test_an_example_of_a_large_batch_counts_for_less(progress: TrialProgress) -> None:
    limits = ev.BatchLimits(10, 1000, 1, None, 0)
    progress.take([ev.BatchPlan(0, 40, 20, 0, 1.0, limits, "", t=0.0)])
    event = metrics(400, val_acc=0.5)
    event.noise_scale = 10.0
    progress.take([event])
    # Efficiency at four times the batch: (10 + 10) / (10 + 40).
    assert [point.examples for point in progress.points] == [pytest.approx(160)]


def test_what_is_trained_again_after_a_restore_counts_once(progress: TrialProgress) -> None:
    progress.take([metrics(n, val_acc=n / 1000) for n in (100, 200, 300, 400)])
    progress.take([ev.Restored(20, 0, 0, 200, "", t=9.0)])
    assert [point.examples for point in progress.points] == [100, 200]
    progress.take([metrics(201, loss=1.0), metrics(300, val_acc=0.3)])
    assert [point.examples for point in progress.points] == [100, 200, pytest.approx(300, abs=2)]
    progress.take([ev.Restored(30, 0, 0, 300, "", t=9.0), metrics(350, val_acc=0.4)])
    assert progress.points[-1].examples == pytest.approx(350, abs=2)


@pytest.mark.parametrize(
    ("status", "hold", "found"),
    [
        (JobStatus.QUEUED, "", TrialStatus.WAITING),
        (JobStatus.QUEUED, "search t", TrialStatus.HELD),
        (JobStatus.RUNNING, "search t", TrialStatus.HELD),  # it writes its checkpoint
        (JobStatus.FAILED, "search t", TrialStatus.FAILED),
        (JobStatus.CANCELLED, "", TrialStatus.STOPPED),
        (JobStatus.SUCCEEDED, "", TrialStatus.DONE),
    ],
)
def test_the_state_of_a_trial_is_that_of_its_job(
    progress: TrialProgress, status: JobStatus, hold: str, found: TrialStatus
) -> None:
    job = Job(1, JobRequest("t.0", {}, hold=hold), "t.0-1", status, reason="r", message="m")
    assert progress.of(Trial(0), job, 1.0).status is found
