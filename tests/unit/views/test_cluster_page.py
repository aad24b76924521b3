"""The picture of a cluster that many jobs share, in its report and on the first live page."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hvd_elastic.cli.app import app
from hvd_elastic.errors import RunError
from hvd_elastic.records.cluster import summarize_cluster
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.views import live
from hvd_elastic.views.cluster_page import (
    LiveClusters,
    job_color,
    render_cluster,
    slots_picture,
    write_cluster_report,
)
from hvd_elastic.views.server import Dashboard
from tests.unit.records.test_cluster import events


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cluster with the events of the sample."""
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    folder = tmp_path / "clusters" / "gpus"
    folder.mkdir(parents=True)
    lines = [json.dumps({"mono": 0.0, **record}) for record in events()]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def bars(page: str) -> list[tuple[str, list[float]]]:
    """Colour of each bar with x, y, width and height."""
    found = re.findall(
        r'<rect fill="([^"]*)" x="([^"]*)" y="([^"]*)" width="([^"]*)" height="([^"]*)">', page
    )
    return [(color, [float(number) for number in numbers]) for color, *numbers in found]


def test_the_picture_has_a_bar_for_each_job_and_host_that_never_overlap() -> None:
    summary = summarize_cluster(events(), "gpus")
    page = render_cluster(summary)
    found = bars(page)
    colors = {job_color(job) for job in list(summary.jobs.values())[:2]}
    assert {color for color, _ in found} == colors
    assert len(colors) == 2
    assert len(found) == 4
    for number, (_, (x, y, width, height)) in enumerate(found):
        assert x >= 0
        assert x + width <= 1000.1
        for _, (x2, y2, width2, height2) in found[number + 1 :]:
            apart_x = x + width <= x2 + 0.1 or x2 + width2 <= x + 0.1
            assert apart_x or y + height <= y2 + 0.1 or y2 + height2 <= y + 0.1
    assert "Jobs that wait, 1 at most, 1 at the end" in page
    assert "long: all alone" in page, "a mark has the reason of the decision"
    assert "short" in page
    assert "needs 9 slots" in page
    # 4 slots for 1 to 11 s, 4 for 11 to 15, 2 to 17, 3 to 20, and 2 to 21.
    used = round(100 * (4 * 14 + 2 * 2 + 3 * 3 + 2) / (4 * 21))
    assert f"{used} % of the slots were in use" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_names_of_jobs_cannot_be_html() -> None:
    made = [dict(record) for record in events()]
    made[1]["name"] = "<script>alert(1)</script>"
    assert "<script>alert(1)" not in render_cluster(summarize_cluster(made, "gpus"))


def test_the_command_writes_the_report_and_says_what_is_missing(cluster: Path) -> None:
    done = CliRunner().invoke(app, ["report", "--cluster", "gpus", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert Path(found["path"]) == cluster / "report.html"
    assert [job["status"] for job in found["jobs"]] == ["running", "succeeded", "queued"]
    assert bars((cluster / "report.html").read_text())
    told = CliRunner().invoke(app, ["report", "--cluster"])
    assert "3, 1 of them over" in told.output
    with pytest.raises(RunError, match=r"no cluster 'cpus'.*there is: gpus"):
        write_cluster_report("cpus")
    (cluster / "events.jsonl").write_text("")
    with pytest.raises(RunError, match="has had no jobs yet"):
        write_cluster_report("gpus")


@pytest.fixture
def server(cluster: Path) -> Iterator[Dashboard]:
    dashboard = Dashboard("127.0.0.1", 0)
    thread = threading.Thread(target=dashboard.serve_forever, daemon=True)
    thread.start()
    yield dashboard
    dashboard.shutdown()
    dashboard.server_close()
    thread.join()


def test_the_first_live_page_shows_the_cluster_and_follows_it(
    server: Dashboard, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_FRESH_S", 0.0)
    RunFolder.create("long-1")
    before = server.runs.render()["html"]["clusters"]
    assert len(bars(before)) == 4
    assert '<a href="/runs/long-1">long</a>' in before
    assert "its daemon does not run" in before
    with EventLog(cluster / "events.jsonl") as log:
        log.append("job_finished", {"job": 1, "status": "failed", "message": "out of memory"})
    after = server.runs.render()["html"]["clusters"]
    assert "out of memory" in after
    assert "1 failed" in after


def test_a_cluster_without_events_is_not_shown(cluster: Path) -> None:
    (cluster / "events.jsonl").unlink()
    assert LiveClusters().render() == ""


def test_a_job_that_runs_is_shown_whatever_came_later_and_the_newest_decision_first() -> None:
    told = [{"t": 0.0, "kind": "cluster_hosts", "hosts": {"a": 2}}]
    for number in range(300):
        fields = {"job": number, "name": f"j{number}", "command": ["true"], "min_np": 1}
        told.append({"t": number, "kind": "job_submitted", **fields})
    held = {"0": {"a": 1}}
    told.append({"t": 300.0, "kind": "job_started", "job": 0, "run_id": "j0-0"})
    for number in (1, 2):
        reasons = {"0": f"decision {number}"}
        held = {"0": {"a": number}}
        decided = {"kind": "jobs_decided", "allocations": held, "reasons": reasons}
        told.append({"t": 300.0 + number, **decided})
    ended = {"t": 400.0, "kind": "job_finished", "status": "failed"}
    told += [{**ended, "job": number} for number in range(1, 300)]
    page = render_cluster(summarize_cluster(told, "gpus"))
    rows = re.findall(r'<td class="n">(\d+)</td><td class="job">', page)
    assert (rows[0], len(rows)) == ("0", 200)
    assert page.count('<span class="pill bad">failed') == 199, "as in the table of runs"
    decisions = page.partition("<h2>Decisions")[2]
    assert decisions.index("decision 2") < decisions.index("decision 1")


def test_a_job_that_still_runs_is_drawn_however_many_began_after_it() -> None:
    def submitted(number: int) -> dict[str, Any]:
        return {"t": 0.0, "kind": "job_submitted", "job": number, "name": f"j{number}"}

    def decided(at_s: float, held: dict[str, dict[str, int]]) -> dict[str, Any]:
        return {"t": at_s, "kind": "jobs_decided", "allocations": held, "reasons": {}}

    told = [{"t": 0.0, "kind": "cluster_hosts", "hosts": {"a": 8, "b": 2}}]
    told += [submitted(number) for number in range(11)]
    told += [decided(10.0 * n, {"0": {"a": 8}, f"{n}": {"b": 1}}) for n in range(1, 11)]
    told.append(decided(110.0, {"0": {"a": 8}}))
    picture = slots_picture(summarize_cluster(told), 110.0, most_bars=5)
    assert "<title>j0: 8 slots on a for 1 m 40 s</title>" in picture
    assert "<title>j5:" not in picture
    assert "<title>j6: 1 slot on b" in picture
    assert " 90 % of the slots were in use" in picture


def test_hosts_count_while_they_are_there() -> None:
    told = [
        {"t": 0.0, "kind": "cluster_hosts", "hosts": {"h1": 8}},
        {"t": 0.0, "kind": "job_submitted", "job": 1, "name": "one"},
        {"t": 0.0, "kind": "jobs_decided", "allocations": {"1": {"h1": 8}}},
        {"t": 100.0, "kind": "cluster_hosts", "hosts": {"h2": 8}},
        {"t": 100.0, "kind": "jobs_decided", "allocations": {"1": {"h2": 8}}},
    ]
    full = slots_picture(summarize_cluster(told), 200.0)
    assert " 100 % of the slots were in use" in full
    told[3]["hosts"] = {"h2": 8, "idle": 8}
    told.append({"t": 150.0, "kind": "cluster_hosts", "hosts": {"h2": 8}})
    assert " 80 % of the slots were in use" in slots_picture(summarize_cluster(told), 200.0)
