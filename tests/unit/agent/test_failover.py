"""An agent is found by the next one of its run and host, however long their names are."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.agent import failover
from hvd_elastic.agent.failover import call_predecessor, listen_for_successors
from hvd_elastic.errors import RunError
from hvd_elastic.wire import messages as msg
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


# An agent that answers after a second.
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
time.sleep(1)
connection.sendall(encode(msg.Refused(msg.LeaderIdentity("unit", "first", "a test", 5.0))))
time.sleep(3600)
"""


@pytest.mark.parametrize("take_over", [True, False])
def test_who_takes_over_waits_longer_for_a_busy_agent_than_who_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take_over: bool
) -> None:
    monkeypatch.setattr(failover, "_ANSWER_S", 0.2)
    command = [sys.executable, "-c", BUSY, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        answer = call_predecessor(tmp_path, leader_hello(take_over=take_over), b"", 1)
        agent.terminate()
    assert isinstance(answer, msg.Refused) == take_over
    assert agent.returncode == (-signal.SIGTERM if take_over else -signal.SIGKILL)
