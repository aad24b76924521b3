"""How workers are started, and what of them is heard."""

from __future__ import annotations

import asyncio
import getpass
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.agent.workers import Workers
from hvd_elastic.programs.processes import read_process
from hvd_elastic.run_events import Warned
from hvd_elastic.wire import messages as msg
from tests import other_user
from tests.other_user import open_folder as open_folder
from tests.paths import LIMIT_S
from tests.unit.wire.wire_samples import leader_hello
from tests.waiting import until

TIMEOUT_S = LIMIT_S


def test_workers_die_with_the_agent_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = (
        "import os, sys, signal\n"
        "from hvd_elastic.agent.worker_start import start_process\n"
        "p = start_process([sys.executable, '-S', '-c', 'import time; time.sleep(1000)'],\n"
        "                   '/', dict(os.environ), 0, 1)\n"
        f"open({str(note)!r}, 'w').write(str(p))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=TIMEOUT_S)
    assert done.returncode == -signal.SIGKILL
    pid = int(note.read_text())
    until(lambda: read_process(pid) is None)


def say_of_caches(tmp_path: Path, shared: Path) -> tuple[list[str], list[str]]:
    """What two workers print of their folders, and the warnings of their agent."""
    program = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'], os.environ['TMPDIR'])"
    told: list[msg.AgentToLeader] = []

    async def start() -> None:
        env = {"TMPDIR": str(shared)}
        hello = leader_hello(command=(sys.executable, "-S", "-c", program), env=env)
        workers = Workers(hello, tmp_path, None, told.append, lambda: True)
        for number in range(2):
            workers.start(msg.StartWorker(f"w{number}", 0, 1))
            worker = workers.get(f"w{number}")
            assert worker is not None
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            await workers.report_end(worker, 0, out_of_memory=False)
        workers.close()

    asyncio.run(start())
    printed = "".join(each.data for each in told if isinstance(each, msg.Log)).split()
    return printed, [each.message for each in told if isinstance(each, msg.AgentWarning)]


def test_compiled_code_is_kept_where_the_user_keeps_caches_and_no_empty_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "shared").mkdir()
    printed, warnings = say_of_caches(tmp_path, tmp_path / "shared")
    assert warnings == []
    assert Path(printed[0]).parent == tmp_path / "cache" / "hvd_elastic"
    assert printed[2] == printed[0]
    assert not Path(printed[0]).exists()


@other_user.needs_root
def test_workers_do_not_run_what_another_user_has_put_where_compiled_code_is_kept(
    open_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch unpickles what it finds there: below TMPDIR by its own choice, so before ours."""
    open_folder.chmod(0o1777)

    def plant() -> None:
        for name in ("cache", f"torchinductor_{getpass.getuser()}"):
            (open_folder / name).mkdir()
            (open_folder / name).chmod(0o777)

    other_user.call(plant)
    monkeypatch.setenv("XDG_CACHE_HOME", str(open_folder / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    printed, warnings = say_of_caches(tmp_path, open_folder)
    assert len(printed) == 4
    assert Path(printed[0]).parent == Path(printed[1]), "in the folder of the run, which is ours"
    assert len(warnings) == 1
    assert f"{open_folder / 'cache'} belongs to user nobody" in warnings[0]


LAST_WORDS = """
import json, os, socket, time
s = socket.socket(socket.AF_UNIX)
s.connect("\\0" + os.environ["HVD_ELASTIC_AGENT"])
def say(**m): s.sendall(json.dumps(m).encode() + b"\\n")
say(kind="hello", worker=os.environ["HVD_ELASTIC_WORKER"], pid=os.getpid())
s.recv(1)
time.sleep(0.2)  # the agent is busy by now
for number in range(50): say(kind="warning", message=str(number))
say(kind="finished", progress=dict(step=7, epoch=0, position=0, examples=56))
"""


def test_the_last_words_of_a_worker_are_heard_though_it_was_spoken_to_meanwhile(
    tmp_path: Path,
) -> None:
    told: list[msg.AgentToLeader] = []

    async def finish() -> None:
        env = {"TMPDIR": str(tmp_path)}
        hello = leader_hello(command=(sys.executable, "-S", "-c", LAST_WORDS), env=env)
        workers = Workers(hello, tmp_path, None, told.append, lambda: True)
        await workers.listen()
        workers.start(msg.StartWorker("w0", 0, 1))
        worker = workers.get("w0")
        assert worker is not None
        worker.send(msg.SaveState())
        while worker.connection is None or worker.unsent:
            await asyncio.sleep(0.01)
        os.waitid(os.P_PID, worker.pid, os.WEXITED)  # as long as the agent reads nothing
        worker.send(msg.SaveState())
        await workers.report_end(worker, 0, out_of_memory=False)
        workers.close()

    asyncio.run(finish())
    *words, ended = [message for message in told if not isinstance(message, msg.Log)]
    assert isinstance(ended, msg.WorkerEnded)
    said = [word.message for word in words if isinstance(word, msg.WorkerSaid)]
    assert [type(word) for word in said] == [Warned] * 50 + [msg.Finished]


DIVIDED = """
import fcntl, os, struct, termios, time
text = "字".encode()
for piece in (text[:2], text[2:] + b"\\xff|", text[:1]):
    os.write(1, piece)
    while struct.unpack("i", fcntl.ioctl(1, termios.FIONREAD, bytes(4)))[0]:  # until it was read
        time.sleep(0.01)
"""


def test_a_character_that_two_reads_divide_stays_whole(tmp_path: Path) -> None:
    told: list[msg.AgentToLeader] = []

    async def run() -> None:
        env = {"TMPDIR": str(tmp_path)}
        hello = leader_hello(command=(sys.executable, "-S", "-c", DIVIDED), env=env)
        workers = Workers(hello, tmp_path, None, told.append, lambda: True)
        workers.start(msg.StartWorker("w0", 0, 1))
        worker = workers.get("w0")
        assert worker is not None
        while os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            await asyncio.sleep(0.01)
        await workers.report_end(worker, 0, out_of_memory=False)
        workers.close()

    asyncio.run(run())
    logs = [each.data for each in told if isinstance(each, msg.Log)]
    assert "".join(logs) == "字\ufffd|\ufffd", "only what is no UTF-8 is replaced"
    assert len(logs) > 1
