"""``hvd-elastic top`` on a run whose leader dies: a look before and after, and it ends."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from benchmarks.testbed.replay import Replay
from hvd_elastic.cli.views.dashboard import top


def test_top_shows_hosts_progress_and_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    for name, value in {
        "COLUMNS": "160",
        "LINES": "60",
        "FORCE_COLOR": "1",
        "TERM": "xterm",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "runs").mkdir()
    run = Replay(tmp_path / "runs", "a", start=time.time())
    run.begin("node1", "node2")
    run.train(60)
    run.join("node3")
    run.train(30)
    run.close()
    lock = run.folder.take_lead()
    monkeypatch.setattr("hvd_elastic.cli.views.dashboard.time.sleep", lambda _: lock.close())
    top("a", interval=1.0)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    shown, died, after = shown.partition("died: no live leader")
    assert died
    assert "examples/s" not in after
    assert "to go" not in after
    assert not re.search(r"node3 +2", after)
    assert "examples/s on 6 workers" in shown
    assert "to go (" in shown
    lines = [line.split() for line in shown.splitlines()]
    (row,) = [line for line in lines if line[:2] == ["node3", "2"]]
    assert row[3] == "ms"
    assert row[4].endswith("%")
    assert "node3 joined" in shown
