"""What is started is ended, whatever it does about it; each time in a supervisor of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hvd_elastic.agent import supervisor

TIMEOUT_S = 60


def supervise(body: str, timeout_s: float = TIMEOUT_S) -> str:
    """Run ``body`` in a process that adopts orphans; a test must not become one itself."""
    program = (
        "import os, signal, subprocess, sys, time\n"
        "import psutil\n"
        "from hvd_elastic.agent import supervisor\n"
        "supervisor.become_subreaper()\n"
        "children = lambda: psutil.Process().children(recursive=True)\n"
        "def start(text, **env):\n"
        "    read, write = os.pipe()\n"
        "    started = supervisor.spawn([sys.executable, '-S', '-c', text], cwd='/',\n"
        "                               env={**os.environ, **env}, output=write)\n"
        "    os.close(write)\n"
        "    return started, os.fdopen(read)\n"
    ) + textwrap.dedent(body)
    root = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_daemon_that_left_its_session_is_found_and_ended() -> None:
    said = supervise(
        """
        daemon = '''if True:
            import os, time
            if os.fork(): os._exit(0)
            os.setsid()
            if os.fork(): os._exit(0)
            os.environ.clear()
            print(os.getpid(), flush=True)
            time.sleep(1000)
        '''
        started, output = start(daemon)
        pid = int(output.readline())
        started.wait()
        assert pid in {p.pid for p in children()}
        supervisor.end_processes(children, 5)
        print(psutil.pid_exists(pid) and psutil.Process(pid).status() != 'zombie')
        """
    )
    assert said == "False"


def test_who_does_not_hear_term_is_killed_and_the_stopped_are_woken() -> None:
    said = supervise(
        """
        deaf = "import signal, time; signal.signal(15, 1); print(1, flush=True); time.sleep(1000)"
        tidy = "import signal, sys, time; signal.signal(15, lambda *_: (print('bye', flush=True),"
        tidy += "sys.exit())); print(1, flush=True); time.sleep(1000)"
        one, first = start(deaf)
        two, second = start(tidy)
        first.readline(), second.readline()
        two.send_signal(signal.SIGSTOP)
        count = supervisor.end_processes(children, 0.5)
        print(count, children(), second.readline().strip())
        """
    )
    assert said == "2 [] bye"


def test_workers_die_with_the_agent_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = (
        "import os, sys, signal\n"
        "from hvd_elastic.agent import supervisor\n"
        "p = supervisor.spawn([sys.executable, '-S', '-c', 'import time; time.sleep(1000)'],\n"
        "                     cwd='/', env=dict(os.environ), output=1)\n"
        f"open({str(note)!r}, 'w').write(str(p.pid))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=TIMEOUT_S)
    assert done.returncode == -signal.SIGKILL
    pid = int(note.read_text())
    deadline = time.monotonic() + TIMEOUT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_marks_find_processes_but_never_who_looks() -> None:
    said = supervise(
        """
        one, first = start("print(1, flush=True); import time; time.sleep(1000)", A="1", B="2")
        two, second = start("print(1, flush=True); import time; time.sleep(1000)", A="1", B="3")
        first.readline(), second.readline()
        os.environ.update(A="1", B="2")
        found = {p.pid for p in supervisor.marked_processes({"A": "1", "B": "2"})}
        print(found == {one.pid})
        supervisor.end_processes(children, 1)
        """
    )
    assert said == "True"


def test_a_command_that_is_not_there_is_an_error_of_the_system() -> None:
    with pytest.raises(FileNotFoundError):
        supervisor.spawn(["/no/such/program"], cwd="/", env={}, output=1)
    with pytest.raises(FileNotFoundError):
        supervisor.spawn([sys.executable], cwd="/no/such/folder", env={}, output=1)
