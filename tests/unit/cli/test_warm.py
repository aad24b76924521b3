"""A call through a keeper, where the test is the keeper."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.cluster import keep_socket
from tests.ssh.tools import wait_until

PROGRAM = "from hvd_elastic.cli.start import runclust; runclust()"


def test_an_interrupt_counts_where_the_keeper_ends_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    (tmp_path / "hosts").write_text("localhost\n")
    folder = keep_socket.open_folder(make=True)
    assert folder is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = keep_socket.socket_name(keep_socket.identity())
        listener.bind(keep_socket.socket_path(folder, name))
        listener.listen()
        call = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "hosts"), "echo it ran"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        sock, _ = listener.accept()
        with sock:
            _, descriptors = keep_socket.read_request(sock)
            for descriptor in descriptors:
                os.close(descriptor)
            stat = Path(f"/proc/{call.pid}/stat")
            wait_until(lambda: stat.read_text().rpartition(") ")[2][0] == "S", "the call's waiting")
            call.send_signal(signal.SIGINT)
            assert sock.recv(1) == bytes([signal.SIGINT])
    os.close(folder)
    out, err = call.communicate(timeout=60)
    assert (call.returncode, out, err) == (130, "", "interrupted\n")
