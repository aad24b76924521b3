"""What is written of a soak."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.soak.faults import Made
from benchmarks.soak.player import Incident
from benchmarks.soak.report import SoakResult, rows_by_kind, show_soak, write_soak
from benchmarks.soak.schedule import Fault
from benchmarks.testbed.figures import Conditions

BEGAN = 100.0


def incident(number: int, kind: str, stall_s: float | None, *problems: str) -> Incident:
    made = Incident(
        Fault(number, kind, 1.0, 2.0, 3),
        Made("worker a:0.1"),
        began=BEGAN + number,
        made_at=BEGAN + number,
        may_stop=False,
    )
    made.undone = made.began + 2.0
    if stall_s is not None:
        made.stall_s, made.recovered = stall_s, made.undone + 4.0
    made.problems += problems
    return made


@pytest.fixture
def result() -> SoakResult:
    taken = Conditions("2026-01-01", 2, "a processor", (0.5, 0.4, 0.3), 3.0, {}, "4 hosts", "")
    incidents = [incident(1, "cut", 1.0), incident(2, "crash", 2.0), incident(3, "cut", 3.0)]
    return SoakResult(
        7, {"minutes": 5.0}, taken, BEGAN, 300.0, incidents, {"left behind": "nothing"}
    )


def test_a_row_for_each_kind(result: SoakResult) -> None:
    crash, cut = rows_by_kind(result.incidents)
    assert (crash["kind"], crash["times"]) == ("crash", 1)
    assert (cut["times"], cut["dealt_with"], cut["problems"]) == (2, 2, 0)
    assert (cut["stall_median_s"], cut["stall_max_s"]) == (2.0, 3.0)
    assert (cut["recovery_median_s"], cut["recovery_max_s"]) == (4.0, 4.0)


def test_the_verdict(result: SoakResult) -> None:
    assert result.ok
    assert result.verdict() == "passed: 3 faults, none left a trace"
    result.incidents.append(incident(4, "cut", None, "training stood still"))
    assert not result.ok
    assert result.verdict() == "FAILED: 1 problem in 4 faults"
    result.problems.append("left behind: a process")
    assert result.verdict() == "FAILED: 2 problems in 4 faults"
    result.interrupted = True
    assert result.verdict() == "interrupted after 4 faults, 2 problems until then"


def test_an_interrupted_soak_has_not_passed(result: SoakResult) -> None:
    result.interrupted = True
    assert not result.ok


def test_the_files_hold_what_is_needed_to_repeat_it(result: SoakResult, tmp_path: Path) -> None:
    result.incidents.append(incident(4, "crash", None, "training | stood\nstill"))
    page = write_soak(result, tmp_path / "soak.json")
    content = json.loads((tmp_path / "soak.json").read_text())
    assert (content["seed"], content["options"], content["ok"]) == (7, {"minutes": 5.0}, False)
    assert [fault["kind"] for fault in content["faults"]] == ["cut", "crash", "cut", "crash"]
    assert content["faults"][0]["at_s"] == 1.0
    assert content["faults"][3]["stall_s"] is None
    text = page.read_text()
    assert "| cut | 2 | 2 | 2.00 | 3.00 | 4.00 | 4.00 |  |" in text
    assert "#4 crash for 2 s (worker a:0.1): training \\| stood still" in text


def test_the_table_on_the_terminal(result: SoakResult) -> None:
    result.incidents.append(incident(4, "crash", None, "it [broke]"))
    out = io.StringIO()
    show_soak(result, Console(file=out, width=150))
    assert "it [broke]" in out.getvalue()
    assert "FAILED: 1 problem in 4 faults" in out.getvalue()
