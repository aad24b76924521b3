"""What the benchmarks make of what they saw; the seconds themselves are nobody's assertion."""

from __future__ import annotations

import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.cluster.faults import Seen, faults_result
from benchmarks.cluster.many import Grown, Memory, fit_growth, many_result
from benchmarks.elasticity.command import main as elasticity_main
from benchmarks.elasticity.startup import PHASES, phases_of, startup_result
from benchmarks.testbed.figures import Result, conditions, figure, summary
from benchmarks.testbed.launchers import ELASTIC, LAUNCHERS
from benchmarks.testbed.marks import Process, Step

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"
KEPT = [path for path in RESULTS.glob("*.json") if ".raw." not in path.name]


COMPARISON = re.compile(
    r"^\| \| hvd_elastic \| Horovod [\d.]+ elastic .*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE
)
TAKEN = conditions("3 virtual hosts", "", (0.0, 0.0, 0.0))


def printed(result: Result) -> str:
    output = io.StringIO()
    result.show(Console(width=200, file=output))
    return output.getvalue()


def event(kind: str, mono: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "mono": mono, **fields}


def test_phases_follow_the_slowest_host_and_add_up():
    events = [
        event("run_started", 10.5),
        event("agent_started", 11.0, host="a"),
        event("agent_started", 11.5, host="b"),
        event("worker_standby", 13.0, host="a"),
        event("worker_standby", 14.0, host="b"),
        event("rescale_started", 14.1),
        event("worker_joined", 14.6),
        event("worker_standby", 99.0, host="late"),
    ]
    processes = [
        Process("a", 1, 11.1, torch=12.0, steps=[Step(15.0, 2)]),
        Process("b", 1, 11.4, torch=12.8, steps=[Step(15.1, 2)]),
    ]
    phases = phases_of(10.0, events, processes)
    # The last worker was born before the slowest agent had been heard of: no time is lost there.
    assert list(phases.values()) == pytest.approx([0.5, 1.0, 0.0, 1.3, 1.2, 1.0])
    assert list(phases) == list(PHASES)
    assert sum(phases.values()) == pytest.approx(15.0 - 10.0)


def test_startup_tables_and_json():
    result = startup_result(
        TAKEN,
        {each.name: figure([4.0 + n]) for n, each in enumerate(LAUNCHERS)},
        {name: figure([0.5]) for name in PHASES},
        {"import hvd_elastic": figure([0.02])},
    )
    content = result.as_json()
    assert content["target_met"] is True
    assert content["first_step"][ELASTIC.name]["times_ours"] == 1.5
    text = printed(result)
    assert "1.50" in text
    assert "load average" in text


def test_no_repetitions_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        elasticity_main(["-n", "0"])
    assert "--repetitions/-n: takes a whole number of 1 or more" in capsys.readouterr().err


def test_a_benchmark_starts_from_any_folder(tmp_path: Path):
    command = [sys.executable, str(RESULTS.parent / "cluster.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout


@pytest.mark.parametrize(
    "name", ["adaptive", "checkpoints", "controller", "elasticity", "schedule", "soak", "startup"]
)
def test_each_benchmark_shows_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    program = str(RESULTS.parent / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(program, run_name="__main__")
    assert not ended.value.code
    assert ("--report" if name == "soak" else "--out") in capsys.readouterr().out


def test_kept_results_say_under_which_load_they_were_taken():
    for path in KEPT:
        content = json.loads(path.read_text())
        # A benchmark may have several files, such as one beside its peers: elasticity_peers.json.
        assert f"{path.stem}_".startswith(f"{content['benchmark']}_")
        assert len(content["conditions"]["load_before"]) == 3
        assert content["conditions"]["cores"] >= 1


def test_kept_results_are_small_summaries():
    for path in KEPT:
        assert path.stat().st_size < 5_000, path.name
        content = json.loads(path.read_text())
        assert content == summary(content), path.name


def test_the_comparison_of_the_documents_is_that_of_the_kept_result():
    (table,) = COMPARISON.findall((RESULTS.parent / "README.md").read_text())
    (short,) = COMPARISON.findall((RESULTS.parents[1] / "README.md").read_text())
    assert len(short.splitlines()) == 6
    assert set(short.splitlines()) < set(table.splitlines())
    kept = json.loads((RESULTS / "elasticity_peers.json").read_text())
    cases = [case for row in kept["rows"] for case in row["cases"]]
    lines = table.strip().splitlines()
    assert len(lines) == len(cases)
    for line, case in zip(lines, cases, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
        for cell, launcher in zip(cells, kept["launchers"], strict=True):
            median = case[launcher]["median"]
            number = re.fullmatch(r"(\d+)(?:\.(\d+))? s", cell)
            if number is None:
                assert median is None, line
            else:
                assert f"{median:.{len(number[2] or '')}f} s" == cell, line


def test_what_the_cluster_benchmarks_show_and_keep():
    seen = [
        Seen("dead", "runclust", {"results": 0.4, "end": 5.1}, {"results": 1.0, "end": 6.0}),
        Seen("dead", "pdsh", {}, {}, "pdsh is not installed"),
    ]
    faults = faults_result(TAKEN, seen)
    text = printed(faults)
    assert "results 0.4, end 5.1 (at most results 1, end 6)" in text
    assert "pdsh is not installed" in text
    assert "load average" in text
    assert faults.as_json()["rows"][0]["values"] == {"results": 0.4, "end": 5.1}

    grown = [
        Grown(hosts, 0.5 + 0.02 * hosts, 0.5 + 0.01 * hosts, 60_000_000) for hosts in (32, 64, 128)
    ]
    many = many_result(TAKEN, grown, [Memory("x", 10**9, 62_000_000)])
    text = printed(many)
    assert "10.0 ms of one core here for each host" in text
    assert "at least 10.5 s" in text
    assert "1000 MB  memory 62 MB" in text
    assert many.as_json()["at_1000_hosts"]["seconds"] == pytest.approx(20.5)
    assert fit_growth(grown[:1]) == {}
