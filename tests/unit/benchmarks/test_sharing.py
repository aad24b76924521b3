"""What the benchmark of shared hosts makes of what it saw."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sharing.measure import mean_while, pauses_of
from benchmarks.sharing.workload import JOBS, KINDS, QueuedJob
from benchmarks.testbed.figures import kept_rows
from hvd_elastic.errors import UsageError


def test_slots_in_use_are_counted_only_while_something_waits() -> None:
    used = [(0.0, 4.0), (10.0, 12.0), (20.0, 0.0)]
    waiting = [(1.0, 1.0), (2.0, 0.0), (8.0, 1.0), (9.0, 2.0), (12.0, 0.0)]
    assert mean_while(used, waiting) == pytest.approx(((3 * 4 + 2 * 12) / 5, 5.0))


def test_a_pause_is_told_with_the_step_that_ends_it() -> None:
    def metrics(step: int, mono: float) -> dict[str, Any]:
        return {"kind": "metrics", "step": step, "mono": mono}

    begins: dict[str, Any] = {"kind": "rescale_started"}
    events = [
        *(begins, {"kind": "rescale_finished", "pause_s": None}, metrics(1, 1.0)),
        *(begins, {"kind": "rescale_finished", "pause_s": 0.3}),
        *(metrics(2, 2.0), metrics(4, 2.5), metrics(5, 2.75), {"kind": "batch_plan"}),
        *(metrics(6, 4.0), metrics(7, 6.0), metrics(8, 8.0)),
        *(begins, {"kind": "rescale_finished", "pause_s": 0.4}, begins, metrics(9, 9.0)),
    ]
    assert [*pauses_of(events)] == [(0.3, 0.25), (0.4, 0.0)]


def test_jobs_are_as_long_as_they_say_on_one_slot() -> None:
    assert {job.kind for job in JOBS} == KINDS.keys()
    words = QueuedJob(0.0, "overhead", 0.5).arguments(Path("x.py"), 600.0, asks=True)
    told: dict[Any, Any] = dict(itertools.pairwise(words))
    steps = told["--epochs"] * told["--examples"] / told["--batch"]
    one_step_s = told["--pass-s"] + told["--example-s"] * told["--batch"]
    assert steps * one_step_s == pytest.approx(300.0, rel=0.01)
    assert told["--np"] == KINDS["overhead"].asked


def test_rows_of_earlier_calls_are_kept_and_files_of_others_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    assert kept_rows(path, "jobs", ["times"]) == {"times": []}
    path.write_text(json.dumps({"benchmark": "jobs", "times": [{"part": "moves"}]}))
    assert kept_rows(path, "jobs", ["times", "shared"]) == {
        "times": [{"part": "moves"}],
        "shared": [],
    }
    with pytest.raises(UsageError, match="something else than figures of this benchmark"):
        kept_rows(path, "schedule", ["workloads"])
