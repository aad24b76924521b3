"""Processes are found and ended, whatever they do about it; each time below one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil

from hvd_elastic.programs.processes import (
    environment,
    is_alive,
    own_ancestors,
    own_delay_s,
    read_process,
    run_delay_s,
)

TIMEOUT_S = 60


def supervise(body: str, timeout_s: float = TIMEOUT_S) -> str:
    """Run ``body`` in a process that adopts orphans; a test must not become one itself."""
    program = (
        "import os, signal, subprocess, sys, time, types\n"
        "import psutil\n"
        "from hvd_elastic.programs.hold_command import become_subreaper\n"
        "from hvd_elastic.programs.processes import *\n"
        "become_subreaper()\n"
        "def start(text, **env):\n"
        "    read, write = os.pipe()\n"
        "    started = subprocess.Popen([sys.executable, '-S', '-c', text], stdout=write,\n"
        "                               env={**os.environ, **env}, start_new_session=True)\n"
        "    os.close(write)\n"
        "    return started, os.fdopen(read)\n"
        "def count_time_without(process):\n"
        "    'No time passes for end_processes() before the process, however slow, has ended.'\n"
        "    from hvd_elastic.programs import processes\n"
        "    last = [0.0]\n"
        "    def now():\n"
        "        if process.poll() is None: last[0] = time.monotonic()\n"
        "        return time.monotonic() - last[0]\n"
        "    processes.time = types.SimpleNamespace(monotonic=now, sleep=time.sleep)\n"
        "    return processes, now\n"
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
        assert pid in {p.pid for p in descendants()}
        end_processes(descendants, 5)
        print(psutil.pid_exists(pid) and psutil.Process(pid).status() != 'zombie')
        """
    )
    assert said == "False"


def test_who_does_not_hear_term_is_killed_and_the_stopped_are_woken() -> None:
    said = supervise(
        """
        deaf = "import signal, time; signal.signal(15, 1); print(1, flush=True); time.sleep(1000)"
        # os.write: it may be stopped inside of print, which cannot be called twice at once.
        tidy = "import os, signal, sys, time; signal.signal(15, lambda *_: (os.write(1, b'bye'),"
        tidy += "sys.exit())); print(1, flush=True); time.sleep(1000)"
        one, first = start(deaf)
        two, second = start(tidy)
        first.readline(), second.readline()
        two.send_signal(signal.SIGSTOP)
        count_time_without(two)
        ended = end_processes(descendants, 2)
        print(sorted(ended.values()), descendants(), second.readline().strip())
        """
    )
    assert said == "['KILL', 'TERM'] [] bye"


def test_a_pause_of_the_machine_is_no_time_to_end_in() -> None:
    """An hour passes after TERM: who needs a moment for it is not killed, and who is deaf is."""
    said = supervise(
        """
        begins = "import os, signal, sys, time; signal.signal(15, "
        ends = "); print(1, flush=True); time.sleep(1000)"
        slow = begins + "lambda *_: (time.sleep(0.5), os.write(1, b'bye'), sys.exit())" + ends
        one, first = start(begins + "1" + ends)
        two, second = start(slow)
        first.readline(), second.readline()
        processes, now = count_time_without(two)
        paused, plain = [], send
        def send_and_pause(process, number):
            plain(process, number)
            if number == signal.SIGCONT: paused.append(3600.0)
        processes.send = send_and_pause
        processes.time.monotonic = lambda: now() + sum(paused)
        ended = end_processes(descendants, 4)
        print(sorted(ended.values()), descendants(), second.readline().strip())
        """
    )
    assert said == "['KILL', 'TERM'] [] bye"


def test_a_process_is_what_proc_says_of_it() -> None:
    own, known = read_process(os.getpid()), psutil.Process()
    assert own is not None
    assert (own.parent, own.session) == (os.getppid(), os.getsid(0))
    assert abs(own.cpu_s - sum(known.cpu_times()[:2])) < 1.0
    assert is_alive(own)
    assert not is_alive(own._replace(started=own.started - 1))
    assert own_ancestors() == {os.getpid(), *(parent.pid for parent in known.parents())}
    assert environment(os.getpid())["PATH"] == known.environ()["PATH"]


def test_a_signal_for_an_earlier_process_with_the_same_id_is_not_sent() -> None:
    said = supervise(
        """
        one, first = start("print(1, flush=True); import time; time.sleep(1000)")
        first.readline()
        (process,) = descendants()
        send(process._replace(started=process.started - 1), signal.SIGKILL)
        print(one.poll())
        end_processes(descendants, 0)
        """
    )
    assert said == "None"


def test_children_of_a_process_whose_first_thread_has_ended_are_found() -> None:
    """Such a process is a zombie for /proc, as each is for a moment while its threads end."""
    said = supervise(
        """
        parent = '''if True:
            import ctypes, os, threading, time
            child = os.fork()
            if child == 0: time.sleep(1000)
            threading.Thread(target=time.sleep, args=(1000,)).start()
            print(child, flush=True)
            ctypes.PyDLL(None).pthread_exit(None)
        '''
        started, output = start(parent)
        child = int(output.readline())
        while read_process(started.pid) is not None:
            time.sleep(0.01)
        assert psutil.Process(child).ppid() == started.pid
        assert [p.pid for p in descendants()] == [child]
        end_processes(descendants, 5)
        print(psutil.pid_exists(child) and psutil.Process(child).status() != 'zombie')
        started.kill()
        """
    )
    assert said == "False"


def test_processes_that_share_a_core_wait_for_it() -> None:
    """Two that compute have half of it each; one that sleeps waits for little."""
    said = supervise(
        """
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        both = [start("print(1, flush=True)\\nwhile True: pass") for _ in range(2)]
        asleep = start("import time; print(1, flush=True); time.sleep(1000)")
        for _, output in [*both, asleep]: output.readline()
        before = [run_delay_s(each.pid) for each, _ in [*both, asleep]]
        time.sleep(1.0)
        after = [run_delay_s(each.pid) for each, _ in [*both, asleep]]
        end_processes(descendants, 0)
        both[0][0].wait()
        print(*(now - then for now, then in zip(after, before)), run_delay_s(both[0][0].pid))
        """
    )
    first, second, asleep, ended = map(float, said.split())
    assert first + second > 0.8  # at each moment one of them waits
    assert asleep < min(first, second)
    assert ended == 0.0


def test_a_thread_knows_its_own_wait_for_a_core() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(own_delay_s()))
    thread.start()
    thread.join()
    assert 0.0 <= found[0] <= time.monotonic()
    own_s = own_delay_s()  # first: it grows
    assert 0.0 < own_s <= run_delay_s(os.getpid())
