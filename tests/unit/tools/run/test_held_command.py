from __future__ import annotations

import io
import os
import shutil
import threading
from pathlib import Path

import pytest

from hvd_elastic.hosts.fanout import Outcome
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import RemoteProcess
from hvd_elastic.tools.run import held_command
from hvd_elastic.tools.run.commands import CommandSettings, HowToRun, run_on_hosts
from tests.paths import LIMIT_S

HERE = [Host("localhost")]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_host_without_python_runs_what_needs_none(programs: Path) -> None:
    (programs / "cat").symlink_to(str(shutil.which("cat", path="/bin:/usr/bin")))
    (result,) = run_on_hosts(HERE, "cat; exit 4", stdin=io.BytesIO(b"input"))
    assert (result.answer.stdout, result.answer.exit_status) == (b"input", 4)
    settings = CommandSettings(HowToRun({"NAME": "value"}))
    (result,) = run_on_hosts(HERE, "echo never", settings=settings)
    assert result.outcome is Outcome.FAILED
    assert "no python3 there" in result.error


def test_a_command_whose_start_is_heard_late_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, later = tmp_path / "ran", threading.Event()
    pump = RemoteProcess._pump_stderr
    monkeypatch.setattr(
        RemoteProcess, "_pump_stderr", lambda self: later.wait(LIMIT_S) and pump(self)
    )
    monkeypatch.setattr(held_command, "DRAIN_S", 0.1)
    (result,) = run_on_hosts(HERE, f"echo once >> '{ran}'; exit 3")
    later.set()
    assert ran.read_text() == "once\n"
    assert result.outcome is Outcome.FAILED
    assert "whether the command has run, since its output has not arrived (exit" in result.error


@pytest.mark.parametrize(
    ("sudo", "message"),
    [
        ("echo 'sudo: a password is required' >&2; exit 1", "allow the user NOPASSWD"),
        (None, "there is no sudo. Log in as root"),
    ],
)
def test_sudo_that_would_ask_is_said(programs: Path, sudo: str | None, message: str) -> None:
    (programs / "sh").symlink_to("/bin/sh")
    script(programs / "id", "echo 1000")
    if sudo is not None:
        script(programs / "sudo", sudo)
    settings = CommandSettings(HowToRun(sudo=True))
    (result,) = run_on_hosts(HERE, "echo never", settings=settings)
    assert result.outcome is Outcome.FAILED
    assert message in result.error
    assert result.value is None


def test_sudo_that_does_not_ask(programs: Path) -> None:
    for name in ("sh", "python3"):
        (programs / name).symlink_to(str(shutil.which(name, path=os.defpath + ":/usr/local/bin")))
    script(programs / "id", "echo 1000")
    script(programs / "sudo", '[ "$1 $2" = "-n --" ] && shift 2 && exec "$@"')
    settings = CommandSettings(HowToRun({"NAME": "it's"}, "/usr", sudo=True))
    (result,) = run_on_hosts(HERE, "echo $NAME; pwd", settings=settings)
    assert result.answer.stdout == b"it's\n/usr\n"


def test_a_python_of_another_version_takes_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_command, "MAGIC_NUMBER", b"none")
    _, text = held_command._read_holder()
    monkeypatch.setattr(held_command, "_read_holder", lambda: (b"not read", text))
    (result,) = run_on_hosts(HERE, "cat; exit 4", stdin=io.BytesIO(b"input"))
    assert (result.answer.stdout, result.answer.exit_status) == (b"input", 4)


def test_every_host_reads_the_input_from_its_beginning() -> None:
    data = os.urandom(1_000_000)
    hosts = [Host("localhost"), Host("127.0.0.1"), Host("::1")]
    settings = CommandSettings(fanout=1, keep_bytes=2_000_000)
    for result in run_on_hosts(hosts, "cat", settings=settings, stdin=io.BytesIO(data)):
        assert result.answer.stdout == data


def test_only_the_beginning_is_kept_and_all_is_compared() -> None:
    settings = CommandSettings(keep_bytes=10)
    prints = {}
    for text in ("same start, A", "same start, B"):
        (result,) = run_on_hosts(HERE, f"printf '{text}'", settings=settings)
        assert (result.answer.stdout, result.answer.left_out_bytes) == (b"same start", 3)
        prints[result.answer.stdout_fingerprint] = text
    assert len(prints) == 2
