"""On which host the shell of a rank is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_elastic.cli.runs.shell import host_of_rank
from hvd_elastic.errors import UsageError
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.run_folder import RunFolder
from tests.unit.records.made_events import write


def test_a_rank_is_on_the_host_of_the_present_leader(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")

    def happens(kind: str, **fields: object) -> None:
        with EventLog(folder.events) as log:
            write(log, kind, fields)

    happens("run_started", resumed=False)
    assert host_of_rank(folder, 0, ["a", "b"]) == "a"
    with pytest.raises(UsageError, match="has 1 rank; the first is 0"):
        host_of_rank(folder, 7, ["a"])
    happens("rescale_started", generation=1, from_size=0, to_size=3, hosts=["b", "c"], slots=[1, 2])
    assert [host_of_rank(folder, rank, ["a"]) for rank in range(3)] == ["b", "c", "c"]
    with pytest.raises(UsageError, match="has 3 ranks; the first is 0"):
        host_of_rank(folder, 3, ["a"])
    happens("run_started", resumed=True)
    assert host_of_rank(folder, 0, ["a", "b"]) == "a", "it begins elsewhere"
    happens("taken_over", generation=1, size=3, workers=3)
    assert host_of_rank(folder, 2, ["a"]) == "c", "they went on without a leader"
