"""Units of systemd for daemons and keepers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.cli.jobs.units import remove_unit, write_unit
from hvd_elastic.jobs.place import ClusterFolder


def test_a_unit_is_one_of_systemds_where_a_manager_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / 'of "me" 100%'))
    (tmp_path / "a b" / "queue").mkdir(parents=True)
    place = ClusterFolder(tmp_path / "a b" / "queue", shared=True)
    command = [sys.executable, "-c", "import sys; sys.argv", "a b", '$HOME "%h" \\']
    write_unit(place, "keeper", command)
    assert not (tmp_path / "config").exists(), "no manager runs"
    (tmp_path / "run" / "systemd").mkdir(parents=True)
    (tmp_path / "run" / "systemd" / "private").touch()
    write_unit(place, "keeper", command)
    (unit,) = (tmp_path / "config" / "systemd" / "user").glob("*.service")
    (link,) = unit.parent.glob("default.target.wants/*")
    assert link.resolve() == unit
    assert "loginctl enable-linger" in capsys.readouterr().err
    write_unit(place, "keeper", command)
    assert not capsys.readouterr().err, "it is told once"
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(unit)],
            capture_output=True,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run")},
        )
        assert unit.name not in done.stderr
    remove_unit(place, "keeper")
    assert not list(unit.parent.rglob("*.service"))
