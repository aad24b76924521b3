"""What the elasticity benchmark makes of what it saw; the seconds are nobody's assertion."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.elasticity.breakdown import FIRST, NOTICE, dissect, gloo_contexts
from benchmarks.elasticity.command import main, parse_peers
from benchmarks.elasticity.ratio import TrainingRatio, effective_time
from benchmarks.elasticity.results import Observation, cell_of, elasticity_result, fits_of
from benchmarks.elasticity.rows import ROWS, parse_rows
from benchmarks.testbed.environments import PeerEnvironment, PeerMissingError
from benchmarks.testbed.figures import Result, conditions
from benchmarks.testbed.launchers import PEERS
from benchmarks.testbed.marks import Process, Span, Step
from hvd_elastic.errors import UsageError

NAMES = {key: launcher.name for key, launcher in PEERS.items()}


def result(
    rows: str,
    observations: list[Observation],
    missing: dict[str, str] | None = None,
    ratios: Sequence[TrainingRatio] = (),
) -> Result:
    taken = conditions("4 virtual hosts", "", (0.0, 0.0, 0.0), {"torchft": "1.2"})
    return elasticity_result(taken, 2, parse_rows(rows), observations, NAMES, missing or {}, ratios)


def printed(taken: Result) -> str:
    output = io.StringIO()
    taken.show(Console(width=250, file=output))
    return output.getvalue()


# -- rows and options --------------------------------------------------------------------


def test_rows_are_numbered_in_order_and_name_launchers_that_exist():
    assert [row.number for row in ROWS] == list(range(1, len(ROWS) + 1))
    for row in ROWS:
        assert set(row.without) < set(PEERS)
        assert "ours" not in row.without
        names = [case.name for case in row.cases]
        assert len(set(names)) == len(names) > 0


@pytest.mark.parametrize("text", ["0", "17", "3-1", "a", "", "1,,2", "1-99"])
def test_what_is_no_row_is_refused_with_what_is_valid(text: str):
    with pytest.raises(UsageError, match="from 1 to 16"):
        parse_rows(text)


@pytest.mark.parametrize("text", ["", "ours,ray", ","])
def test_unknown_peers_are_refused_with_the_known_ones(text: str):
    with pytest.raises(UsageError, match="ours, keras, horovod, torchrun, torchft"):
        parse_peers(text)


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--limit", "0"], ["--etr", "-1"], ["--rows", "x"], ["--peers", "x"]),
        ["--out", "/no such folder/x.json"],
    ],
)
def test_wrong_options_are_found_before_anything_is_made(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == UsageError.exit_status
    assert capsys.readouterr().err.startswith(f"error: {arguments[0]}")


def test_without_root_it_says_what_needs_root(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main([]) == UsageError.exit_status
    assert "needs root" in capsys.readouterr().err


# -- statistics and tables ---------------------------------------------------------------


def test_a_cell_counts_what_failed_beside_what_was_measured():
    seen = [
        Observation(1, "ours", "stall", 0.2),
        Observation(1, "ours", "stall", None, "the job died"),
        Observation(1, "ours", "stall", 0.4),
        Observation(1, "ours", "stall", None, "the job died"),
    ]
    cell = cell_of(seen)
    kept = cell.as_json()
    assert [kept["median"], kept["low"], kept["high"]] == pytest.approx([0.3, 0.2, 0.4])
    assert cell.text("s") == "0.300 s (0.200 to 0.400); 2 times: the job died"
    assert cell_of(seen[1:2]).text("s") == "the job died"
    assert cell_of([]).text("s") == "-"


@pytest.mark.parametrize(
    ("value", "unit", "shown"), [(3.0, "", "3"), (1.5, "x", "1.50x"), (120.0, "s", "120.0 s")]
)
def test_a_figure_is_shown_in_its_unit(value: float, unit: str, shown: str):
    assert cell_of([Observation(1, "ours", "stall", value)]).text(unit) == shown


def test_the_table_tells_targets_failures_and_who_was_not_measured():
    taken = result(
        "4,11",
        [
            Observation(4, "ours", "stall", 0.2),
            Observation(4, "horovod", "stall", None, "the job died", "exit 1"),
            Observation(4, "torchrun", "stall", 6.0),
            Observation(11, "ours", "steps lost", 3.0),
        ],
        {"torchft": "no wheel for this Python"},
    )
    text = printed(taken)
    assert "≤ 0.25 s: met" in text
    assert "≤ 0: missed" in text
    assert "the job died" in text
    assert "6.00 s" in text
    assert "not measured: no wheel for this Python" in " ".join(text.split())
    assert "load average" in text
    rows = taken.as_json()["rows"]
    assert rows[0]["cases"][0]["target_met"] is True
    assert rows[0]["cases"][0]["horovod"]["failures"] == ["the job died"]
    assert rows[0]["cases"][0]["torchft"] == {"not_measured": "no wheel for this Python"}
    assert rows[1]["cases"][0]["target_met"] is False
    assert rows[1]["cases"][0]["torchrun"] == {"not_measured": "has no leader"}
    assert taken.as_json()["failures"][0]["detail"] == "exit 1"


def test_growth_is_fitted_for_each_launcher_and_event():
    seen = [
        Observation(14, key, f"{what} {n}", slope * n)
        for key, slope in (("ours", 0.01), ("horovod", 1.0))
        for what in ("join", "kill")
        for n in (2, 4, 8, 16)
    ]
    # A size that failed is left out, and figures of other cases are none of this.
    seen += [Observation(14, "ours", "kill 16", None, "never within 9 s")]
    seen += [Observation(1, "ours", "stall", 99.0)]
    fits = fits_of(seen)
    assert fits["ours"]["join"].linear_s == pytest.approx(0.01)
    assert fits["horovod"]["kill"].linear_s == pytest.approx(1.0)
    taken = result("14", seen)
    assert "10.24 s, mostly linear" in printed(taken)
    fit = taken.as_json()["fits"]["ours"]["join"]
    assert fit["predicted_s"]["1024"] == pytest.approx(10.24)
    assert fit["dominant"] == {"64": "linear", "256": "linear", "1024": "linear"}


# -- effective training time -------------------------------------------------------------


def test_nothing_is_useful_without_steps():
    assert effective_time([], 0.0, 10.0, 1.0, 4) == (0.0, 0.0)


def test_undisturbed_training_is_all_useful():
    steps = [(float(n), 4) for n in range(1, 11) for _ in range(4)]
    assert effective_time(steps, 0.0, 10.0, 1.0, 4) == (1.0, 1.0)


def test_a_stall_counts_as_one_step_and_steps_outside_do_not_count():
    steps = [(-5.0, 4), (1.0, 4), (7.0, 3), (8.0, 3), (9.0, 4), (10.0, 4), (11.0, 4)]
    ratio, capacity = effective_time(steps, 0.0, 10.0, 1.0, 4)
    assert ratio == pytest.approx(0.5)
    assert capacity == pytest.approx((3 * 1.0 + 2 * 0.75) / 10)


def test_a_job_that_died_is_told():
    taken = result("1", [], ratios=[TrainingRatio("torchft", 60.0, 0.5, 0.4, 3, 0.02, 31.0)])
    assert "the job died after 31 s" in printed(taken)
    assert taken.as_json()["effective_training_time"][0]["ratio"] == 0.5


# -- inside our stall --------------------------------------------------------------------


def test_the_parts_of_a_stall_add_up_to_it():
    process = Process("a", 1, 0.0, steps=[Step(1.0, 2), Step(1.1, 2), Step(2.1, 3), Step(2.2, 3)])
    process.spans = [
        Span("start", 0.1, 0.2),  # the first generation's
        Span("stop", 1.2, 1.25),
        Span("wait", 1.25, 1.3),
        Span("start", 1.3, 1.8),
        Span("header", 1.85, 1.9),
        Span("tensors", 1.9, 1.95),
    ]
    contexts = [("Gloo context 1: global", 0.15), ("Gloo context 1: global", 1.5)]
    phases, began = dissect(process, 0.95, contexts)
    assert began == 1.1
    assert sum(phases.values()) == pytest.approx(1.0)
    assert phases[NOTICE] == pytest.approx(0.1)
    assert phases["Gloo context 1: global"] == pytest.approx(0.2)
    assert phases["rest of hvd.init()"] == pytest.approx(0.3)
    assert phases[FIRST] == pytest.approx(0.15)


def test_gloo_contexts_are_found_in_horovods_log():
    log = """a line of the script
[2026-11-21 17:59:02.  2217: D /b/gloo_context.cc:357] Local Gloo context initialized for process
[2026-11-21 17:59:02. 60699: D /b/gloo_context.cc:379] Cross-node Gloo context for process set
[2026-11-21 17:59:03.100000: D /b/gloo_context.cc:219] Global Gloo context initialized.
[2026-11-21 17:59:03.100001: D /b/gloo_context.cc:79] global rendezvous started for rank=0
"""
    found = gloo_contexts(log.splitlines(), -100.0)
    assert [name for name, _ in found] == [
        "Gloo context 5: process set, local",
        "Gloo context 6: process set, cross",
        "Gloo context 1: global",
    ]
    assert found[1][1] - found[0][1] == pytest.approx(0.058482, abs=1e-5)
    assert found[2][1] - found[0][1] == pytest.approx(1.097783, abs=1e-5)


# -- environments of peers ---------------------------------------------------------------


def test_a_peer_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    environment = PeerEnvironment("nothing", ("hvd-elastic-no-such-package",), "no_such_package")
    with pytest.raises(PeerMissingError, match="hvd-elastic-no-such-package cannot be installed"):
        environment.make()
    assert environment.version("hvd-elastic-no-such-package") == "not installed"


def test_an_environment_that_is_there_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # numpy is seen through the running Python, so nothing has to be installed.
    environment = PeerEnvironment("seen", (), "numpy")
    calls: list[list[str]] = []

    def make_but_install_nothing(_: PeerEnvironment, command: list[str]) -> None:
        calls.append(command)
        if "venv" in command:
            subprocess.run(command, check=True)

    monkeypatch.setattr(PeerEnvironment, "_run", make_but_install_nothing)
    assert environment.make() == environment.folder
    assert environment.folder.is_relative_to(tmp_path)
    assert len(calls) == 2
    assert environment.make() == environment.folder
    assert len(calls) == 2


def test_without_torch_a_peers_environment_is_not_begun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PeerMissingError, match="make env"):
        PeerEnvironment("x", ("x",), "x").make()
