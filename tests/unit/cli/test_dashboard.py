"""``hvd-elastic top`` on a run whose leader is gone: one look, and it ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.testbed.replay import Replay
from hvd_elastic.cli.views.dashboard import top


def test_top_shows_hosts_progress_and_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "runs").mkdir()
    run = Replay(tmp_path / "runs", "a", start=time.time())
    run.begin("node1", "node2")
    run.train(60)
    run.join("node3")
    run.train(30)
    run.close()
    top("a", interval=1.0)
    shown = capsys.readouterr().out
    assert "examples/s on 6 workers" in shown
    assert "to go (" in shown
    lines = [line.split() for line in shown.splitlines()]
    (row,) = [line for line in lines if line[:2] == ["node3", "2"]]
    assert row[3] == "ms"
    assert row[4].endswith("%")
    assert "node3 joined" in shown
