"""What the leader keeps of its workers: their output, and which code they run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_elastic.formatting import shown_line
from hvd_elastic.leader.workers import Workers
from hvd_elastic.records.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create("run", root=tmp_path)


@pytest.mark.parametrize("bar", ["\r{} %", "{} %\r"])
def test_a_progress_bar_that_ends_no_line_does_not_pile_up(bar: str, folder: RunFolder) -> None:
    """A bar over a whole training rewrites one line ten times a second, for days."""
    workers = Workers(folder)
    workers.places["w"] = ("n1", 0)
    for step in range(100):
        assert workers.log("w", bar.format(step)) == []
    (line,) = workers.log("w", "\n")
    workers.close()
    assert shown_line(line) == "99 %"
    assert len(line) < 10
    assert folder.log_path("n1", 0).read_bytes().count(b"%") == 100, "its log is whole"


def test_code_that_differs_from_that_of_earlier_workers_is_told_once(folder: RunFolder) -> None:
    workers = Workers(folder)
    assert workers.other_code({"train.py": "a", "model.py": "b"}) == []
    assert workers.other_code({"train.py": "a", "data.py": "c"}) == []
    assert workers.other_code({"train.py": "new", "model.py": "b"}) == ["train.py"]
    assert workers.other_code({"train.py": "new", "data.py": "old"}) == ["data.py"]
    assert workers.other_code({}) == []
