"""``hvd-elastic plan`` on a run folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.cli.app import main
from hvd_elastic.records.events import as_record
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import Metrics
from tests.unit.policy.known_runs import run_events, true_model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    hostfile = tmp_path / "hosts"
    hostfile.write_text("n0 slots=2 price=1.5\nn1 slots=2 price=1.5\n")
    made = RunFolder.create("seen", {"hostfile": str(hostfile), "objective": {"target": 1e7}})
    model = true_model(0.01, 0.001, 0.002, 1e-4, 0.006, 2e-4)
    write_events(made, run_events(model, [[1], [2], [2, 2]]))
    return made


def write_events(folder: RunFolder, events: list[Any]) -> None:
    """Write the events of a known run, with whole steps and examples."""
    for event in events:
        if isinstance(event, Metrics):
            event.step, event.examples = round(event.step), round(event.examples)
    folder.events.write_text("".join(json.dumps(as_record(event)) + "\n" for event in events))


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        main(("plan", *arguments))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    captured = capsys.readouterr()
    return status, captured.out, " ".join(captured.err.split())


def test_the_table(capsys: pytest.CaptureFixture[str], folder: RunFolder) -> None:
    status, out, _ = call(capsys, "seen", "--hosts", "4")
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["hosts", "slots", "batch", "examples/s"]
    assert [line.split()[0] for line in lines[1:5]] == ["1*", "2*", "3", "4"]
    assert "cost" in lines[0], "prices are those of the hostfile, the target that of the run"
    assert "1 slot on 1 host, 2 slots on 1 host, 4 slots on 2 hosts" in out
    assert f"plots: {folder.path}/plan.html" in out


def test_without_a_number_of_hosts_the_sizes_of_the_hostfile(
    capsys: pytest.CaptureFixture[str], folder: RunFolder
) -> None:
    _, out, _ = call(capsys, "seen")
    rows = [line.split()[:2] for line in out.split("\n\n")[0].splitlines()[1:]]
    assert rows == [["1*", "1"], ["1*", "2"], ["2", "3"], ["2*", "4"]]
    assert "--hosts N shows others" in out
    page = (folder.path / "plan.html").read_text(encoding="utf-8")
    data = re.search(r'id="run-data">(.*?)</script>', page)
    assert data is not None
    shown = json.loads(data[1])
    assert (shown["x_name"], shown["charts"][0]["x"]) == ("slots", [1, 2, 3, 4])
    # A table of hundreds of sizes is no help.
    _, out, _ = call(capsys, "seen", "--slots", "64")
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [["1", "64"], ["2", "128"]]


def test_sizes_that_are_not_known(
    capsys: pytest.CaptureFixture[str], folder: RunFolder, tmp_path: Path
) -> None:
    model = true_model(0.01, 0.001, 0.002, 1e-4, 0.006, 2e-4)
    write_events(folder, run_events(model, [[1], [2], [2, 2]], cores=4, machine="one"))
    status, out, _ = call(capsys, "seen", "--hosts", "4")
    assert status == 0
    assert ["not known" in line for line in out.splitlines()[1:5]] == [False, False, True, True]
    assert "Not known: with 6 slots, 6 ranks would share 4 cores of one machine" in out
    page = tmp_path / "plan.html"
    _, printed, _ = call(capsys, "seen", "--hosts", "4", "--json", "--out", str(page))
    last = json.loads(printed)["forecasts"][-1]
    assert (last["slots"], last["goodput"], last["global_batch_size"]) == (8, None, None)
    assert "8 ranks would share" in last["unknown"]
    assert '"x": [1, 2]' in page.read_text(encoding="utf-8").replace('"x":[1,2]', '"x": [1, 2]')


def test_json_and_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    options = ("--hosts", "8", "--price", "2", "--target-examples", "5e6", "--json")
    status, printed, _ = call(capsys, "--out", str(out), *options)
    assert status == 0
    found: dict[str, Any] = json.loads(printed)
    last = found["forecasts"][-1]
    assert (last["hosts"], last["slots"], last["rate"]) == (8, 16, 16.0)
    assert last["time_s"] == pytest.approx(5e6 / last["goodput"])
    page = out.read_text(encoding="utf-8")
    data = re.search(r'id="run-data">(.*?)</script>', page)
    assert data is not None
    charts = json.loads(data[1])["charts"]
    assert [chart["name"] for chart in charts] == ["goodput", "time", "cost"]
    assert charts[0]["x"] == [1, 2, 3, 4, 5, 6, 7, 8]
    ranges = zip(*(charts[0][name] for name in ("low", "y", "high")), strict=True)
    assert all(low < middle < high for low, middle, high in ranges)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("nope",), 1, "there is no run 'nope'"),
        (("a", "b"), 2, "give one run, or --probe"),
        (("--hostfile", "hosts"), 2, "give one run, or --probe"),
        (("--probe", "--", "python"), 2, "--probe needs --hostfile"),
        (("seen", "--hosts", "none"), 2, "--hosts takes a whole number"),
        (("seen", "--price", "-1"), 2, "--price takes a number of 0 or more"),
        (("empty",), 1, "no step was timed for long enough"),
    ],
)
def test_nonsense(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, words: str
) -> None:
    RunFolder.create("empty")
    found, _, error = call(capsys, *arguments)
    assert found == status
    assert words in error
