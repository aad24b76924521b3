from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.records.summary import RunSummary, take_events
from hvd_elastic.records.wording import Narrator, run_sentences, status_rows
from tests.unit.records.made_events import made, made_all, summarized
from tests.unit.records.sample_run import EXAMPLES, START, sample_events


def test_a_whole_run() -> None:
    run = summarized(sample_events())
    assert (run.run_id, run.status, run.epochs, run.steps) == ("digits-3", "succeeded", 12, 276)
    assert run.examples == 12 * EXAMPLES
    assert run.started == START
    assert run.duration_s > 5
    assert run.first_step_s == 2.5
    assert run.size == 0
    assert run.largest_size == 3
    changes = [(r.from_size, r.to_size, r.pause_s) for r in run.rescales]
    assert changes == [(0, 2, None), (2, 3, 0.12), (3, 2, 0.07), (2, 1, 0.83), (1, 2, 0.15)]
    assert len(run.live_rescales) == 4
    assert run.longest_pause_s == 0.83
    assert [(gone.host, gone.cause) for gone in run.left] == [
        ("node2", "asked to leave"),
        ("node3", "killed by signal 9"),
    ]
    assert len(run.joined) == 4
    assert [checkpoint.step for checkpoint in run.checkpoints] == [100, 200]
    assert run.user_metrics == ["accuracy"]
    assert list(run.final_metrics()) == ["loss", "accuracy"]
    assert len(run.series["loss"].values) == 276
    assert run.mean_throughput is not None
    json.dumps(run.as_json())


def test_a_run_that_goes_on() -> None:
    run = summarized(sample_events(status="running"))
    assert (run.status, run.size) == ("running", 2)


def test_a_number_that_no_float_can_hold_is_none() -> None:
    event = {"t": 3.0, "kind": "metrics", "step": 277, "examples": 5, "loss": 10**400}
    run = summarized([*sample_events(status="running"), event])
    assert (run.steps, run.examples) == (277, 5)
    assert math.isnan(run.series["loss"].values[-1])
    json.dumps(run.as_json())


def test_no_events() -> None:
    run = summarized([])
    assert (run.status, run.duration_s, run.final_metrics()) == ("unknown", 0.0, {})


def test_a_resumed_run_counts_on() -> None:
    events = [
        {"t": 0.0, "kind": "run_started", "run_id": "a", "hosts": [["n1", 2]]},
        {"t": 1.0, "kind": "rescale_started", "generation": 1, "from_size": 0, "to_size": 2},
        {"t": 2.0, "kind": "rescale_finished", "generation": 1, "size": 2, "pause_s": None},
        {"t": 3.0, "kind": "metrics", "step": 50, "epoch": 2, "examples": 500, "loss": 0.5},
        {"t": 9.0, "kind": "run_started", "run_id": "a", "hosts": [["n1", 4]]},
        {"t": 9.5, "kind": "restored", "step": 40, "epoch": 1, "examples": 400, "path": "p"},
        {"t": 10.0, "kind": "rescale_started", "generation": 1, "from_size": 0, "to_size": 4},
        {"t": 11.0, "kind": "rescale_finished", "generation": 1, "size": 4, "pause_s": None},
    ]
    run = summarized(events)
    assert (run.status, run.attempts, run.steps) == ("running", 2, 40)
    assert run.hosts == [("n1", 4)]
    assert run.sizes == [(2.0, 2), (3.0, 0), (11.0, 4)]
    assert [(r.at_s, r.to_size, r.finished) for r in run.rescales] == [(1, 2, True), (10, 4, True)]


def test_a_rescale_that_broke_is_kept_as_unfinished() -> None:
    events = [
        {"t": 0.0, "kind": "run_started", "run_id": "a"},
        {"t": 1.0, "kind": "rescale_started", "generation": 2, "from_size": 2, "to_size": 3},
        {"t": 2.0, "kind": "rescale_started", "generation": 3, "from_size": 3, "to_size": 2},
        {"t": 3.0, "kind": "rescale_finished", "generation": 3, "size": 2, "pause_s": 1.5},
    ]
    assert [(r.generation, r.finished) for r in summarized(events).rescales] == [
        (2, False),
        (3, True),
    ]


def test_shares_are_those_of_the_present_world() -> None:
    events = [
        {"t": 1.0, "kind": "run_started", "run_id": "a"},
        {"t": 2.0, "kind": "rescale_started", "generation": 1, "from_size": 0, "to_size": 2},
        {"t": 3.0, "kind": "shares", "shares": [24, 8], "global_batch_size": 32, "reason": "slow"},
    ]
    assert summarized(events).shares == "the ranks have 24, 8 of 32 examples: slow"
    again = summarized([*events, events[-1]])
    assert [each.kind for each in again.decisions] == ["shares"], "told again to a new leader"
    another = {"t": 4.0, "kind": "rescale_started", "generation": 2, "from_size": 2, "to_size": 3}
    assert summarized([*events, another]).shares == ""
    assert summarized([*events, {"t": 4.0, "kind": "run_started"}]).shares == ""


def test_a_failed_script_keeps_its_first_traceback() -> None:
    events = [
        {"t": 0.0, "kind": "run_started", "run_id": "a"},
        {"t": 1.0, "kind": "script_failed", "host": "n1", "local_rank": 0, "traceback": "first"},
        {"t": 1.1, "kind": "script_failed", "host": "n2", "local_rank": 0, "traceback": "second"},
        {"t": 2.0, "kind": "run_finished", "status": "failed", "message": "m", "steps": 7},
    ]
    run = summarized(events)
    assert (run.status, run.message, run.failure, run.failed_worker, run.steps) == (
        "failed", "m", "first", "n1:0", 7,
    )  # fmt: skip


def test_what_was_asked_to_be_drained_stays_so_when_the_host_gives_notice_as_well() -> None:
    draining = {"kind": "host_draining", "cause": "", "leave_in_s": None}
    run = summarized(
        [
            {**draining, "host": "n1", "asked": True},
            {**draining, "host": "n1", "asked": False},
            {**draining, "host": "n2", "asked": False},
        ]
    )
    assert {host: found.asked for host, found in run.draining.items()} == {"n1": True, "n2": False}


def test_faults_of_a_host_stay_until_they_are_gone() -> None:
    hot = {"kind": "host_faults", "host": "n1", "faults": [{"what": "GPU 0 hot", "text": "hot"}]}
    well = {"kind": "host_faults", "host": "n1", "faults": []}
    run = summarized([well, hot])
    assert run.faults == {"n1": ["hot"]}
    assert [warning.text for warning in run.warnings] == ["host n1: hot"]
    rows = dict(status_rows(run, "running", None, "", 0.0))
    assert rows["hardware"] == "n1: hot"
    assert summarized([hot, well]).faults == {}
    others = {"kind": "hosts_changed", "hosts": [["n2", 1]]}
    assert summarized([hot, others]).faults == {}


def test_a_diverged_loss_stays_visible() -> None:
    events = [
        {"t": 0.0, "kind": "metrics", "step": 1, "loss": 2.0, "note": "text", "flag": True},
        {"t": 1.0, "kind": "metrics", "step": 2, "loss": None},
    ]
    run = summarized(events)
    assert run.series["loss"].values[0] == 2.0
    assert math.isnan(run.series["loss"].values[1])
    assert run.user_metrics == ["note", "flag"]
    assert "note" not in run.series


def test_odd_fields_do_not_break_it() -> None:
    run = summarized(
        [
            {"kind": "metrics"},
            {"t": "x", "kind": "rescale_started"},
            {"t": 1.0, "kind": "hosts_changed", "hosts": [["n1"], "n2", ["n3", 2]]},
            {"t": 1.0, "kind": "checkpoint", "step": 10**400},
            {"t": 1.0, "kind": "unheard of"},
        ]
    )
    assert run.misfits == 4


LEFT_OUT = " left out, of a kind or with fields that this version does not know"
VALUES = st.none() | st.booleans() | st.text(max_size=2) | st.floats(allow_nan=True) | st.integers()
FIELDS = st.dictionaries(
    st.sampled_from(["step", "loss", "lr", "throughput", "data_wait", "global_batch_size", "a"]),
    VALUES,
)
METRICS = st.builds(
    lambda t, fields: {"t": t, "mono": 0.0, "kind": "metrics", **fields},
    st.floats(0, 100),
    st.just({"step": 3, "loss": 0.5, "throughput": 2.0, "data_wait": 0.25}) | FIELDS,
)


@given(st.lists(METRICS | st.just({"t": 9.0, "kind": "warning", "message": "w"}), max_size=40))
def test_events_that_are_taken_together_tell_the_same(events: list[dict[str, Any]]) -> None:
    events = [{"t": 0.0, "kind": "run_started"}, *events]
    one_by_one, together = RunSummary(), RunSummary()
    for event in events:
        take_events(one_by_one, [made(event)])
    take_events(together, made_all(events))
    expected, found = asdict(one_by_one), asdict(together)
    for told in (expected, found):  # in any order
        for name in ("last", "series"):
            told[name] = sorted(told[name].items())
        told["user_metrics"].sort()
    spent = expected.pop("spending"), found.pop("spending")
    assert repr(found) == repr(expected)  # NaN is not equal to itself
    for cause, times in spent[0]["by_cause"].items():
        assert spent[1]["by_cause"][cause] == pytest.approx(times)


@pytest.mark.parametrize(
    "misfit",
    [
        {"kind": "hosts_changed", "hosts": 5},
        {"kind": "hosts_changed", "hosts": [["n1", "many"]]},
        {"kind": "rescale_started", "generation": "x", "hosts": 5},
        {"kind": "host_sample", "host": "n1", "gpus": 1},
        {"kind": "batch_plan", "limits": [1]},
        {"kind": "shares", "shares": {"a": 1}},
    ],
)
def test_an_event_that_is_not_of_its_kind_is_left_out_and_counted(misfit: dict[str, Any]) -> None:
    narrator = Narrator()
    events = [{"t": 0.0, "kind": "run_started"}, {"t": 1.0, **misfit}]
    events.append({"t": 2.0, "kind": "metrics", "step": 7, "throughput": 1.0})
    run = summarized(events)
    assert (run.misfits, run.steps) == (1, 7)
    assert f"1 event{LEFT_OUT}." in run_sentences(run, "running")
    assert [line for event in events for line in narrator.tell(made(event))]


def event(t: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "kind": kind, **fields}


def began(t: float, generation: int, from_size: int, to_size: int) -> list[dict[str, Any]]:
    """Events of a rescale whose first step ends after 2 s."""
    sizes = {"from_size": from_size, "to_size": to_size}
    return [
        event(t, "rescale_started", generation=generation, **sizes),
        event(t + 2, "rescale_finished", generation=generation, size=to_size, pause_s=None),
    ]


def trains(begin: int, end: int) -> list[dict[str, Any]]:
    return [event(t, "metrics", step=t, throughput=1.0) for t in range(begin, end + 1)]


def seconds(run: RunSummary) -> dict[str, float]:
    return {cause: spent.seconds for cause, spent in run.spending.by_cause.items() if spent.seconds}


TRAINED = [event(0.0, "run_started"), *began(8.0, 1, 0, 2), *trains(11, 100)]


def test_after_a_takeover_training_is_no_start_up() -> None:
    taken = [event(110.0, "run_started"), event(112.0, "taken_over", size=2)]
    lost = [*trains(113, 200), event(201.0, "host_lost", host="n1"), *began(203.0, 2, 0, 2)]
    run = summarized([*TRAINED, *taken, *lost])
    assert seconds(run) == {"start-up": 10.0, "failures": 5.0}
    assert run.sizes == [(10.0, 2), (200.0, 0), (205.0, 2)], "they trained on without a leader"


def test_an_outage_of_the_only_host_is_a_failure_since_training_was_last_heard_of() -> None:
    run = summarized([*TRAINED, event(107.0, "host_lost", host="n1"), *began(128.0, 2, 0, 2)])
    assert seconds(run) == {"start-up": 10.0, "failures": 30.0}


def test_the_time_before_a_resume_without_processes_is_not_training() -> None:
    ended = [event(101.0, "run_finished", status="failed"), event(111.0, "run_started")]
    run = summarized([*TRAINED, *ended, *began(118.0, 1, 0, 2), *trains(121, 200)])
    assert seconds(run) == {"start-up": 19.0, "interruption": 10.0}
    throughput = run.series["throughput"]
    gap = [
        at for at, value in zip(throughput.at_s, throughput.values, strict=True) if value != value
    ]
    assert gap == [101.0], "no line is drawn through it"
    assert run.sizes == [(10.0, 2), (101.0, 0), (120.0, 2)]


def test_metrics_that_arrive_late_belong_to_the_time_when_they_were_measured() -> None:
    late = [
        event(150.0, "metrics", step=t, throughput=2.0, late_s=150.0 - t) for t in range(101, 150)
    ]
    run = summarized([*TRAINED, *late, *trains(150, 160)])
    throughput = run.series["throughput"]
    assert list(throughput.at_s) == [float(t) for t in range(11, 161)]
    assert "late_s" not in run.series
    assert run.user_metrics == []
    assert run.spending.by_cause["input"].seconds == 0


def test_a_plain_command_runs_as_soon_as_its_process_does() -> None:
    told = [
        {"t": 0.0, "kind": "run_started", "run_id": "sleep-1", "hosts": [["n1", 1]], "plain": True},
        {"t": 1.0, "kind": "waiting", "reason": "starting the command on n1"},
        {"t": 2.0, "kind": "worker_started", "host": "n1", "local_rank": 0},
    ]
    summary = summarized(told)
    assert (summary.plain, summary.waiting, summary.size) == (True, "", 1)


def test_hosts_of_a_large_run_that_sample_less_often_are_present() -> None:
    hosts = [f"n{number}" for number in range(400)]
    samples = [
        {"t": 2.0 + at + number / 4, "kind": "host_sample", "host": host}
        for at in (0, 100, 200)
        for number, host in enumerate(hosts)
    ]
    run = summarized(
        [
            {"t": 0.0, "kind": "run_started", "hosts": [[host, 1] for host in hosts]},
            {"t": 1.0, "kind": "rescale_finished", "generation": 1, "size": 400},
            *samples[:-1],  # the last host is just about to send its next one
        ]
    )
    assert list(run.present_use("running")) == hosts


def test_after_a_resume_the_earlier_reason_to_wait_is_gone() -> None:
    waits = {"t": 1.0, "kind": "waiting", "reason": "waiting for host n2"}
    run = summarized([{"t": 0.0, "kind": "run_started"}, waits, {"t": 9.0, "kind": "run_started"}])
    assert run.waiting == ""
