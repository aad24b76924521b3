"""Tests that are broken off while they run side by side have the time to tidy up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import side_by_side

ROOT = Path(side_by_side.__file__).parents[1]
DEADLINE_S = 60.0
TESTS = """
import time
import pytest

@pytest.fixture
def hosts(request):
    place = request.path.with_suffix(".up")
    place.touch()
    yield
    time.sleep(5.5)  # pytest-xdist alone has lost its patience by then
    place.unlink()

def test(hosts, request):
    request.path.with_suffix(".runs").touch()
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("number", "whom", "status"), [(signal.SIGINT, "all", 2), (signal.SIGTERM, "first", 143)]
)
def test_broken_off_they_tidy_up(
    tmp_path: Path, number: signal.Signals, whom: str, status: int
) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(
        "from tests.side_by_side import register as pytest_configure\n"
    )
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2"]
    started = subprocess.Popen(
        [*command, "--dist=loadfile"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while len([*tmp_path.glob("*.runs")]) < 2:
            assert started.poll() is None, started.communicate()[0]
            assert time.monotonic() < deadline, "the tests did not begin"
            time.sleep(0.05)
        # As a terminal does it, and as a time limit does.
        (os.killpg if whom == "all" else os.kill)(started.pid, number)
        said, _ = started.communicate(timeout=DEADLINE_S)
    finally:
        started.kill()
    assert started.returncode == status, said
    assert not [*tmp_path.glob("*.up")], said
