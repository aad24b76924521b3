from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.errors import RunError
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.run_row import run_row
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.run_events import Metrics
from hvd_elastic.views import live_run, page
from hvd_elastic.views.comparison import write_comparison
from hvd_elastic.views.live_run import LiveRun
from hvd_elastic.views.page import MAX_POINTS, downsample, summarize_for_plots
from hvd_elastic.views.report import render_report, write_report
from tests.unit.records.made_events import summarized, whole, write
from tests.unit.records.sample_run import sample_events, sample_folder

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


def payload(page: str) -> dict[str, object]:
    found = re.search(
        r'<script type="application/json" id="run-data">(.*?)</script>', page, re.DOTALL
    )
    assert found is not None
    data = json.loads(found.group(1))
    assert isinstance(data, dict)
    return data


def test_a_report_has_plots_marks_tables_and_verdict(tmp_path: Path) -> None:
    result = write_report(sample_folder(tmp_path))
    assert result.path == tmp_path / "digits-3" / "report.html"
    page = result.path.read_text(encoding="utf-8")
    data = payload(page)
    charts = data["charts"]
    assert isinstance(charts, list)
    assert [chart["name"] for chart in charts] == ["size", "throughput", "loss", "accuracy"]
    marks = data["marks"]
    assert isinstance(marks, list)
    assert [mark["way"] for mark in marks] == ["up", "down", "down", "up"]
    assert "each of 1437 examples (by index) used exactly once in each of 12 epochs" in page
    assert "host node3 joined: 2 → 3 slots" in page
    assert "python train.py --epochs 12" in page
    assert '<th class="n">training waited</th>' in page
    assert ">1.8 ms</td>" in page
    assert "Permission is hereby granted" in page  # uPlot's licence goes with its code


@pytest.mark.parametrize(
    "state_of",
    [
        lambda run: run_row(run)["status"],
        lambda run: write_report(run).summary.status,
        lambda run: write_comparison([run], run.path / "c.html")[0].status,
        lambda run: LiveRun(run).state(),
    ],
    ids=["list", "report", "comparison", "live"],
)
def test_a_run_that_ends_while_it_is_looked_at_has_not_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_of: Callable[[RunFolder], str]
) -> None:
    run = sample_folder(tmp_path)
    *begin, end = run.events.read_bytes().splitlines(keepends=True)
    assert b"run_finished" in end
    run.events.write_bytes(b"".join(begin))

    def ends(_: RunFolder) -> bool:
        run.events.write_bytes(b"".join([*begin, end]))
        return False

    monkeypatch.setattr(RunFolder, "leader_alive", ends)
    assert state_of(run) == "succeeded"


def test_a_live_run_that_was_just_read_and_has_ended_has_not_died(tmp_path: Path) -> None:
    run = sample_folder(tmp_path)
    whole = run.events.read_bytes()
    run.events.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    live = LiveRun(run)
    live.read()
    run.events.write_bytes(whole)
    assert live.state() == "succeeded"


def test_another_run_with_the_id_of_a_removed_one_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_run, "_FRESH_S", 0.0)
    live = LiveRun(sample_folder(tmp_path))
    assert live.render()["live"].startswith("succeeded")
    shutil.rmtree(live.folder.path)
    other = sample_folder(tmp_path, epochs=20, status="running")
    with other.take_lead():
        found = live.render()
        assert found["live"].startswith("running")
        assert live.read().steps == 460
        assert found["html"] == LiveRun(other).render()["html"]


def test_the_audit_of_a_live_page_is_that_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_run, "_FRESH_S", 0.0)
    run = sample_folder(tmp_path)
    audit = run.audit.read_text().splitlines(keepends=True)
    events = run.events.read_text().splitlines(keepends=True)
    live = LiveRun(run)

    def shown() -> str:
        sentence = write_report(run).audit.sentence()
        html = live.render()["html"]
        assert sentence in html["audit"]
        return sentence

    # It is stopped within its last epoch, resumed, and succeeds.
    stopped = json.dumps({**json.loads(events[-1]), "status": "stopped", "epochs": 11})
    run.audit.write_text("".join(audit[:-20]))
    run.events.write_text("".join([*events[:-1], stopped, "\n"]))
    assert "in each of 12 epochs" not in shown()
    run.audit.write_text("".join(audit))
    with run.events.open("a") as file:
        file.write(events[0] + events[-1])
    assert shown() == "each of 1437 examples (by index) used exactly once in each of 12 epochs"
    # The records of its last step are lost.
    last = [line for line in audit if json.loads(line).get("step") != 276]
    run.audit.write_text("".join(last))
    assert "of 1 step not recorded" in shown()


def test_a_batch_that_adapts_has_a_panel_and_tiles_that_mean_something() -> None:
    limits = {"initial_batch_size": 64, "max_batch_size": 512}
    metrics = {"kind": "metrics", "epoch": 0, "noise_scale": 300.0, "efficiency": 0.9,
               "passes": 218, "rank_s": [0.1]}  # fmt: skip
    events = [
        {"t": 0.0, "kind": "run_started", "run_id": "a", "hosts": [["n1", 2]]},
        {"t": 1.0, "kind": "batch_plan", "global_batch_size": 64, "limits": limits},
        {**metrics, "t": 1.0, "step": 1, "global_batch_size": 64},
        {"t": 2.0, "kind": "batch_plan", "global_batch_size": 128, "lr_scale": 1.7,
         "limits": limits, "reason": "there is noise"},
        {**metrics, "t": 2.0, "step": 2, "global_batch_size": 128},
        {"t": 3.0, "kind": "prediction_missed", "reason": "777 were predicted"},
        *({"t": t, "kind": "metrics", "step": 3, "global_batch_size": 128} for t in (3.0, 4.0)),
    ]  # fmt: skip
    page = render_report(summarized(events), check_audit([]))
    charts = payload(page)["charts"]
    assert isinstance(charts, list)
    assert [chart["name"] for chart in charts] == ["global_batch_size", "noise_scale", "efficiency"]
    assert charts[0]["y"] == [64, 128, 128, 128]
    assert charts[1]["y"] == [300, 300, None], "no line is drawn where nothing is known"
    assert "<h2>Batch</h2>" in page
    assert "relative to one in a batch of 64" in page
    assert "<b>128</b><span>batch, 64 at first</span>" in page
    assert "<span>passes over data</span>" in page
    assert "<span>passes</span>" not in page
    assert "batch 64 → 128 examples, learning rate x 1.7: there is noise" in page
    assert "prediction missed: 777 were predicted" in page


def test_a_report_fetches_nothing(tmp_path: Path) -> None:
    page = write_report(sample_folder(tmp_path)).path.read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)
    assert "@import" not in page
    assert "fetch(" not in page


def test_text_of_others_cannot_become_markup() -> None:
    evil = "</script><script>alert(1)</script><img src=x>"
    events = [
        {"t": 0.0, "kind": "run_started", "run_id": evil, "hosts": [[evil, 1]]},
        {"t": 1.0, "kind": "rescale_started", "generation": 2, "from_size": 1, "to_size": 2,
         "reason": evil},
        {"t": 2.0, "kind": "metrics", "step": 1, evil: 3.0},
        {"t": 2.0, "kind": "script_failed", "host": evil, "local_rank": 0, "traceback": evil},
        {"t": 2.0, "kind": "decision", "action": "stay", "reason": "$title ${body}"},
        {"t": 2.0, "kind": "run_finished", "status": "failed", "message": evil},
    ]  # fmt: skip
    page = render_report(summarized(events), check_audit([]), asked={"command": [evil]})
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "$title ${body}" in page
    assert page.count("</script>") == 3


def test_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    folder = RunFolder.create("a", root=tmp_path)
    with pytest.raises(RunError, match="no events yet"):
        write_report(folder)
    begun = json.dumps(whole({"t": 1.0, "kind": "run_started", "run_id": "a"}))
    folder.events.write_text(begun + '\n{"t":2.0,"ki')
    result = write_report(folder)
    assert result.summary.status == "died"
    page = result.path.read_text(encoding="utf-8")
    assert "No metrics were recorded" in page
    assert "not audited" in page


def test_a_diverged_loss_and_an_unwritable_place(tmp_path: Path) -> None:
    folder = RunFolder.create("a", root=tmp_path)
    told = {"kind": "metrics", "loss": 1.0}
    lines = [whole({**told, "t": float(i), "step": i}) for i in range(3)]
    lines[1]["loss"] = None
    folder.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    charts = payload(write_report(folder).path.read_text())["charts"]
    assert isinstance(charts, list)
    assert charts[0]["y"] == [1.0, None, 1.0]
    with pytest.raises(RunError, match=r"cannot write the report to .*--out"):
        write_report(folder, tmp_path / "missing" / "r.html")


def test_a_long_run_stays_small() -> None:
    events = sample_events(epochs=800)
    page = render_report(summarized(events), check_audit([]))
    charts = payload(page)["charts"]
    assert isinstance(charts, list)
    assert all(len(chart["x"]) <= MAX_POINTS for chart in charts)
    assert len(page) < 600_000


def test_an_empty_summary_can_be_rendered() -> None:
    assert "<main>" in render_report(RunSummary(run_id="a"), check_audit([]))


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=300),
    st.integers(4, 60),
)
def test_downsampling_keeps_ends_and_extremes(values: list[float], max_points: int) -> None:
    x = [float(place) for place in range(len(values))]
    few_x, few_y = downsample(x, values, max_points)
    assert len(few_x) == len(few_y) <= max(max_points, 4)
    assert few_x == sorted(set(few_x))
    assert (few_x[0], few_x[-1]) == (x[0], x[-1])
    finite = [value for value in values if value == value]
    kept = [value for value in few_y if value == value]
    if finite:
        assert (min(kept), max(kept)) == (min(finite), max(finite))
    assert all(few_y[i] is values[int(few_x[i])] for i in range(len(few_x)))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to render the report with")
@pytest.mark.parametrize("scheme", ["0", "1"], ids=["dark", "light"])
def test_a_browser_draws_every_plot(tmp_path: Path, scheme: str) -> None:
    path = write_report(sample_folder(tmp_path)).path
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
            f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1120,2300",
            "--enable-logging=stderr", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    dom = done.stdout
    assert 'data-plots="4"' in dom, done.stderr[-2000:]
    assert dom.count("<canvas") == 4
    assert dom.count("<summary>Data</summary>") == 4
    assert "at most 3" in dom  # the readout of the first plot is filled in by the script
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]


def test_runs_are_compared_in_one_page(tmp_path: Path) -> None:
    folders = [sample_folder(tmp_path, name) for name in ("first", "second")]
    path = tmp_path / "both.html"
    found = write_comparison([folders[0], folders[1]], path)
    assert [summary.run_id for summary in found] == ["first", "second"]
    page = path.read_text(encoding="utf-8")
    charts = payload(page)["charts"]
    assert isinstance(charts, list)
    assert [chart["name"] for chart in charts] == ["size", "throughput", "loss", "accuracy"]
    for chart in charts:
        (other,) = chart["more"]
        assert len(chart["x"]) == len(chart["y"]) == len(other["y"])
        assert other["y"] == chart["y"]  # the runs have equal events
    assert '<span class="key-loss">second</span>' in page


def test_a_run_that_trains_on_without_a_leader_has_not_died(tmp_path: Path) -> None:
    run = RunFolder.create("a", {"leader_grace_s": 3600.0}, root=tmp_path)
    with EventLog(run.events) as log:
        write(log, "run_started", {"run_id": "a"})
    (found,) = write_comparison([run], tmp_path / "c.html")
    assert found.status == write_report(run).summary.status == "leaderless"
    with EventLog(run.events) as log:
        write(log, "waiting", {"reason": "waiting for host n2"})
    with run.take_lead():
        (found,) = write_comparison([run], tmp_path / "c.html")
        assert found.status == write_report(run).summary.status == "waiting"


def test_a_run_without_events_is_not_compared(tmp_path: Path) -> None:
    empty = RunFolder.create("empty", root=tmp_path)
    with pytest.raises(RunError, match="run empty has no events yet"):
        write_comparison([sample_folder(tmp_path), empty], tmp_path / "both.html")
    assert not (tmp_path / "both.html").exists()


def test_of_a_long_run_few_points_are_held_with_its_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "KEPT_POINTS", 1000)

    def events() -> Iterator[Metrics]:
        for step in range(1, 100_001):
            loss = 50.0 if step == 44_444 else 1.0
            yield Metrics(step, 0, 0, 0, 1, t=float(step), values={"loss": loss})

    summary = summarize_for_plots(events())
    held = summary.series["loss"]
    assert summary.steps == 100_000
    assert summary.duration_s == 99_999
    assert len(held.values) == len(held.at_s) < 2000 + page._TOGETHER
    assert max(held.values) == 50.0
    assert held.at_s[-1] == 99_999
