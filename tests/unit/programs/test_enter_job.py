"""The shell that is like a process of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hvd_elastic.hosts.remote_python import PROGRAMS, program_text
from tests import other_user
from tests.paths import LIMIT_S


def test_it_is_like_a_process_of_the_run(tmp_path: Path) -> None:
    assert entered(tmp_path, None) == f"ours in {tmp_path}"


@other_user.needs_root
def test_what_another_user_says_is_of_the_run_is_not_taken(tmp_path: Path) -> None:
    assert entered(tmp_path, other_user.UID) == f"ours in {tmp_path}"


def entered(folder: Path, first: int | None) -> str:
    """Return what the shell says, with a process of a user that is older than the one of ours."""
    run = f"run-{os.getpid()}"
    marks = {**os.environ, "HVD_ELASTIC_RUN_ID": run, "HVD_ELASTIC_HOST": "a"}
    started = []
    try:
        if first is not None:
            variables = {**marks, "WHO": "theirs"}
            started.append(subprocess.Popen(["sleep", "600"], env=variables, cwd="/", user=first))
        variables = {**marks, "WHO": "ours"}
        started.append(subprocess.Popen(["sleep", "600"], env=variables, cwd=folder))
        done = subprocess.run(
            [sys.executable, "-c", program_text(f"{PROGRAMS}.enter_job"), run, "a"],
            env={**os.environ, "SHELL": "/bin/sh"},
            input="echo $WHO in $PWD${HVD_ELASTIC_RUN_ID}\n",
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interactive shell waits for the terminal to be its own
            timeout=LIMIT_S,
        )
    finally:
        for process in started:
            process.kill()
            process.wait()
    return done.stdout.strip()


def test_a_run_without_a_process_is_an_error() -> None:
    program = [sys.executable, "-c", program_text(f"{PROGRAMS}.enter_job"), "no-run", "a"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 1
    assert "run no-run has no process on host a" in done.stderr
