"""What a run's time went to, when it ends, and how its hosts are, from events."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.replay import Replay
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.records.summary import RunSummary, summarize
from hvd_elastic.records.wording import READING, status_rows
from hvd_elastic.run_events import HostSample
from hvd_elastic.views.allocation import host_rows, hosts_section
from hvd_elastic.views.costs import cost_so_far, forecast_words, predict_end, time_section
from hvd_elastic.views.prometheus import prometheus_text
from hvd_elastic.views.report import render_report
from tests.checked_events import check_event
from tests.unit.records.made_events import summarized


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[Replay]:
    run = Replay(tmp_path, "a", start=time.time())
    run.begin("node1", "node2")
    yield run
    run.close()


def summary_of(run: Replay) -> RunSummary:
    run.flush()
    return summarize(run.folder.iter_events())


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def test_each_second_has_one_cause(replay: Replay) -> None:
    replay.train(100)
    replay.join("node3")
    replay.train(100)
    replay.kill("node2")
    replay.train(50)
    replay.lose("node3")
    replay.train(50)
    summary = summary_of(replay)
    spent = summary.spending.by_cause
    assert spent["start-up"].seconds == pytest.approx(7.0)
    assert spent["rescales"].seconds == pytest.approx(0.14)
    assert spent["rescales"].slot_s == pytest.approx(4 * 0.14), "the four that were there waited"
    assert spent["failures"].seconds == pytest.approx(0.38 + 5.6)
    assert spent["failures"].slot_s == pytest.approx(5 * 0.38 + 3 * 5.6), "the survivors waited"
    assert spent["failures"].money == pytest.approx(0.38 * 2.15 / 3600 + 5.6 * 1.8 / 3600, rel=0.01)
    assert spent["input"].seconds == pytest.approx(300 * 0.012, rel=0.1)
    assert spent["communication"].seconds == pytest.approx(300 * 0.085, rel=0.1)
    html = time_section(summary)
    parts = [float(part) for part in re.findall(r">([0-9.]+)%</td>", html)]
    assert sum(parts) == pytest.approx(100, abs=0.5)
    assert "communication" in html
    assert cost_so_far(summary) == pytest.approx((306 * 1.8 + 156 * 0.35) / 3600, rel=0.02)


def test_work_that_is_done_again_counts_as_failure(replay: Replay) -> None:
    replay.train(30)
    replay.add("checkpoint", step=replay.step, path="c", bytes=1, seconds=0.1, blocked_s=0.0)
    saved = replay.step
    replay.train(20)
    replay.add("restored", step=saved, epoch=0, position=0, examples=9, path="c")
    lost = summary_of(replay).spending.by_cause["failures"].seconds
    assert lost == pytest.approx(20, abs=0.5)


def test_the_time_to_go_and_its_range(replay: Replay) -> None:
    replay.train(5)
    assert predict_end(summary_of(replay)) is None, "too early to tell"
    replay.train(1200)
    replay.join("node3")
    replay.train(400)
    summary = summary_of(replay)
    end = predict_end(summary)
    assert end is not None
    rate = 6 * 900 * (1 + 256 / 8192)
    left_s = (replay._whole - replay.examples) / rate
    assert end.low_s < left_s < end.high_s
    assert end.left_s == pytest.approx(left_s, rel=0.15)
    assert end.money_left == pytest.approx(end.left_s * 2.15 / 3600)
    words = forecast_words(summary, 0.42, end)
    assert re.match(r"\d+% done; .* to go \(.* to .*\), if hosts and speed stay", words)
    assert "so far" in words


def test_after_a_return_to_a_checkpoint_only_what_follows_counts() -> None:
    def told(t: float, done: float) -> dict[str, Any]:
        return {"t": t, "kind": "metrics", "step": 1, "done": done}

    fast = [told(t, t / 200) for t in range(1, 101)]
    slow = [told(100 + t, 0.1 + t / 1000) for t in range(1, 101)]
    end = predict_end(summarized([{"t": 0.0, "kind": "run_started"}, *fast, *slow]))
    assert end is not None
    assert end.left_s == pytest.approx(800, rel=0.01)
    still = [told(200 + t, 0.2) for t in range(1, 101)]
    start = [{"t": 0.0, "kind": "run_started"}]
    assert predict_end(summarized([*start, *slow, *still])) is None, "nothing moves: no forecast"
    uneven = [told(t, (t // 60) * 60 / 1000) for t in range(1, 301)]
    end = predict_end(summarized([*start, *uneven]))
    assert end is not None
    assert math.isinf(end.high_s)


def test_the_table_of_hosts_tells_who_is_slow_who_leaves_and_who_is_lost(replay: Replay) -> None:
    for name in ("node3", "node4"):
        replay.join(name)
    replay.slow["node2"] = 1.6
    replay.train(12)
    replay.lose("node4")
    replay.add("host_draining", host="node3", cause="asked", leave_in_s=None, asked=True)
    replay.add("host_faults", host="node1", faults=[{"what": "GPU 0 lost", "text": "it fell off"}])
    html = hosts_section(summary_of(replay))
    rows = {name: text_of(row) for name, row in re.findall(r"(node\d)</td>(.*?)</tr>", html)}
    assert rows["node1"].startswith(" unhealthy 2 of 2 33%")
    assert rows["node2"].startswith(" slow: 1.6 x 2 of 2 33%")
    assert rows["node3"].startswith(" leaves 2 of 2 33%")
    assert rows["node4"].startswith(" lost 0 of 2")
    assert re.search(r"\d+ ms \d+% \d+% \d+%, \d+% [\d.]+ MB/s, [\d.]+ MB/s", rows["node1"])
    replay.train(100)
    told = replay.folder.iter_events()
    stale = [event for event in told if not isinstance(event, HostSample)]
    assert " ms " not in text_of(hosts_section(summarize(stale)))


def test_hosts_are_told_to_prometheus_while_they_are_there(replay: Replay) -> None:
    replay.join("node3")
    replay.train(12)
    replay.lose("node3")
    replay.train(70)
    text = prometheus_text([(summary_of(replay), "running")])
    assert re.search(r'hvd_elastic_host_cpu_ratio\{run="a",host="node1"\} 0\.\d+', text)
    assert "node3" not in text
    assert "hvd_elastic_done_ratio" in text
    promtool = shutil.which("promtool")
    if promtool is not None:
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_run_that_has_ended_has_no_speed_for_prometheus(replay: Replay) -> None:
    replay.train(12)
    trains = summary_of(replay)
    end = {"t": time.time() + 99, "kind": "run_finished", "status": "failed", "steps": 9}
    ended = summarized([*read_records(replay.folder.events), end])
    rate = "hvd_elastic_throughput_examples_per_second{"
    assert rate in prometheus_text([(trains, "running")])
    assert rate not in prometheus_text([(ended, "failed")])
    assert "hvd_elastic_steps_total{" in prometheus_text([(ended, "failed")])


def test_the_replay_writes_events_as_they_are_defined(replay: Replay) -> None:
    replay.join("node3")
    replay.train(20)
    replay.lose("node3")
    replay.grow_batch(512)
    replay.flush()
    for event in read_records(replay.folder.events):
        check_event(event)


@pytest.mark.parametrize("stopped", [True, False])
def test_hosts_cost_nothing_between_the_end_of_a_run_and_its_resume(stopped: bool) -> None:
    def trains(t: float, generation: int) -> list[dict[str, Any]]:
        hosts = {"hosts": [["n", 2]], "prices": {"n": 3.6}}
        rescale = {"generation": generation, "from_size": 0, "to_size": 2}
        return [
            {"t": t, "kind": "run_started", "run_id": "a"},
            {"t": t, "kind": "hosts_changed", **hosts},
            {"t": t + 5, "kind": "rescale_started", "hosts": ["n"], "slots": [2], **rescale},
            {"t": t + 6, "kind": "rescale_finished", "size": 2, **rescale},
            {"t": t + 56, "kind": "metrics", "step": 50 * generation, "throughput": 1.0},
        ]

    end = {"t": 56.0, "kind": "run_finished", "run_id": "a", "status": "stopped", "steps": 50}
    events = [*trains(0.0, 1), *[end] * stopped, *trains(100_000.0, 2)]
    summary = summarized(events)
    spent = summary.spending.by_cause["start-up"]
    assert (spent.seconds, spent.slot_s, spent.money) == pytest.approx((12.0, 24.0, 0.012))
    between = summary.spending.by_cause["interruption"]
    assert (between.seconds, between.slot_s) == pytest.approx((100_000.0 - 56.0, 0.0))
    # Hosts are paid for from the beginning of a rescale.
    assert cost_so_far(summary) == pytest.approx(2 * 51 * 0.001)


TRAINED: list[dict[str, Any]] = [
    {"t": 0.0, "kind": "run_started", "run_id": "a", "hosts": [["a", 1], ["b", 1]]},
    {"t": 1.0, "kind": "rescale_started", "generation": 1, "from_size": 0, "to_size": 2,
     "hosts": ["a", "b"], "slots": [1, 1]},
    {"t": 2.0, "kind": "rescale_finished", "generation": 1, "size": 2},
    {"t": 3.0, "kind": "metrics", "step": 5, "throughput": 812.4, "done": 0.5},
    {"t": 3.0, "kind": "host_sample", "host": "a", "cpu": 0.5},
    {"t": 4.0, "kind": "host_lost", "host": "b", "cause": "no answer"},
    {"t": 5.0, "kind": "waiting", "reason": "waiting for host b"},
]  # fmt: skip
"""A run that trained on two hosts, lost one, and waits."""


@pytest.mark.parametrize("state", ["waiting", "died"])
def test_a_run_that_waits_or_has_died_is_not_shown_as_training(state: str) -> None:
    run = summarized(TRAINED)
    text = prometheus_text([(run, state)])
    assert 'hvd_elastic_slots{run="a"} 0\n' in text
    assert 'hvd_elastic_steps_total{run="a"} 5\n' in text
    assert "throughput" not in text
    assert "host_cpu" not in text
    assert dict(status_rows(run, state, None, "", 9.0))["progress"] == "step 5 · epoch 0"
    assert host_rows(run, state) == []
    run.status = state
    assert run.as_json()["size"] == 0
    html = render_report(run, check_audit(()))
    assert ">trains<" not in html
    assert ('class="state bad">lost<' in html) == (state == "waiting")


def test_figures_of_a_run_whose_events_are_still_being_read_are_not_told() -> None:
    told = prometheus_text([(summarized(TRAINED), READING)])
    assert [line for line in told.splitlines() if not line.startswith("#")] == [
        'hvd_elastic_run_info{run="a",state="reading"} 1'
    ]
