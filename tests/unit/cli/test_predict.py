"""``hvd-elastic predict``: what it refuses before anything is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.records.outputs import TOTAL_FILE, output_name
from hvd_elastic.records.run_folder import RunFolder
from tests.unit.cli.test_runs import Call, _home, call

__all__ = ["_home", "call"]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command, but for --out."""
    monkeypatch.chdir(tmp_path)
    Path("best.pt").touch()
    Path("predict.py").touch()
    return ["predict", "--checkpoint", "best.pt", "--data", "shards", "--out"]


def script() -> list[str]:
    return ["--", sys.executable, "predict.py"]


def test_a_folder_with_other_files_is_refused(words: list[str], call: Call) -> None:
    Path("out").mkdir()
    Path("out", "thesis.tex").touch()
    done = call(*words, "out", *script())
    assert done.status == 2
    assert "a folder with other files" in done.err
    assert [path.name for path in Path("out").iterdir()] == ["thesis.tex"]


def test_weights_that_are_not_there_are_refused(words: list[str], call: Call) -> None:
    words[2] = "nothing-1"
    done = call(*words, "out", *script())
    assert done.status == 1
    assert "neither a file or folder nor the id of a run" in done.err
    assert not Path("out").exists()


def test_a_missing_script_is_refused(words: list[str], call: Call) -> None:
    assert "no command to run" in call(*words, "out").err
    gone = call(*words, "out", "--", sys.executable, "gone.py")
    assert "gone.py does not exist" in gone.err
    assert not Path("out").exists()


def test_a_complete_folder_is_left_as_it_is(words: list[str], call: Call) -> None:
    out = Path("out")
    out.mkdir()
    asked: dict[str, Any] = {
        "checkpoint": "best.pt",
        "data": str(Path("shards").absolute()),
        "runs": [],
    }
    asked |= {"weights": str(Path("best.pt").absolute()), "examples": 6}
    (out / "asked.json").write_text(json.dumps(asked))
    for begin, end in ((0, 4), (4, 6)):
        (out / output_name(begin, end)).touch()
    assert "all 6 outputs are there already" in call(*words, "out", *script()).out
    words[2] = "other.pt"
    Path("other.pt").touch()
    done = call(*words, "out", *script())
    assert "--checkpoint best.pt and not other.pt: give another folder" in done.err


def test_outputs_of_a_call_that_was_killed_are_found(words: list[str], call: Call) -> None:
    run = RunFolder.create("killed-1")
    run.saved.mkdir()
    (run.saved / TOTAL_FILE).write_text('{"examples": 6}')
    for begin, end in ((0, 4), (4, 6)):
        (run.saved / output_name(begin, end)).write_text(f"{begin}")
    out = Path("out")
    out.mkdir()
    asked: dict[str, Any] = {"checkpoint": "best.pt", "data": str(Path("shards").absolute())}
    asked |= {"weights": str(Path("best.pt").absolute()), "runs": ["killed-1"]}
    (out / "asked.json").write_text(json.dumps(asked))
    assert "all 6 outputs are there already" in call(*words, "out", *script()).out
    assert (out / output_name(4, 6)).read_text() == "4"
    index = json.loads((out / "index.json").read_text())
    assert [each["begin"] for each in index["files"]] == [0, 4]


def test_a_prediction_that_never_began_may_be_given_anew(words: list[str], call: Call) -> None:
    out = Path("out")
    out.mkdir()
    asked = {"checkpoint": "gone", "data": "/gone", "weights": "/gone", "runs": []}
    (out / "asked.json").write_text(json.dumps(asked))
    words[2] = "nothing-1"
    assert "nothing-1 is neither a file" in call(*words, "out", *script()).err
