"""Leaders that share nothing but the place of their checkpoints, and see each other there."""

from __future__ import annotations

import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_elastic.checkpoint import lease as claims
from hvd_elastic.checkpoint.lease import PATIENCE_S, Claim, ClaimKeeper, ClaimWatch, find_claimant
from hvd_elastic.checkpoint.place import check_new_place
from hvd_elastic.checkpoint.url import CheckpointUrl
from hvd_elastic.errors import CheckpointError

OTHER = Claim("r1", "other", "process 7 on alpha", 50.0, "another machine", 7)


def renewed(claim: Claim, times: int = 1) -> Claim:
    return replace(claim, count=claim.count + times)


def test_a_claim_that_changes_is_led_and_one_that_does_not_is_mine_in_the_end() -> None:
    watch = ClaimWatch("own")
    assert watch.judge(None, 0.0) == "mine"
    assert watch.judge(OTHER, 1.0) == "open"
    assert watch.judge(OTHER, 5.0) == "open"
    assert watch.judge(renewed(OTHER), 6.0) == "led"
    assert watch.first_seen == 1.0
    for second in range(7, int(6 + PATIENCE_S)):
        assert watch.judge(renewed(OTHER), second) == "open"
    assert watch.judge(renewed(OTHER), 6 + PATIENCE_S) == "mine"
    assert watch.judge(Claim("r1", "own", "", 0.0, "", 1), 20.0) == "mine"


def test_who_stood_still_looks_again_before_it_judges() -> None:
    watch = ClaimWatch("own")
    watch.judge(OTHER, 0.0)
    assert watch.judge(renewed(OTHER), 3600.0) == "open", "it was this one that was away"
    assert watch.judge(renewed(OTHER, 2), 3601.0) == "led"
    assert watch.judge(renewed(OTHER, 2), 7200.0) == "open"


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = Claim.of_this_process("r1", 50.0)
    assert ClaimWatch("own").judge(replace(here, pid=ended.pid), 0.0) == "mine"
    assert ClaimWatch("own").judge(here, 0.0) == "open"
    elsewhere = replace(here, pid=ended.pid, machine="another machine")
    assert ClaimWatch("own").judge(elsewhere, 0.0) == "open", "its numbers mean nothing here"


@pytest.fixture(params=["folder", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | CheckpointUrl]:
    if request.param == "folder":
        yield tmp_path
        return
    fsspec = pytest.importorskip("fsspec")
    yield CheckpointUrl("memory://hvd_elastic-claim/run")
    files = fsspec.filesystem("memory")
    if files.exists("/hvd_elastic-claim"):
        files.rm("/hvd_elastic-claim", recursive=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_RENEW_S", 0.02)
    monkeypatch.setattr(claims, "_LOOK_S", 0.01)


class Leader:
    """What a keeper tells its leader."""

    def __init__(self, place: Path | CheckpointUrl, since: float) -> None:
        self.settled: queue.Queue[bool] = queue.Queue()
        self.rivals: queue.Queue[Claim] = queue.Queue()
        claim = Claim.of_this_process("r1", since)
        self.keeper = ClaimKeeper(
            place,
            claim,
            lambda: self.settled.put(True),
            lambda other, _: self.rivals.put(other),
        )
        self.id = claim.leader


@pytest.mark.usefixtures("quick")
def test_two_leaders_see_each_other_and_who_ends_leaves_the_place_to_the_other(
    place: Path | CheckpointUrl,
) -> None:
    with ExitStack() as ended:
        first = Leader(place, 50.0)
        ended.callback(first.keeper.end)
        assert first.settled.get(timeout=30)
        second = Leader(place, 60.0)
        ended.callback(second.keeper.end)
        assert second.rivals.get(timeout=30).leader == first.id
        assert second.settled.empty()
        assert first.rivals.empty(), "it was not disturbed"
        second.keeper.insist()
        assert first.rivals.get(timeout=30).leader == second.id
        first.keeper.end()
        assert second.settled.get(timeout=30)
        other = find_claimant(place)
        assert other is not None
        assert other.leader == second.id
        with pytest.raises(CheckpointError, match=r"is in use by run r1, which process \d+ on"):
            check_new_place(str(place))
    assert find_claimant(place) is None
    check_new_place(str(place))
    if isinstance(place, Path):
        assert not list(place.iterdir()), "it took its claim back"


@pytest.mark.usefixtures("quick")
def test_a_place_that_cannot_be_written_or_read_is_no_reason_to_wait(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    leader = Leader(gone, 50.0)
    assert leader.settled.get(timeout=30)
    gone.mkdir()
    while not (gone / "leader.json").exists():
        time.sleep(0.01)
    leader.keeper.end()
    gone.rmdir()
    gone.write_text("no folder")
    leader = Leader(gone, 50.0)
    assert leader.settled.get(timeout=30)
    leader.keeper.end()


def test_what_is_no_claim_is_looked_at_again(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"run": 1}', '{"format": 2}'):
        (tmp_path / "leader.json").write_text(text)
        found = claims._read(claims._Folder(tmp_path))
        assert ClaimWatch("own").judge(found, 0.0) == "open", text
