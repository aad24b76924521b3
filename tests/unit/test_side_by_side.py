"""Tests side by side: one may kill its process, and they tidy up when they are broken off."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import side_by_side
from tests.paths import COSTLY, LIMIT_S
from tests.waiting import until

ROOT = Path(side_by_side.__file__).parents[1]
Start = Callable[[str], subprocess.Popen[str]]
BROKEN_OFF = """
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
    time.sleep(1000)
"""


DIES = """
import os
import signal
import time
import pytest

def test_dies(request):
    died = request.path.parent / "died"
    if request.path.stem == "test_one" and not died.exists():
        died.touch()
        if not os.fork():
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)

def test_follows():
    pass
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Run two files of the same tests side by side."""
    pytest.importorskip("xdist")
    started: list[subprocess.Popen[str]] = []

    def start(tests: str) -> subprocess.Popen[str]:
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        (tmp_path / "conftest.py").write_text(
            "from tests.side_by_side import register as pytest_configure\n"
        )
        for name in ("one", "two"):
            (tmp_path / f"test_{name}.py").write_text(tests)
        command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider"]
        started.append(
            subprocess.Popen(
                [*command, "-n", "2", "--dist=loadfile"],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                start_new_session=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_what_a_process_that_has_died_has_forked_does_not_hold_up_the_others(start: Start) -> None:
    process = start(DIES)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert re.search("crashed while running.*test_one.py::test_dies", said), said
    assert re.search("= 1 failed, [23] passed", said), said


def test_a_test_that_kills_its_process_is_tried_once() -> None:
    queue = {"one": {"one::dies": False, "one::next": False}, "two": {"two::dies": False}}
    hands_out = side_by_side.HandsOut()
    for test in ("one::dies", "two::dies"):
        hands_out.pytest_handlecrashitem(test, SimpleNamespace(workqueue=queue))
    assert queue == {"one": {"one::dies": True, "one::next": False}}


@pytest.mark.parametrize(
    ("number", "whom", "status"),
    [
        (signal.SIGINT, "all", 2),
        pytest.param(signal.SIGTERM, "first", 143, marks=COSTLY),
    ],
)
def test_broken_off_they_tidy_up(
    tmp_path: Path, start: Start, number: signal.Signals, whom: str, status: int
) -> None:
    process = start(BROKEN_OFF)
    until(lambda: len([*tmp_path.glob("*.runs")]) == 2, "the tests begin", process=process)
    # As a terminal does it, and as a time limit does.
    (os.killpg if whom == "all" else os.kill)(process.pid, number)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == status, said
    assert not [*tmp_path.glob("*.up")], said
