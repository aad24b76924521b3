"""Hosts that are waited for: real host processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hvd_elastic.engines.dial_in.hosts import DialInHosts, HostProcess
from hvd_elastic.hosts.hostfile import parse_hostfile

LONG_S = 60.0


@pytest.mark.parametrize(("wanted", "calm_s"), [(2, 0.0), (3, 0.5)])
def test_every_host_that_was_waited_for_is_in_the_hostfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int, calm_s: float
) -> None:
    hosts = DialInHosts(tmp_path / "hosts", "127.0.0.1", pytest.fail)
    begun, write = threading.Event(), hosts.dial_in._changed

    def slow() -> None:  # as the thread of a host on a busy machine
        begun.wait(LONG_S)
        write()

    monkeypatch.setattr(hosts.dial_in, "_changed", slow)
    processes = [HostProcess(hosts.dial_in.invitation, name, 1) for name in "ab"]
    try:
        hosts.wait_for(wanted, lambda: None, calm_s, 2, LONG_S)
        assert {host.name for host in parse_hostfile(tmp_path / "hosts")} == {"a", "b"}
    finally:
        begun.set()
        for process in processes:
            process.close()
        hosts.close()
