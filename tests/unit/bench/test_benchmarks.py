"""What the benchmarks make of what they saw; the seconds themselves are nobody's assertion."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hvd_elastic.bench.cluster.faults import Seen, show_faults, write_faults
from hvd_elastic.bench.cluster.many import Grown, Memory, fit_growth, show_many, write_many
from hvd_elastic.bench.figures import conditions, figure
from hvd_elastic.bench.launchers import ELASTIC, LAUNCHERS
from hvd_elastic.bench.marks import Process, Step
from hvd_elastic.bench.startup import PHASES, phases_of, show_startup, startup_as_json
from hvd_elastic.cli.bench import app
from hvd_elastic.errors import UsageError

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"


def taken(result: dict[str, Any]) -> dict[str, Any]:
    return {"conditions": conditions("3 virtual hosts", "", (0.0, 0.0, 0.0)), **result}


def printed(show: Any, result: dict[str, Any]) -> str:
    output = io.StringIO()
    show(result, Console(width=200, file=output))
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
    result = taken(
        {
            "first_step": {each.name: figure([4.0 + n]) for n, each in enumerate(LAUNCHERS)},
            "phases": {name: figure([0.5]) for name in PHASES},
            "programs": {"import hvd_elastic": figure([0.02])},
        }
    )
    content = json.loads(json.dumps(startup_as_json(result)))
    assert content["target_met"] is True
    assert content["first_step"][ELASTIC.name]["times_ours"] == 1.5
    text = printed(show_startup, result)
    assert "1.50" in text
    assert "load average" in text


@pytest.mark.parametrize("arguments", [["startup", "-n", "0"], ["elasticity", "-n", "-1"]])
def test_no_repetitions_is_refused(arguments: list[str]):
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UsageError)
    assert "--repetitions" in str(result.exception)


def test_a_missing_folder_is_found_before_minutes_of_measuring(tmp_path: Path):
    result = CliRunner().invoke(app, ["startup", "--out", str(tmp_path / "no" / "x.json")])
    assert isinstance(result.exception, UsageError)


def test_help_names_both():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "startup" in result.output
    assert "elasticity" in result.output


def test_kept_results_say_under_which_load_they_were_taken():
    for path in RESULTS.glob("*.json"):
        content = json.loads(path.read_text())
        # A benchmark may have several files, such as one beside its peers: elasticity_peers.json.
        assert f"{path.stem}_".startswith(f"{content['benchmark']}_")
        assert len(content["conditions"]["load_before"]) == 3
        assert content["conditions"]["cores"] >= 1


def test_what_the_cluster_benchmarks_show_and_keep(tmp_path: Path):
    seen = [
        Seen("dead", "runclust", {"results": 0.4, "end": 5.1}, {"results": 1.0, "end": 6.0}),
        Seen("dead", "pdsh", {}, {}, "pdsh is not installed"),
    ]
    faults = taken({"rows": seen})
    text = show_faults(faults)
    assert "results 0.4, end 5.1 (at most results 1, end 6)" in text
    assert "pdsh is not installed" in text
    assert "load average" in text
    write_faults(faults, tmp_path / "faults.json")
    kept = json.loads((tmp_path / "faults.json").read_text())
    assert kept["rows"][0]["values"] == {"results": 0.4, "end": 5.1}

    grown = [
        Grown(hosts, 0.5 + 0.02 * hosts, 0.5 + 0.01 * hosts, 60_000_000) for hosts in (32, 64, 128)
    ]
    many = taken({"grown": grown, "memory": [Memory("x", 10**9, 62_000_000)]})
    many["models"] = fit_growth(grown)
    text = show_many(many)
    assert "10.0 ms of one core here for each host" in text
    assert "at least 10.5 s" in text
    assert "1000 MB  memory 62 MB" in text
    write_many(many, tmp_path / "many.json")
    kept = json.loads((tmp_path / "many.json").read_text())
    assert kept["at_1000_hosts"]["seconds"] == pytest.approx(20.5)
    assert fit_growth(grown[:1]) == {}
