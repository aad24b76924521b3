"""Shards of several hosts come together, whatever is missing; hosts are folders here."""

from __future__ import annotations

import os
import queue
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.errors import CheckpointError, SshError
from hvd_elastic.launch.checkpoint_url import CheckpointUrl
from hvd_elastic.launch.checkpoints import (
    drop_shards,
    find_checkpoints,
    find_shards,
    newest_valid,
)
from hvd_elastic.launch.collector import CheckpointCollector
from hvd_elastic.launch.protocol import Message
from tests.unit.launch.test_checkpoints import spooled


class Host:
    """An agent and its disk, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.spool = folder
        self.spool.mkdir(parents=True)
        self.info: Message = {"spool": str(folder)}
        self.reachable = True

    def send(self, message: Message) -> None:
        assert message["op"] == "collected"
        drop_shards(self.spool, message["step"])

    def receive(self, remote: str, write: Callable[[bytes | memoryview], object]) -> None:
        if not self.reachable:
            raise SshError(f"host {self.spool.name}: the connection is lost")
        write(Path(remote).read_bytes())

    def put(self, local: Path, remote: str) -> None:
        if not self.reachable:
            raise SshError(f"host {self.spool.name}: the connection is lost")
        Path(remote).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(local, remote)

    def steps(self) -> list[tuple[int, int]]:
        return [(shard.step, shard.index) for shard in find_shards(self.spool)]


class Run:
    """A leader's loop with three hosts."""

    def __init__(self, folder: Path, place: str | None = None, **options: Any) -> None:
        self.folder = folder / "checkpoints"
        self.hosts = {name: Host(folder / name) for name in ("node0", "node1", "node2")}
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.events: list[Mapping[str, Any]] = []
        self.warnings: list[str] = []
        settings = {"keep": 2, "copies": 0, "resumed": False, **options}
        self.collector = CheckpointCollector(
            self.folder,
            place,
            agents=lambda: self.hosts,
            post=self.calls.put,
            emit=lambda _, fields: self.events.append(fields),
            warn=self.warnings.append,
            on_idle=lambda: None,
            **settings,
        )
        self.collector.check()

    def settle(self) -> None:
        """Run the loop until no checkpoint is on its way."""
        while self.collector.busy or not self.calls.empty():
            self.calls.get(timeout=30)()

    def written(self, step: int, *indices: int, count: int = 2) -> None:
        for index in indices:
            name = f"node{index}"
            shard = spooled(self.hosts[name].spool, step, index, count)
            said = {"shard": shard.manifest(), "seconds": 0.5, "blocked_s": 0.001 * (index + 1)}
            self.collector.written(name, self.hosts[name], said)

    def bring(self) -> str | None:
        found: list[str | None] = []
        self.collector.bring(self.hosts["node0"], "restore-1", found.append)
        while not found:
            self.calls.get(timeout=30)()
        return found[0]

    def steps(self) -> list[int]:
        return [info.step for info in find_checkpoints(self.folder)]


def test_a_checkpoint_is_there_when_all_shards_are(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.written(10, 0)
    run.settle()
    assert run.steps() == []
    run.written(10, 1)
    run.settle()
    assert run.steps() == [10]
    (event,) = run.events
    assert (event["step"], event["shards"], event["blocked_s"]) == (10, 2, 0.002)
    assert newest_valid(run.folder) is not None
    assert [host.steps() for host in run.hosts.values()] == [[], [], []]
    for step in (20, 30):
        run.written(step, 1, 0)
        run.settle()
    assert run.steps() == [30, 20]
    assert not run.warnings


def test_what_misses_a_shard_is_not_offered_and_goes_with_the_next(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.written(10, 0, 1)
    run.settle()
    run.written(20, 0)  # the rank of shard 1 was killed
    run.settle()
    assert run.steps() == [10]
    run.written(30, 0, 1)
    run.settle()
    assert run.steps() == [30, 10]
    assert run.hosts["node0"].steps() == []


def test_a_failure_costs_the_checkpoint_and_is_said_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.written(10, 0, 1)
    run.settle()
    run.hosts["node1"].reachable = False
    for step in (20, 30):
        run.written(step, 0, 1)
        run.settle()
    assert run.steps() == [10]
    (said,) = run.warnings
    assert said.startswith("the checkpoint of step 20 was not kept: host node1: the connection")
    assert len(list(run.folder.iterdir())) == 3, "what was fetched of it is gone"
    assert run.hosts["node0"].steps() == [(30, 0)], "the newest stays where it is"
    run.hosts["node1"].reachable = True
    run.written(40, 0, 1)
    run.settle()
    assert run.steps() == [40, 10]
    for _ in range(3):
        run.collector.failed("node1", "no checkpoint was written: /spool is full")
    assert run.warnings[1:] == ["host node1: no checkpoint was written: /spool is full"]


def test_copies_are_on_other_hosts_until_the_next_is_complete(tmp_path: Path) -> None:
    run = Run(tmp_path, copies=1)
    for step in (10, 20):
        run.written(step, 0, 1)
        run.settle()
    assert run.hosts["node0"].steps() == [(20, 0)]
    assert run.hosts["node1"].steps() == [(20, 0), (20, 1)]
    assert run.hosts["node2"].steps() == [(20, 1)]
    run.collector.end(succeeded=False)
    assert run.hosts["node2"].steps() == [(20, 1)]
    run.collector.end(succeeded=True)
    assert [host.steps() for host in run.hosts.values()] == [[], [], []]


def test_more_copies_than_hosts_are_said(tmp_path: Path) -> None:
    run = Run(tmp_path, copies=3)
    run.written(10, 0, 1)
    run.settle()
    assert run.warnings == [
        "a checkpoint has fewer copies than --checkpoint-copies 3: only 2 other hosts are up"
    ]


def test_a_resumed_run_takes_up_what_the_dead_leader_left_from_copies_too(tmp_path: Path) -> None:
    before = Run(tmp_path / "before", copies=1)
    before.written(10, 0, 1)
    before.settle()
    run = Run(tmp_path / "after", resumed=True)
    # The first host's disk is lost, and so is the leader's.
    for name in ("node1", "node2"):
        shutil.copytree(before.hosts[name].spool, run.hosts[name].spool, dirs_exist_ok=True)
        held = [shard.manifest() for shard in find_shards(run.hosts[name].spool)]
        run.collector.offered(name, run.hosts[name], held)
    brought = run.bring()
    assert brought is not None
    assert Path(brought).parent == run.hosts["node0"].spool / "restore-1"
    newest = newest_valid(Path(brought).parent)
    assert newest is not None
    assert newest.step == 10
    assert run.steps() == [10]
    assert run.collector.restored_from == str(run.folder / "step-000000000010.json")
    assert [host.steps() for host in run.hosts.values()] == [[], [], []]


def test_what_belongs_to_a_history_given_up_is_removed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.written(10, 0, 1)
    run.settle()
    host = run.hosts["node2"]
    for index in range(2):
        spooled(host.spool, 99, index, 2, life="old")
    run.collector.offered("node2", host, [s.manifest() for s in find_shards(host.spool)])
    run.settle()
    assert host.steps() == []
    assert run.steps() == [10]


def test_a_damaged_newest_is_skipped_by_name_and_shards_after_it_are_collected(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    for step in (10, 20):
        run.written(step, 0, 1)
        run.settle()
    cut = find_checkpoints(run.folder)[0].shards[1].path
    os.truncate(cut, 3)
    assert run.bring() is not None
    assert run.warnings == [f"checkpoint {cut} was skipped: it is truncated: 3 of 10 bytes"]
    run.written(15, 0, 1)
    run.settle()
    assert 15 in run.steps()


def test_without_a_checkpoint_nothing_is_brought(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.bring() is None
    assert not run.warnings


# -- URLs


@pytest.fixture
def url() -> Iterator[str]:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    yield "memory://hvd_elastic-test/run"
    files.rm("/hvd_elastic-test", recursive=True)


def test_a_url_has_the_newest_and_a_lost_run_folder_gets_it_back(tmp_path: Path, url: str) -> None:
    run = Run(tmp_path / "first", url)
    for step in (10, 20, 30):
        run.written(step, 0, 1)
        run.settle()
    assert [event["path"] for event in run.events][-1] == f"{url}/step-000000000030.json"
    again = Run(tmp_path / "second", url, resumed=True)
    brought = again.bring()
    assert brought is not None
    assert brought.endswith("restore-1/step-000000000030.json")
    assert again.steps() == [30]
    files = CheckpointUrl(url)._files
    assert len(files.ls("/hvd_elastic-test/run")) == 2 * 3, "two are kept"
    path = next(p for p in files.ls("/hvd_elastic-test/run", detail=False) if "030-1-of" in p)
    files.pipe_file(path, b"x" * 9)
    third = Run(tmp_path / "third", url, resumed=True)
    third.bring()
    assert third.steps() == [20]
    assert "step-000000000030.json was skipped" in third.warnings[0]
    assert "it is truncated: 9 of 10 bytes" in third.warnings[0]


def test_a_url_that_cannot_be_written_keeps_the_checkpoint_here(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, url)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no such key")

    files = run.collector._url._files  # type: ignore[union-attr]
    monkeypatch.setattr(type(files), "put_file", refuse)
    run.written(10, 0, 1)
    run.settle()
    assert run.steps() == [10]
    (said,) = run.warnings
    assert said.startswith("a checkpoint is in the run folder alone: checkpoints at memory://")
    assert said.endswith("cannot be written: no such key")


def test_a_missing_backend_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CheckpointError, match=r"needs a package .*s3fs"):
        CheckpointUrl("s3://bucket/run")
    with pytest.raises(CheckpointError, match="nonsense"):
        CheckpointUrl("nonsense://bucket/run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"pip install 'hvd-elastic\[checkpoint\]'"):
        CheckpointUrl("memory://run")
