from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_keeper_that_nobody_calls_ends() -> None:
    program = (
        "import time; from hvd_elastic.cluster.keeper import Keeper; Keeper(0.1); time.sleep(99)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


CALLS = """
import json, socket, sys, time
from hvd_elastic.cluster import keeper
from hvd_elastic.hosts.programs.keep_wire import OPEN, Frames, frame

keeper.START_S = 0.2
kept = keeper.Keeper(99)
wanted = {"key": "00", "host": ["localhost", None, None], "config_path": sys.argv[1],
          "identity": None, "connect_timeout_s": 9, "keep_s": float(sys.argv[2])}
for number in (1, 2):
    ours, theirs = socket.socketpair()
    kept.admit(theirs)
    frames, found = Frames(), []
    ours.sendall(frame(OPEN, number, json.dumps(wanted).encode()))
    while len(found) < 2:
        found += frames.feed(ours.recv(1000))
    print(found[1], flush=True)
    ours.close()
if wanted["keep_s"] > 9:
    kept.stop(theirs)
time.sleep(99)
"""


@pytest.mark.parametrize(
    ("python", "keep_s"), [("exit 1", 99), ("exec sleep 5", 99), ("exit 1", 0.1)]
)
def test_where_no_agent_can_be_none_is_tried_again_while_hosts_are_kept(
    tmp_path: Path, python: str, keep_s: float
) -> None:
    (tmp_path / "config").touch()
    program = tmp_path / "python3"
    program.write_text(f"#!/bin/sh\necho started >> {tmp_path}/starts\n{python}\n")
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", CALLS, str(tmp_path / "config"), str(keep_s)],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert [line.count("NotKeptError") for line in done.stdout.splitlines()] == [1, 1]
    if keep_s > 9:
        assert (tmp_path / "starts").read_text() == "started\n"
