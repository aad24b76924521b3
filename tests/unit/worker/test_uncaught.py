"""What a script that ends with an exception leaves on the terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.errors import ScriptError
from hvd_elastic.worker.debugging.uncaught import _NOT_THE_SCRIPT, tell_uncaught
from tests.paths import OF_ONE_FRAMEWORK, ROOT, WORKER_PYTHONPATH


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delenv("HVD_ELASTIC_TRACEBACK", raising=False)
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a Python of its own."""
    environment = {**os.environ, "PYTHONPATH": WORKER_PYTHONPATH}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def uncaught(error: BaseException) -> None:
    """As Python tells of it."""
    sys.excepthook(type(error), error, error.__traceback__)


def test_a_mistake_is_its_message_alone_in_a_real_script() -> None:
    program = "import hvd_elastic.torch as hvd; hvd.rank()"
    done = run("-c", program)
    assert done.returncode == 1
    assert done.stderr == (
        "error: call hvd.init() first, before anything else of the library; hvd is "
        "hvd_elastic.torch, hvd_elastic.tensorflow or hvd_elastic.keras, as the script imports it\n"
    )


def test_a_script_of_torchrun_is_told_what_to_change_before_init_too() -> None:
    done = run("-c", "import os, hvd_elastic.torch; os.environ['LOCAL_RANK']")
    assert done.stderr.splitlines()[-2] == "KeyError: 'LOCAL_RANK'"
    assert done.stderr.splitlines()[-1].startswith("error: this expects the process group of torc")


@pytest.mark.usefixtures("hook")
def test_pythons_way_where_it_is_wanted_and_for_other_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_uncaught()
    tell_uncaught()
    uncaught(ScriptError("so it is"))
    assert capsys.readouterr().err == "error: so it is\n"
    uncaught(ValueError("no mistake of ours"))
    said = capsys.readouterr().err
    assert said == "ValueError: no mistake of ours\n"
    monkeypatch.setenv("HVD_ELASTIC_TRACEBACK", "1")
    uncaught(ScriptError("so it is"))
    assert capsys.readouterr().err == "hvd_elastic.errors.ScriptError: so it is\n"


def test_a_hook_of_the_scripts_own_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *told: shown.append(told[1]))
    tell_uncaught()
    error = ScriptError("so it is")
    uncaught(error)
    assert shown == [error]


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("listens", [True, False])
def test_a_leader_shows_it_if_it_listens(capsys: pytest.CaptureFixture[str], listens: bool) -> None:
    told: list[str] = []

    def tell(text: str) -> bool:
        told.append(text)
        return listens

    tell_uncaught()
    tell_uncaught(tell)
    uncaught(ScriptError("so it is"))
    assert told == ["error: so it is\n"]
    assert ("error: so it is\n" in capsys.readouterr().err) is not listens


@pytest.mark.parametrize(
    ("ends", "status", "is_told"),
    [("raise KeyboardInterrupt", 1, True), ("os.kill(os.getpid(), 2); time.sleep(9)", -2, False)],
)
def test_a_keyboard_interrupt_that_nobody_has_sent_is_an_error_of_the_script(
    ends: str, status: int, is_told: bool
) -> None:
    program = (
        "import os, time; from hvd_elastic.worker.debugging.uncaught import tell_uncaught as f; "
        f"f(lambda text: print('told', text, flush=True) is None); {ends}"
    )
    done = run("-c", program)
    assert done.returncode == status
    assert ("told" in done.stdout and "KeyboardInterrupt" in done.stdout) is is_told


@pytest.mark.usefixtures("hook")
def test_a_mistake_in_a_script_names_its_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import hvd_elastic.torch as hvd\nhvd.init()\n"
        "@hvd.run\ndef train(state):\n    hvd.DataLoader([1])\ntrain(hvd.State())\n"
    )
    done = run(str(script))
    assert done.stderr.startswith(
        f"error: {script}, line 5: DataLoader(dataset) needs a batch_size"
    )


@pytest.mark.usefixtures("hook")
def test_lines_of_a_frontend_are_not_of_the_script() -> None:
    rooms = {path.split("/")[1] for paths in OF_ONE_FRAMEWORK.values() for path in paths}
    files = [str(ROOT / "hvd_elastic" / room / "x.py") for room in rooms - {"bench"}]
    assert [each for each in files if not each.startswith(_NOT_THE_SCRIPT)] == []


def test_a_traceback_goes_from_the_script_to_its_training_function(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import hvd_elastic.torch as hvd\nhvd.init()\n"
        "@hvd.run\ndef train(state):\n    1 / 0\ntrain(hvd.State())\n"
    )
    done = run(str(script))
    assert "ZeroDivisionError" in done.stderr
    assert "line 6" in done.stderr
    assert "line 5, in train" in done.stderr
    assert "hvd_elastic" not in done.stderr
