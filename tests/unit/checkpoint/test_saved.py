"""Files that a script saves reach the run folder whole; hosts are folders here."""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hvd_elastic.checkpoint import spool_collector
from hvd_elastic.checkpoint.saved import (
    SAVED_FOLDER,
    check_name,
    drop_spooled,
    find_spooled,
    find_stored,
    spool_file,
    store_file,
)
from hvd_elastic.checkpoint.saved_collector import SavedFileCollector
from hvd_elastic.checkpoint.spool_collector import Callbacks
from hvd_elastic.errors import CheckpointError, ScriptError, SshError
from hvd_elastic.wire import messages as msg
from tests.paths import LIMIT_S
from tests.small_disk import mounted
from tests.unit.records.made_events import fields_of
from tests.unit.wire.wire_samples import agent_hello, saved_file


class Host:
    """An agent and its disk, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.spool = folder
        self.info = agent_hello(spool=str(folder))
        self.why_not = ""
        self.before: Callable[[], object] = lambda: None
        self.before_put: Callable[[], object] = lambda: None
        self.answers: queue.Queue[msg.Tell] = queue.Queue()

    def save(self, name: str, content: bytes, **fields: Any) -> msg.SavedFile:
        return spool_file(
            self.spool / SAVED_FOLDER,
            lambda file: file.write(content),
            lambda size, sha256: saved_file(name, size, sha256, host=self.name, **fields),
        )

    @property
    def left(self) -> list[tuple[str, int]]:
        return sorted((each.name, each.step) for each in find_spooled(self.spool / SAVED_FOLDER))

    def send(self, message: msg.LeaderToAgent) -> None:
        if isinstance(message, msg.Tell):
            self.answers.put(message)
            return
        assert isinstance(message, msg.Release)
        folder = self.spool / SAVED_FOLDER
        for saved in find_spooled(folder) if message.files is None else message.files:
            drop_spooled(folder, saved)

    def receive(self, remote: str, write: Callable[[bytes | memoryview], object]) -> None:
        self.before()
        if self.why_not:
            raise SshError(f"host {self.name}: {self.why_not}")
        try:
            content = Path(remote).read_bytes()
        except OSError as error:
            raise SshError(f"host {self.name}: {error}") from error
        for at in range(0, len(content), 4096):
            write(content[at : at + 4096])

    def put(self, local: Path, remote: str) -> None:
        self.before_put()
        Path(remote).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(local, remote)

    def discard(self, remote: str) -> None:
        raise AssertionError("nothing else is removed")


class Run:
    """A leader's loop with two hosts."""

    def __init__(self, folder: Path, life: str = "now") -> None:
        self.folder = folder / "run" / "saved"
        self.hosts = {name: Host(folder / name) for name in ("node0", "node1")}
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.events: list[Mapping[str, Any]] = []
        self.warnings: list[str] = []
        self.idle = 0
        self.collector = SavedFileCollector(
            self.folder,
            life=lambda: life,
            agents=lambda: list(self.hosts.values()),
            call=Callbacks(
                self.calls.put,
                lambda event: self.events.append(fields_of(event)),
                self.warnings.append,
                self.count_idle,
            ),
        )

    def count_idle(self) -> None:
        self.idle += 1

    def told(self, host: str, saved: msg.SavedFile) -> None:
        self.collector.saved(host, self.hosts[host], saved, 0.5)

    def step(self) -> None:
        """Wait for the end of one transfer."""
        self.calls.get(timeout=LIMIT_S)()

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "/a", ".hidden", "-x", "a b", "a\n", "x" * 101, 7, "ä"]
)
def test_names_that_are_paths_or_no_names_are_refused(name: Any) -> None:
    with pytest.raises(ScriptError, match=r"not a valid name of a file.*'best\.pt'"):
        check_name(name)


def test_valid_names_are_accepted() -> None:
    for name in ("best.pt", "a", "model-3.0_x.json", "9" * 100):
        assert check_name(name) == name


def test_a_description_with_a_path_for_a_name_is_not_decoded() -> None:

    line = msgspec.json.encode(saved_file("best.pt", 1, "0" * 64))
    assert msgspec.json.decode(line, type=msg.SavedFile).name == "best.pt"
    for bad in (b"../best.pt", b"a/b", b".x"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(line.replace(b"best.pt", bad), type=msg.SavedFile)


def test_a_saved_file_is_fetched_described_and_dropped_on_its_host(tmp_path: Path) -> None:
    run = Run(tmp_path)
    content = bytes(range(256)) * 100
    run.told("node0", run.hosts["node0"].save("best.pt", content, step=12))
    assert run.collector.is_awaited(time.monotonic())
    run.step()
    assert run.read("best.pt") == content
    (event,) = run.events
    assert event["path"] == str(run.folder / "best.pt")
    assert (event["name"], event["bytes"], event["step"]) == ("best.pt", len(content), 12)
    assert event["sha256"] == hashlib.sha256(content).hexdigest()
    assert find_stored(run.folder)["best.pt"].step == 12
    assert run.hosts["node0"].left == []
    assert not run.collector.is_awaited(time.monotonic())
    assert run.collector.missing() == ""
    assert run.idle == 1
    assert not run.warnings


def test_a_later_file_replaces_an_earlier_one_and_never_the_other_way(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first, second = run.hosts["node0"], run.hosts["node1"]
    early = first.save("best.pt", b"early", step=5, generation=1, number=900, created=900.0)
    late = second.save("best.pt", b"late", step=4, generation=2, number=3, created=3.0)
    run.told("node1", late)
    run.step()
    run.told("node0", early)  # its host was cut off meanwhile
    assert run.read("best.pt") == b"late"
    assert first.left == second.left == []
    again = second.save("best.pt", b"again", step=4, generation=2, number=4)
    run.told("node1", again)
    run.step()
    assert run.read("best.pt") == b"again"
    assert [event["step"] for event in run.events] == [4, 4]


def test_a_term_of_this_leader_is_later_than_any_other_whatever_clocks_say(tmp_path: Path) -> None:
    old = Run(tmp_path, life="old")
    old.told("node0", old.hosts["node0"].save("m", b"old", life="old", created=5000.0))
    old.step()
    run = Run(tmp_path, life="now")
    kept = run.hosts["node0"].save("m", b"older", life="older", created=10.0)
    run.collector.offered("node0", run.hosts["node0"], [kept])
    assert run.hosts["node0"].left == []
    run.told("node1", run.hosts["node1"].save("m", b"new", life="now", created=20.0))
    run.step()
    assert run.read("m") == b"new"


def test_a_newer_file_takes_the_place_of_one_that_is_being_fetched(tmp_path: Path) -> None:
    run = Run(tmp_path)
    host = run.hosts["node0"]
    early = host.save("best.pt", b"early", number=1)
    late = host.save("best.pt", b"late", number=2)
    host.before = lambda: drop_spooled(host.spool / SAVED_FOLDER, early)
    run.told("node0", early)
    run.told("node0", late)
    run.step()
    run.step()
    assert run.read("best.pt") == b"late"
    assert not run.warnings, "the early one was not wanted any more"


def test_what_cannot_be_fetched_is_told_once_tried_again_and_missing_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_collector, "_PAUSES_S", (0.0,))
    run = Run(tmp_path)
    host = run.hosts["node0"]
    run.told("node0", host.save("best.pt", b"first", number=1))
    run.step()
    host.why_not = "nothing came for 60 s"
    run.told("node0", host.save("best.pt", b"second", number=2, step=7))
    run.step()
    run.step()
    (warning,) = run.warnings
    assert warning.startswith("the file 'best.pt' that the script saved at step 7 is not in")
    assert "nothing came for 60 s" in warning
    late = host.save("best.pt", b"second", number=3, step=7)
    run.told("node0", late)
    while run.collector.holds(host) and run.collector._wanted["best.pt"].error == "":
        run.step()
    assert run.warnings == [warning], "the same is not told of every file"
    assert run.read("best.pt") == b"first"
    missing = run.collector.missing()
    assert "'best.pt' that the script saved at step 7" in missing
    assert "host node0" in missing
    run.collector.empty_spools()
    assert host.left == [("best.pt", 7)], "for --resume"
    host.why_not = ""
    while run.collector.missing():
        run.step()
    assert run.read("best.pt") == b"second"


def test_a_worker_that_loads_a_file_gets_the_newest_or_why_not(tmp_path: Path) -> None:
    run = Run(tmp_path)
    node0, node1 = run.hosts.values()

    def answer() -> msg.SavedBrought:
        told = node1.answers.get(timeout=LIMIT_S)
        assert isinstance(told.message, msg.SavedBrought)
        assert told.worker == "worker-1"
        return told.message

    run.collector.bring("best.pt", "worker-1", node1)
    assert answer() == msg.SavedBrought("best.pt")
    run.told("node0", node0.save("best.pt", b"best", step=12))
    run.collector.bring("best.pt", "worker-1", node1)
    assert node1.answers.empty()  # it is being fetched
    run.step()
    brought = answer()
    assert Path(brought.path).read_bytes() == b"best"
    node1.before_put = lambda: run.collector.bring("best.pt", "worker-1", node1)
    run.collector.bring("best.pt", "worker-1", node1)
    answer()
    assert node1.answers.empty(), "who asks again meanwhile gets one copy"
    node1.before_put = lambda: None
    node0.why_not = "the disk is broken"
    run.told("node0", node0.save("best.pt", b"better", step=13, number=9))
    run.collector.bring("best.pt", "worker-1", node1)
    run.step()
    assert "saved at step 13 is not in the run folder: host node0: the disk" in answer().error


def test_a_file_that_changes_on_the_way_is_not_stored(tmp_path: Path) -> None:
    run = Run(tmp_path)
    host = run.hosts["node0"]
    saved = host.save("best.pt", b"right")
    (host.spool / SAVED_FOLDER / saved.spooled).write_bytes(b"wrong")
    run.told("node0", saved)
    run.step()
    assert not (run.folder / "best.pt").exists()
    assert "was cut or changed on the way" in run.warnings[0]
    assert [path.name for path in run.folder.iterdir()] == []


def test_a_long_wait_at_the_end_is_told_with_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    host = run.hosts["node1"]
    gate, reached = threading.Event(), threading.Event()

    def receive(remote: str, write: Callable[[bytes | memoryview], object]) -> None:
        content = Path(remote).read_bytes()
        write(content[:3000])
        reached.set()
        assert gate.wait(LIMIT_S)
        write(content[3000:])

    monkeypatch.setattr(host, "receive", receive)
    run.told("node1", host.save("best.pt", bytes(8000)))
    assert reached.wait(LIMIT_S)
    now = time.monotonic()
    assert run.collector.is_awaited(now + 3600)
    assert run.events == []
    assert run.collector.is_awaited(now - 1.5)
    monkeypatch.setattr(spool_collector, "_TOLD_EVERY_S", LIMIT_S)
    assert run.collector.is_awaited(now - 2.0)  # soon after the first
    assert run.collector.is_awaited(now - 3600), "as long as it arrives"
    gate.set()
    run.step()
    assert run.events[0] == {
        "message": "training has ended; waiting for the file 'best.pt' that the script saved at "
        "step 1 (3.0 kB of 8.0 kB are here from host node1)"
    }
    assert [event.get("name") for event in run.events] == [None, "best.pt"]


def test_a_lost_host_is_told_and_its_file_fetched_when_it_is_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    gone = run.hosts["node0"]
    gone.why_not = "the connection is lost"
    run.told("node0", gone.save("best.pt", b"kept", step=3))
    del run.hosts["node0"]
    run.step()
    run.collector.tell_lost()
    run.collector.tell_lost()
    (warning,) = run.warnings
    assert warning.startswith("host node0 was lost before the file 'best.pt'")
    assert not run.collector.is_awaited(time.monotonic()), "nobody knows whether it comes back"
    assert "host node0 was lost before it had been fetched" in run.collector.missing()
    back = run.hosts["node0"] = Host(gone.spool)
    run.collector.offered("node0", back, find_spooled(back.spool / SAVED_FOLDER))
    run.step()
    assert run.read("best.pt") == b"kept"
    assert run.collector.missing() == ""
    assert back.left == []


def test_the_end_empties_spools_of_what_no_leader_was_told(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for host in run.hosts.values():
        host.save("best.pt", b"its worker was killed in hvd.save")
    run.collector.offered("node1", run.hosts["node1"], [])
    run.collector.empty_spools()
    assert run.hosts["node1"].left == []
    assert run.hosts["node0"].left == [("best.pt", 1)], "its agent has not said yet what it has"


def test_what_a_killed_writer_left_is_not_offered_and_goes_with_the_next(tmp_path: Path) -> None:
    host = Host(tmp_path / "node0")
    earlier = host.save("best.pt", b"earlier", number=1)
    later = host.save("best.pt", b"later", number=2)
    folder = host.spool / SAVED_FOLDER
    ended = subprocess.Popen(["true"])
    ended.wait()
    # It was killed between the description and the rename of the content.
    unfinished = folder / f".tmp-{socket.gethostname()}-{ended.pid}-00000000"
    (folder / later.spooled).rename(unfinished)
    assert find_spooled(folder) == [earlier]
    host.save("best.pt", b"again", number=3)
    assert not unfinished.exists()


@pytest.mark.root
def test_a_full_disk_keeps_the_earlier_file_whole_and_leaves_nothing(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "64k") as disk:
        folder = disk / "saved"

        def store(content: bytes) -> None:
            store_file(folder, lambda f: f.write(content), lambda n, s: saved_file("m", n, s))

        store(b"first")
        with pytest.raises(CheckpointError, match=f"{folder} is full .*untouched"):
            store(b"x" * 100_000)
        assert (folder / "m").read_bytes() == b"first"
        assert find_stored(folder)["m"].bytes == 5
        assert sorted(path.name for path in folder.iterdir()) == [".m.json", "m"]
        with pytest.raises(CheckpointError, match="is full"):
            Host(disk / "node").save("m", b"x" * 100_000)
        assert not list((disk / "node" / SAVED_FOLDER).iterdir())


@pytest.mark.parametrize("keep", [spool_file, store_file])
def test_a_file_is_on_the_disk_when_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Any
) -> None:
    """Otherwise a loss of power may leave an empty file of that name, or none."""
    calls: list[tuple[str, int]] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        calls.append(("synced", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def named(path: Path, target: Path) -> Path:
        calls.append(("named", path.stat().st_ino))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", named)
    keep(
        tmp_path,
        lambda file: file.write(b"weights"),
        lambda size, sha256: saved_file("best.pt", size, sha256),
    )
    folder = tmp_path.stat().st_ino
    named_at = [at for at, (what, _) in enumerate(calls) if what == "named"]
    assert len({calls[at] for at in named_at}) == 2, "the file and its description"
    for at in named_at:
        assert ("synced", calls[at][1]) in calls[:at]
        assert calls[at + 1] == ("synced", folder)
