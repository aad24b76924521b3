"""An agent is found by the next one of its run and host, however long their names are."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.agent import failover
from hvd_elastic.agent.failover import call_predecessor, listen_for_successors, read_caller
from hvd_elastic.agent.spool import Spool
from hvd_elastic.errors import RunError
from hvd_elastic.wire import messages as msg
from tests.paths import LIMIT_S
from tests.unit.wire.wire_samples import leader_hello

RUN = "resnet50-imagenet-batch4096-lr0.1-wd1e-4-seed0-" + 17 * "x"
HOST = ".".join(["ip-10-0-123-45", *("a" * 63,) * 3, "internal.example.com"])


def test_agents_of_long_names_below_a_long_home_find_each_other(tmp_path: Path) -> None:
    spool = tmp_path.joinpath(*["a-long-folder-of-a-home" * 8] * 3, "spool", RUN, HOST)
    spool.mkdir(parents=True)
    with listen_for_successors(spool):
        with pytest.raises(RunError, match="another agent of this run"):
            listen_for_successors(spool)
    listen_for_successors(spool).close()


def test_who_calls_an_agent_that_ends_waits_for_its_end() -> None:
    """If the connection were closed before, the caller would kill the agent."""
    connection, caller = socket.socketpair()
    number = connection.fileno()

    async def end() -> None:
        reading = asyncio.ensure_future(read_caller(connection))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(end())
    caller.setblocking(False)
    with caller, pytest.raises(BlockingIOError):
        caller.recv(1)
    os.close(number)


# An agent that answers after a while.
BUSY = """
import sys, time
from pathlib import Path
from hvd_elastic.agent.failover import listen_for_successors
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import encode
door = listen_for_successors(Path(sys.argv[1]))
door.setblocking(True)
print(flush=True)
connection, _ = door.accept()
time.sleep(float(sys.argv[2]))
connection.sendall(encode(msg.Refused(msg.LeaderIdentity("unit", "first", "a test", 5.0))))
time.sleep(3600)
"""


@pytest.mark.parametrize("take_over", [True, False])
def test_who_takes_over_waits_longer_for_a_busy_agent_than_who_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take_over: bool
) -> None:
    monkeypatch.setattr(failover, "_ANSWER_S", 0.2)
    command = [sys.executable, "-c", BUSY, str(tmp_path), "1" if take_over else "3600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        answer = call_predecessor(tmp_path, leader_hello(take_over=take_over), b"", 1)
        agent.terminate()
    assert isinstance(answer, msg.Refused) == take_over
    assert agent.returncode == (-signal.SIGTERM if take_over else -signal.SIGKILL)


@pytest.mark.parametrize("has_descriptor", [True, False])
def test_an_agent_that_was_killed_has_ended_before_its_place_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_descriptor: bool
) -> None:
    """On a busy host it ends late."""
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda *told: threading.Timer(0.3, kill, told).start())
    monkeypatch.setattr(failover, "_ANSWER_S", 0.2)
    monkeypatch.setattr(failover, "_END_S", LIMIT_S)
    if not has_descriptor:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    command = [sys.executable, "-c", BUSY, str(tmp_path), "3600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        assert call_predecessor(tmp_path, leader_hello(), b"", 1) is None
        listen_for_successors(tmp_path).close()


def test_an_agent_that_ends_removes_its_socket_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds none uses the folder at once."""
    folder, seen, rmtree = tmp_path / "spool" / RUN / "node1", list[list[str]](), shutil.rmtree
    (folder / "saved").mkdir(parents=True)
    (folder / "run.json").touch()

    def look(path: str | Path, **told: Any) -> None:
        if path == folder:
            seen.append([each.name for each in folder.iterdir()])
        rmtree(path, **told)

    monkeypatch.setattr(shutil, "rmtree", look)
    with listen_for_successors(folder):
        Spool(folder).remove()
    assert seen == [["agent"]]
    assert not (tmp_path / "spool").exists()
