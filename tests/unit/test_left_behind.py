"""What a test leaves behind in its process is an error of its file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

CONFTEST = """
from tests.left_behind import LeftBehind

def pytest_configure(config):
    config.pluginmanager.register(LeftBehind())
"""
TIDY = """
import wave

def test_it(monkeypatch, tmp_path):
    (tmp_path / "own_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LEFT", "1")
    monkeypatch.chdir(tmp_path)
    import colorsys
"""
UNTIDY = """
import os, signal, sys

def test_first(tmp_path):
    (tmp_path / "own_module.py").touch()
    sys.path.insert(0, str(tmp_path))
    import own_module
    sys.path.remove(str(tmp_path))
    os.environ["LEFT"] = "1"

def test_second():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    del sys.modules["wave"]
"""


def test_a_file_that_leaves_something_behind_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_a.py").write_text(TIDY, encoding="utf-8")
    (tmp_path / "test_b.py").write_text(UNTIDY, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir=.", "."],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert "3 passed, 1 error" in done.stdout, done.stdout + done.stderr
    told = done.stdout.partition("a test of test_b.py leaves behind")[2].partition("\n")[0]
    for what in ("SIGUSR1 was", "os.environ['LEFT']", "modules['wave']", "modules['own_module']"):
        assert what in told
