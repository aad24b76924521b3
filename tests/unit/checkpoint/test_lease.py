"""Leaders that share nothing but the place of their checkpoints, and see each other there."""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hvd_elastic.checkpoint import lease as leases
from hvd_elastic.checkpoint.lease import PATIENCE_S, Lease, LeaseHolder, LeaseWatch, find_lease
from hvd_elastic.checkpoint.place import UnfinishedNote, check_new_place
from hvd_elastic.checkpoint.url import CheckpointUrl
from hvd_elastic.errors import CheckpointError
from tests.paths import LIMIT_S

OTHER = Lease("r1", "other", "process 7 on alpha", 50.0, "another machine", 7)


def renewed(lease: Lease, times: int = 1) -> Lease:
    return replace(lease, count=lease.count + times)


def test_a_lease_that_changes_is_led_and_one_that_does_not_is_mine_in_the_end() -> None:
    watch = LeaseWatch("own")
    assert watch.check(None, 0.0) == "mine"
    assert watch.check(OTHER, 1.0) == "open"
    assert watch.check(OTHER, 5.0) == "open"
    assert watch.check(renewed(OTHER), 6.0) == "led"
    for second in range(7, int(6 + PATIENCE_S)):
        assert watch.check(renewed(OTHER), second) == "open"
    assert watch.check(renewed(OTHER), 6 + PATIENCE_S) == "mine"
    assert watch.check(Lease("r1", "own", "", 0.0, "", 1), 20.0) == "mine"


def test_who_stood_still_looks_again_before_it_decides() -> None:
    watch = LeaseWatch("own")
    watch.check(OTHER, 0.0)
    assert watch.check(renewed(OTHER), 3600.0) == "open", "it was this one that was away"
    assert watch.check(renewed(OTHER, 2), 3601.0) == "led"
    assert watch.check(renewed(OTHER, 2), 7200.0) == "open"


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = Lease.of_this_process("r1", 50.0)
    assert LeaseWatch("own").check(replace(here, pid=ended.pid), 0.0) == "mine"
    assert LeaseWatch("own").check(here, 0.0) == "open"
    elsewhere = replace(here, pid=ended.pid, machine="another machine")
    assert LeaseWatch("own").check(elsewhere, 0.0) == "open", "its numbers mean nothing here"


@pytest.fixture(params=["folder", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | CheckpointUrl]:
    if request.param == "folder":
        yield tmp_path
        return
    fsspec = pytest.importorskip("fsspec")
    yield CheckpointUrl("memory://hvd_elastic-lease/run")
    files = fsspec.filesystem("memory")
    if files.exists("/hvd_elastic-lease"):
        files.rm("/hvd_elastic-lease", recursive=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_RENEW_S", 0.02)
    monkeypatch.setattr(leases, "_LOOK_S", 0.01)
    monkeypatch.setattr(leases, "_END_S", LIMIT_S)
    monkeypatch.setattr(leases, "PATIENCE_S", LIMIT_S)


class Leader:
    """What a holder tells its leader."""

    def __init__(self, place: Path | CheckpointUrl, since: float) -> None:
        self.settled: queue.Queue[bool] = queue.Queue()
        self.others: queue.Queue[tuple[Lease, bool]] = queue.Queue()
        lease = Lease.of_this_process("r1", since)
        self.holder = LeaseHolder(
            place,
            lease,
            lambda: self.settled.put(True),
            lambda other, lost: self.others.put((other, lost)),
        )
        self.id = lease.leader


@pytest.mark.usefixtures("quick")
def test_two_leaders_see_each_other_and_who_ends_leaves_the_place_to_the_other(
    place: Path | CheckpointUrl,
) -> None:
    with ExitStack() as ended:
        first = Leader(place, 50.0)
        ended.callback(first.holder.release_lease)
        assert first.settled.get(timeout=LIMIT_S)
        second = Leader(place, 60.0)
        ended.callback(second.holder.release_lease)
        found, lost = second.others.get(timeout=LIMIT_S)
        assert (found.leader, lost) == (first.id, False)
        assert second.settled.empty()
        assert first.others.empty(), "it was not disturbed"
        first.holder.release_lease()
        assert second.settled.get(timeout=LIMIT_S)
        other = find_lease(place)
        assert other is not None
        assert other.leader == second.id
        with pytest.raises(CheckpointError, match=r"is in use by run r1, which process \d+ on"):
            check_new_place(str(place))
    assert find_lease(place) is None
    check_new_place(str(place))
    if isinstance(place, Path):
        assert not list(place.iterdir()), "it took its lease back"


@pytest.mark.usefixtures("quick")
def test_who_was_frozen_until_another_had_the_lease_is_told_so(tmp_path: Path) -> None:
    frozen = Leader(tmp_path, 50.0)
    assert frozen.settled.get(timeout=LIMIT_S)
    counts = itertools.count()
    while frozen.others.empty():
        text = json.dumps(asdict(renewed(OTHER, next(counts)))).encode()
        leases.PlainFolder(tmp_path).write_file("leader.json", text)
        time.sleep(0.1)
    found, lost = frozen.others.get()
    assert (found.leader, lost) == ("other", True)
    frozen.holder.release_lease()
    assert (tmp_path / "leader.json").exists(), "that of the other stays"


@pytest.mark.usefixtures("quick")
def test_a_place_that_cannot_be_written_or_read_is_no_reason_to_wait(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    leader = Leader(gone, 50.0)
    assert leader.settled.get(timeout=LIMIT_S)
    gone.mkdir()
    while not (gone / "leader.json").exists():
        time.sleep(0.01)
    leader.holder.release_lease()
    gone.rmdir()
    gone.write_text("no folder")
    leader = Leader(gone, 50.0)
    assert leader.settled.get(timeout=LIMIT_S)
    leader.holder.release_lease()


def test_what_is_no_lease_is_looked_at_again(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"run": 1}', '{"format": 2}'):
        (tmp_path / "leader.json").write_text(text)
        found = leases._read(leases.PlainFolder(tmp_path))
        assert LeaseWatch("own").check(found, 0.0) == "open", text


def test_a_note_that_a_run_is_unfinished_is_of_its_engine_until_it_is_removed(
    place: Path | CheckpointUrl,
) -> None:
    note = UnfinishedNote(str(place), "r1", "spark")
    assert not note.is_there
    note.write()
    assert UnfinishedNote(str(place), "r1", "spark").is_there
    assert not UnfinishedNote(str(place), "r1", "ray").is_there
    assert not UnfinishedNote(str(place), "r2", "spark").is_there
    note.remove()
    note.remove()
    assert not note.is_there
