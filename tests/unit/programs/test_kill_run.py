"""Which processes ``killclust`` ends, and which are somebody's."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path

import pytest

from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.programs import kill_run as kill_run_program
from hvd_elastic.programs.dial_back import FOLDER_VARIABLE
from hvd_elastic.programs.kill_run import SPOOL, VARIABLE
from hvd_elastic.tools.kill import Target, kill_run
from tests import other_user
from tests.paths import ROOT

LEFT = """
import json, os, subprocess, sys, time
from hvd_elastic.programs.kill_run import find

def orphan(port):
    shell = ["setsid", "sh", "-c", "sleep 600 >/dev/null & echo $!"]
    variables = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": port}
    return int(subprocess.run(shell, env=variables, stdout=subprocess.PIPE).stdout)

names = {orphan("1"): "of a live job", orphan("2"): "of a dead job"}
worker = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "1"}
with subprocess.Popen(["sleep", "600"], env=worker) as held:
    names[held.pid] = "held"
    names[orphan("3")] = "of a job before"
    time.sleep(0.05)  # a start is known to 10 ms
    again = "import os, subprocess; subprocess.run(['cat'], env={**os.environ, **%r})"
    again %= {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "3"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", again], **pipes) as launcher:
        launcher.stdin.write(b"x\\n")
        launcher.stdin.flush()
        launcher.stdout.readline()
        print(json.dumps(sorted(names[process.pid] for process in find(None, strays=True))))
    held.kill()
"""
STRAYS = ["of a dead job", "of a job before"]


def makes_containers() -> bool:
    """Return whether this user may start processes with ids of their own."""
    try:
        words = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
        return subprocess.run(words, capture_output=True).returncode == 0
    except OSError:
        return False


@other_user.needs_root
@pytest.mark.skipif(not makes_containers(), reason="`unshare --pid --mount-proc` does not work")
@pytest.mark.parametrize(
    ("first", "strays"),
    [("init", STRAYS), ("supervisord", STRAYS), ("torchrun", []), ("launch.py", [])],
)
def test_a_worker_of_a_live_job_is_no_stray(tmp_path: Path, first: str, strays: list[str]) -> None:
    """In a container, whose first process gets the orphans, and may be the launcher."""
    program = shlex.join([sys.executable, "-c", LEFT])
    if first in ("supervisord", "launch.py"):
        script = f"import os\nos.system({program!r})\n"
        command = [sys.executable, str(tmp_path / first)]
    else:
        script = f"#!/bin/sh\n{program}\n:\n"
        command = [str(tmp_path / first)]
    (tmp_path / first).write_text(script)
    (tmp_path / first).chmod(0o700)
    container = ["unshare", "--pid", "--fork", "--mount-proc", *command]
    done = subprocess.run(container, stdout=subprocess.PIPE, cwd=ROOT)
    assert json.loads(done.stdout) == strays


@pytest.mark.parametrize(
    ("command", "launches"),
    [
        ("python launch.py", True),
        ("/opt/conda/bin/python3.12 -u /work/jupyter_train.py", True),
        ("python -mtorch.distributed.run train.py", True),
        ("python /x/torch/distributed/run.py train.py", True),
        ("/usr/bin/python3 /usr/local/bin/accelerate launch train.py", True),
        ("/usr/bin/python3 /usr/bin/supervisord -n", False),
        ("python3 -m supervisor.supervisord", False),
        ("/usr/bin/python3 -u /sbin/my_init", False),
        ("/opt/conda/bin/python3.12 /opt/conda/bin/jupyter-lab", False),
        ("/opt/conda/bin/python3.12 /opt/conda/bin/jupyterhub-singleuser --ip=0.0.0.0", False),
        ("python -m circus.circusd circus.ini", False),
        ("sleep infinity", False),
        ("", False),
    ],
)
def test_a_python_program_may_be_a_launcher_unless_it_is_a_known_supervisor(
    monkeypatch: pytest.MonkeyPatch, command: str, launches: bool
) -> None:
    monkeypatch.setattr(kill_run_program, "command_line", lambda *_: command)
    assert kill_run_program.is_launcher(1) is launches


def test_a_folder_of_that_name_is_no_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "hvd_elastic"
    monkeypatch.setattr(kill_run_program, "command_line", lambda *_: f"sh -c cd {place} && serve")
    assert kill_run_program.is_launcher(1)
    place.mkdir()
    assert not kill_run_program.is_launcher(1)


def test_a_run_of_the_same_name_in_another_home_is_left_alone_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "ours"))
    run = f"run-{uuid.uuid4().hex[:8]}"
    processes = {}
    (tmp_path / "ours").mkdir()
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "ours" / "spool").symlink_to(tmp_path / "disk" / "deep")
    for home in ("ours", "theirs"):
        spool = tmp_path / home / "spool" / run / "localhost"
        marks = {"HVD_ELASTIC_RUN_ID": run, "HVD_ELASTIC_SPOOL": str(spool)}
        processes[home] = subprocess.Popen(["sleep", "600"], env={**os.environ, **marks})
    try:
        (result,) = kill_run([Host("localhost")], Target(run))
        assert [process.pid for process in result.answer.processes] == [processes["ours"].pid]
        (line,) = result.answer.others
        assert f"process {processes['theirs'].pid} " in line
        assert str(tmp_path / "theirs") in line
        assert processes["theirs"].poll() is None
    finally:
        end(processes.values())


def test_a_process_of_a_run_on_ray_or_spark_is_of_the_callers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of runs of such a host is made for the run, and is no other home."""
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "ours"))
    run = f"run-{uuid.uuid4().hex[:8]}"
    folder = tmp_path / "hvd_elastic-host-1"
    marks = {VARIABLE: run, SPOOL: str(folder / "spool" / run / "a"), FOLDER_VARIABLE: str(folder)}
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, **marks})
    try:
        (result,) = kill_run([Host("localhost")], Target(run))
        assert [each.pid for each in result.answer.processes] == [process.pid]
        assert list(result.answer.others) == []
    finally:
        end([process])


def end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
