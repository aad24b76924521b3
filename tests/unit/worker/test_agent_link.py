"""A worker whose agent sends what is no message."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests import other_user
from tests.paths import LIMIT_S

ROOT = Path(__file__).resolve().parents[3]

WORKER = """
import os, socket, sys, threading
from hvd_elastic.worker.agent_link import AgentLink
name, sent = sys.argv[1], bytes.fromhex(sys.argv[2])
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + name)
listener.listen()
link = AgentLink(name, "w0", lambda generation: None)
agent, _ = listener.accept()
agent.sendall(sent)
instruction = link.wait(0)
print(type(instruction).__name__, link.aborted(3))
"""

HAS_A_THREAD = """
import socket, sys, threading
from hvd_elastic.worker import agent_link
agent_link._THREADS_END_S = 0.1
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[1])
listener.listen()
link = agent_link.AgentLink(sys.argv[1], "w0", lambda generation: None)
agent, _ = listener.accept()
def read():
    for line in agent.makefile():
        if "warning" in line:
            print(line)
            return
threading.Thread(target=read, name="logs").start()
"""


LOADS = """
import json, socket, sys, threading
from hvd_elastic.worker.agent_link import AgentLink
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[1])
listener.listen()
link = AgentLink(sys.argv[1], "w0", lambda generation: None)
agent, _ = listener.accept()
asked = []
def answer():
    for line in agent.makefile():
        message = json.loads(line)
        if message["kind"] == "saved_wanted":
            asked.append(message["name"])
            for name in ("a.pt", "b.pt"):  # the first one was asked for long ago
                told = {"kind": "saved_brought", "name": name, "path": "/" + name}
                agent.sendall(json.dumps(told).encode() + b"\\n")
threading.Thread(target=answer, daemon=True).start()
print(link.bring_saved("b.pt").path, len(asked))
"""


def worker_that_is_sent(
    data: bytes, program: str = WORKER, name: str = ""
) -> subprocess.CompletedProcess[str]:
    name = name or f"hvd_elastic/unit/{secrets.token_hex(8)}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("HVD_ELASTIC_LOCAL_RANK", None)
    return subprocess.run(
        [sys.executable, "-c", program, name, data.hex()],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LIMIT_S,
    )


def test_a_worker_does_what_its_agent_says() -> None:
    done = worker_that_is_sent(b'{"kind":"abort","generation":3}\n{"kind":"hold"}\n')
    assert (done.returncode, done.stdout) == (0, "Hold True\n"), done.stderr


def test_a_late_answer_of_another_file_is_no_answer() -> None:
    done = worker_that_is_sent(b"", LOADS)
    assert done.stdout == "/b.pt 1\n", done.stderr


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80\x04.\n", "the agent sent a line that is not JSON"),
        (b'{"kind":"steal"}\n', "the agent sent a message with kind 'steal'; valid are abort, "),
        (b'{"kind":"abort","generation":"3"}\n', "Expected `int`, got `str`"),
    ],
)
def test_a_worker_ends_where_its_agent_sends_what_is_no_message(data: bytes, words: str) -> None:
    done = worker_that_is_sent(data)
    assert done.returncode == 1
    assert words in done.stderr
    assert "This worker ends" in done.stderr


def test_a_worker_ends_if_the_reading_of_its_messages_fails() -> None:
    """As it once did by an error in another thread; the worker waited for ever."""
    done = worker_that_is_sent(
        b"",
        WORKER.replace(
            "from hvd", "from hvd_elastic.worker import agent_link\nfrom hvd", 1
        ).replace("link = ", "agent_link.MessageDecoder = None\nlink = "),
    )
    assert done.returncode == 1
    assert "cannot be read. This worker ends" in done.stderr


@other_user.needs_root
def test_a_worker_says_nothing_to_another_user_who_holds_the_name_of_its_agent() -> None:
    name = f"hvd_elastic/unit/{secrets.token_hex(8)}"
    alone = WORKER.replace("listener.bind", "0 and listener.bind").replace("listener.listen()", "")
    with other_user.Holder(f"@{name}") as holder:
        done = worker_that_is_sent(b"", alone, name)
        assert holder.got() == "nothing"
    assert done.returncode == 1
    assert f"StrangerError: {other_user.WORDS} holds the local socket {name}" in done.stderr


def test_threads_that_outlive_the_script_are_told() -> None:
    done = worker_that_is_sent(b"", HAS_A_THREAD)
    assert "the script has ended, and Python waits for its threads (logs)" in done.stdout
