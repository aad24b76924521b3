from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from hvd_elastic.cluster.kept import KEY_BYTES, KeptGoneError, KeptHost, KeptHosts
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.programs.keep_wire import FAILED, GONE, LIVE, frame

TAKERS = (lambda _: None,) * 3


def test_a_reader_that_fails_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: failed.set())
    (tmp_path / "config").touch()
    ours, keeper = socket.socketpair()
    keeper.sendall(frame(LIVE))
    with keeper, KeptHosts(ours, SshOptions(tmp_path / "config"), None) as hosts:
        host = KeptHost(hosts, Host("node1"), bytes(KEY_BYTES))

        running = host.hold((), *TAKERS)
        keeper.sendall(frame(FAILED, 99))
        assert running.wait(60) == -1
        assert running.wait_drained(60)
        with pytest.raises(KeptGoneError):
            host.hold((), *TAKERS)
        assert failed.wait(60)


def test_what_is_stopped_and_turns_out_to_be_gone_is_not_begun_anew(tmp_path: Path) -> None:
    """A host that died silently: the time limit is over by then, and another try has none left."""
    (tmp_path / "config").touch()
    ours, keeper = socket.socketpair()
    keeper.sendall(frame(LIVE))
    with keeper, KeptHosts(ours, SshOptions(tmp_path / "config"), None) as hosts:
        running = KeptHost(hosts, Host("node1"), bytes(KEY_BYTES)).hold((), *TAKERS)
        with pytest.raises(TimeoutError):
            running.wait(0.01)
        keeper.sendall(frame(GONE, running.number))
        assert running.stop() is False
