"""What is recorded of a Ray cluster, and how its processes are found on a host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.engines.ray import nodes
from hvd_elastic.engines.ray.nodes import ClusterRecord, NodeSettings, RayCluster
from hvd_elastic.errors import HostUnreachableError, RunError
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.programs import ray_node
from hvd_elastic.programs.processes import descendants, read


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterRecord]:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    record = ClusterRecord(tmp_path / "hosts")
    with record.locked(lambda: None):
        yield record


def test_a_recorded_cluster_is_read_back_and_only_its_user_reads_the_token(
    record: ClusterRecord,
) -> None:
    cluster = RayCluster(
        hosts=(Host("gpu1", slots=8),), address="10.0.0.1:4321", client="10.0.0.1:4322"
    )
    record.write(cluster)
    assert record.require() == cluster
    assert cluster.head == Host("gpu1", slots=8)
    assert record.token_file.read_text() == cluster.token
    assert record.token_file.stat().st_mode & 0o777 == 0o600
    assert cluster.token not in repr(cluster)
    record.forget()
    with pytest.raises(RunError, match="hvd-elastic ray up"):
        record.require()


def test_a_damaged_record_is_named(record: ClusterRecord) -> None:
    record.write(RayCluster())
    path = record.token_file.with_name("cluster.json")
    path.write_text("{")
    with pytest.raises(RunError, match=str(path)):
        record.read()


def bring(record: ClusterRecord, *names: str) -> list[str]:
    """Return the hosts that have a node now, or were found to have one."""
    hosts = [Host(name) for name in names]
    found = nodes.bring_up(record, hosts, SshOptions(), NodeSettings("python3"), 4)
    return [result.host.name for result in found if result.ok]


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of hosts that cannot be reached; ``here`` is this machine, all others start nodes."""
    found: set[str] = set()

    def ask(_: object, host: Host, *__: object) -> dict[str, Any]:
        if host.name in found:
            raise HostUnreachableError(f"host {host.name}: no route")
        address = "127.0.0.1" if host.name == "here" else f"10.0.0.{host.name}"
        return {"address": f"{address}:1", "ray": "2.52", "python": "3.11", "new": True}

    monkeypatch.setattr(nodes, "_ask", ask)
    monkeypatch.setattr(nodes, "is_local", lambda host, _: host.name == "here")
    monkeypatch.setattr(nodes, "own_address_towards", lambda *_: "10.0.0.9")
    return found


def test_a_cluster_starts_elsewhere_after_a_first_host_that_was_not_reached(
    record: ClusterRecord, unreachable: set[str]
) -> None:
    unreachable |= {"1", "3"}
    assert bring(record, "1", "2", "3") == []
    assert bring(record, "2", "1", "3") == ["2"]
    cluster = record.require()
    assert (cluster.head.name, cluster.address) == ("2", "10.0.0.2:1")
    unreachable.remove("3")
    assert bring(record, "3", "2") == ["2", "3"]  # the head stays
    assert record.require().head.name == "2"


def test_a_head_that_was_started_alone_takes_no_hosts_that_cannot_reach_it(
    record: ClusterRecord, unreachable: set[str]
) -> None:
    assert bring(record, "here") == ["here"]
    assert bring(record, "here") == ["here"]
    with pytest.raises(RunError, match="was started alone, at 127"):
        bring(record, "here", "2")


def test_slots_of_the_hostfile_are_a_resource() -> None:
    settings = NodeSettings("python3", store_bytes=1)
    least = settings.options(Host("gpu1", slots=8, cpus=32))
    assert least == ['--resources={"slots": 8}', "--num-cpus=32", "--object-store-memory=78643200"]
    reader = Host("cpu1", slots=0, labels=("input",))
    assert NodeSettings("python3").options(reader) == []


def sleeping(mark: str | None) -> subprocess.Popen[bytes]:
    """A process that starts another, as Ray's do."""
    code = "import subprocess; subprocess.run(['sleep', '60'], env={})"
    environment = {**os.environ, **({} if mark is None else {ray_node.MARK: mark})}
    started = subprocess.Popen([sys.executable, "-c", code], env=environment)
    while not descendants([started.pid]):
        pass
    return started


def test_end_ends_the_processes_of_one_cluster_with_their_children(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex  # other suites may run on this machine
    ours, other, unmarked = sleeping(mark), sleeping(f"not {mark}"), sleeping(None)
    try:
        child = descendants([ours.pid])[0]
        request: dict[str, Any] = {"cluster": mark, "folder": str(tmp_path / "one")}
        (tmp_path / "one").mkdir()
        assert ray_node.describe_node({**request, "is_head": True})["state"] == "broken"
        ended = ray_node.end_cluster(request)
        assert ended == {"ended": 2, "left": []}
        assert not read(child.pid, "environ")
        assert not (tmp_path / "one").exists()
        assert other.poll() is None
        assert unmarked.poll() is None
        assert ray_node.describe_node({**request, "is_head": True})["state"] == "down"
    finally:
        for process in (ours, other, unmarked):
            for each in descendants([process.pid]):
                os.kill(each.pid, 9)
            process.kill()
            process.wait()


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("end", [subprocess.TimeoutExpired("ray", 1.0), Interrupted()])
def test_a_start_that_is_slow_leaves_nothing_and_one_that_is_interrupted_its_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise end

    monkeypatch.setattr(ray_node, "why_unusable", str)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="9.9"))
    monkeypatch.setattr(subprocess, "run", start)
    folder = tmp_path / "node"
    request: dict[str, Any] = {"cluster": uuid.uuid4().hex, "folder": str(folder), "token": ""}
    request |= {"head": None, "port": 0, "address": "127.0.0.1", "options": [], "env": {}}
    if isinstance(end, Interrupted):
        with pytest.raises(Interrupted):
            ray_node.start_node(request)
        there = [SimpleNamespace(pid=os.getpid())]
        monkeypatch.setattr(ray_node, "find", lambda _: there)
        monkeypatch.setattr(ray_node, "is_program", lambda *_: True)
        again = ray_node.start_node(request)
        assert (again["ray"], again["new"]) == ("9.9", False)
        (folder / ray_node.STARTED).unlink()
        assert "hvd-elastic ray down" in ray_node.start_node(request)["error"]
    else:
        assert ray_node.start_node(request) == {"error": "ray start has not ended in 120 s"}
        assert not folder.exists()


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        ray_node.free_port("127.0.0.1", taken.getsockname()[1])
