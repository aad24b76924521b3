"""``run --policy goodput``: real jobs on virtual hosts whose device time is a sleep.

A step takes ``a + b m`` seconds of sleep for m examples on a rank, so slots behave like devices
whatever the number of cores here; gradients, all-reduce and rescales are real.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from hvd_elastic.records.json_lines import Record
from tests.dist.conftest import EVERY_STYLE, StartJob
from tests.dist.running import RunningJob
from tests.paths import COSTLY, LIMIT_S

pytestmark = pytest.mark.dist

BATCH = 24
DEADLINE_S = LIMIT_S


@pytest.fixture
def start(start_job: StartJob, stage: Any) -> Any:
    def begin(constant_s: float, example_s: float, *options: str) -> RunningJob:
        device = ("--step-time", str(constant_s), "--example-time", str(example_s))
        data = ("--examples", "2400", "--batch-size", str(BATCH))
        hosts = {stage.hosts[0]: 2, stage.hosts[1]: 2}
        return start_job(hosts, "--policy", "goodput", *options, script_options=(*device, *data))

    return begin


def decisions(job: RunningJob, since: int = 0) -> Iterator[Record]:
    yield from job.kinds("decision", since)


def wait_decision(job: RunningJob, action: str, np: int | None = None) -> Record:
    def find() -> Record | None:
        found = [d for d in decisions(job) if d["action"] == action and np in (None, d.get("np"))]
        return found[0] if found else None

    return job.wait_for(find, f"decision {action} {np or ''}", DEADLINE_S)


@EVERY_STYLE
def test_slots_are_added_where_examples_take_the_time(start: Any) -> None:
    job = start(0.002, 0.01, "--leader-grace", "0")
    grown = wait_decision(job, "grow")
    assert "useful examples/s expected" in grown["reason"]
    assert grown["snapshot"]["current"] == [[job.stage.hosts[0], 1]], "it begins with --min-np"
    assert grown["snapshot"]["step_time"] is not None
    # Wherever the first try led, in the end there are four: each cuts the time of a step.
    job.wait_for(lambda: job.size() == 4, "training with 4 processes", DEADLINE_S)
    begun = [e for e in job.kinds("rescale_started") if e["to_size"] == 4]
    assert begun, job.story()
    stayed = wait_decision(job, "stay")
    assert "useful examples/s" in stayed["reason"]
    status = job.command("status", job.run_id)
    assert "decision" in status
    check_plan(job)
    # The next leader begins where this one stood, and tries nothing of what was tried.
    job.process.kill()
    job.process.wait()
    since = job.mark()
    job.resume()
    job.wait_size(4, since)
    begun = job.kinds("rescale_started", since)
    sizes = [e["to_size"] for e in begun]  # a worker may be late where the machine is busy
    assert sizes == sorted(sizes), job.story()
    assert sizes[-1] == 4, job.story()
    job.wait_for(lambda: [*decisions(job, since)], "a decision", DEADLINE_S)
    assert {d["action"] for d in decisions(job, since)} == {"stay"}, job.story()


def check_plan(job: RunningJob) -> None:
    """What the run measured tells what other numbers of hosts would do."""
    found = json.loads(job.command("plan", job.run_id, "--hosts", "4", "--json"))
    assert [entry["slots"] for entry in found["forecasts"]] == [2, 4, 6, 8]
    on_two = found["forecasts"][1]
    assert on_two["seen"]
    told = [e["throughput"] for e in job.kinds("metrics") if e["size"] == 4]
    assert on_two["low"] / 2 < median(told) < 2 * on_two["high"]
    assert "uPlot" in Path(found["path"]).read_text(encoding="utf-8")


@COSTLY
def test_slots_that_bring_nothing_are_given_back(start: Any) -> None:
    efficiency = ("--objective", "efficiency", "--min-speedup-per-slot", "0.8")
    job = start(0.15, 0.0001, *efficiency, "--np", "4")
    shrunk = wait_decision(job, "shrink")
    assert shrunk["snapshot"]["current"] != shrunk["target"]
    assert shrunk["reason"], "in words"
    job.wait_for(lambda: job.size() == 1, "training with 1 process", DEADLINE_S)
    mark = job.mark()
    job.wait_steps(40)
    assert not [d for d in decisions(job, mark) if d["action"] == "grow"], job.story()


@COSTLY
def test_who_asks_for_a_size_gets_it(start: Any) -> None:
    job = start(0.002, 0.01)
    job.wait_for(lambda: job.size() == 1, "training")
    told = json.loads(job.command("scale", job.run_id, "2", "--json"))
    assert told["ok"]
    assert wait_decision(job, "pause")["reason"] == "2 workers wanted by hvd-elastic scale"
    job.wait_size(2)
    mark = job.mark()
    job.wait_steps(60)
    assert [*decisions(job, mark)] == [], "the policy keeps out of it"
    job.command("policy", job.run_id, "resume")
    wait_decision(job, "grow")
