"""Shards of several hosts come together, whatever is missing; hosts are folders here."""

from __future__ import annotations

import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.checkpoint import sender, spool_collector
from hvd_elastic.checkpoint.checkpoint_collector import CheckpointCollector
from hvd_elastic.checkpoint.manifests import complete_checkpoint, find_checkpoints, newest_valid
from hvd_elastic.checkpoint.place import CheckpointStore
from hvd_elastic.checkpoint.sender import Brought, CheckpointSender
from hvd_elastic.checkpoint.shards import drop_shards, find_shards
from hvd_elastic.checkpoint.spool_collector import Callbacks
from hvd_elastic.checkpoint.url import CheckpointUrl
from hvd_elastic.errors import CheckpointError, SshError
from hvd_elastic.wire import messages as msg
from tests.paths import LIMIT_S
from tests.unit.checkpoint.test_files import spooled
from tests.unit.records.made_events import fields_of
from tests.unit.wire.wire_samples import agent_hello, checkpoint_written
from tests.waiting import until


class Host:
    """An agent and its disk, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.spool = folder
        self.spool.mkdir(parents=True)
        self.info = agent_hello(spool=str(folder))
        self.reachable = True
        self.full = False
        self.puts = 0
        self.on_put: Callable[[], object] = lambda: None

    def send(self, message: msg.LeaderToAgent) -> None:
        assert isinstance(message, msg.Release)
        drop_shards(self.spool, message.up_to_step)

    def receive(self, remote: str, write: Callable[[bytes | memoryview], object]) -> None:
        if not self.reachable:
            raise SshError(f"host {self.spool.name}: the connection is lost")
        write(Path(remote).read_bytes())

    def put(self, local: Path, remote: str) -> None:
        self.puts += 1
        self.on_put()
        if not self.reachable:
            raise SshError(f"host {self.spool.name}: the connection is lost")
        if self.full and remote.endswith(".json"):
            raise SshError(f"host {self.spool.name}: {remote} cannot be written: no space")
        Path(remote).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(local, remote)

    def discard(self, remote: str) -> None:
        shutil.rmtree(remote)

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
        keep, resumed = settings.pop("keep"), settings["resumed"]
        store = CheckpointStore("r1", self.folder, place, keep=keep, resumed=resumed)
        self.collector = CheckpointCollector(
            store,
            by_host=lambda: self.hosts,
            call=Callbacks(
                self.calls.put,
                lambda event: self.events.append(fields_of(event)),
                self.warnings.append,
                lambda: None,
            ),
            **settings,
        )
        self.sender = CheckpointSender(
            store,
            self.collector,
            agents=lambda: self.hosts,
            post=self.calls.put,
            warn=self.warnings.append,
        )
        self.collector.check()

    def settle(self) -> None:
        """Run the loop until no checkpoint is on its way."""
        while self.collector.busy or not self.calls.empty():
            self.calls.get(timeout=LIMIT_S)()

    def written(self, step: int, *indices: int, count: int = 2, **other: Any) -> None:
        for index in indices:
            name = f"node{index}"
            shard = spooled(self.hosts[name].spool, step, index, count, **other)
            said = checkpoint_written(shard, blocked_s=0.001 * (index + 1))
            self.collector.written(name, self.hosts[name], said)

    def bring(self, *hosts: str, wanted: Callable[[], bool] = lambda: True) -> Brought:
        found: list[Brought] = []
        self.sender.bring(hosts or ("node0",), "restore-1", wanted, found.append)
        while not found:
            self.calls.get(timeout=LIMIT_S)()
        return found[0]

    def end(self, *, succeeded: bool) -> None:
        vain = self.sender.searched_in_vain
        self.collector.empty_spools(succeeded=succeeded, searched_in_vain=vain)

    def steps(self) -> list[int]:
        return [info.step for info in find_checkpoints(self.folder)]


def test_a_run_that_resumed_from_a_finite_checkpoint_keeps_new_ones_at_once(tmp_path: Path) -> None:
    """Though a newer one, which it passed over, is there."""
    first = Run(tmp_path)
    first.written(10, 0, 1)
    first.settle()
    first.written(20, 0, 1, not_finite="model.weight")
    first.settle()
    assert [event.get("not_finite", "") for event in first.events] == ["", "model.weight"]
    assert (first.collector.newest_step, first.collector.resume_step) == (20, 10)
    os.renames(tmp_path / "checkpoints", tmp_path / "next" / "checkpoints")
    run = Run(tmp_path / "next", resumed=True)
    assert run.collector.resume_step == 10
    run.written(15, 0, 1)
    run.settle()
    assert run.collector.resume_step == 15
    assert 15 in run.steps()


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


@pytest.mark.parametrize("index", [0, 1])
def test_the_whole_state_of_one_rank_is_no_shard_of_the_others(tmp_path: Path, index: int) -> None:
    """One of two ranks was lost while they wrote shards, and the other one wrote everything."""
    run = Run(tmp_path)
    run.written(10, index)
    run.settle()
    assert run.steps() == []
    run.written(10, 0, count=1)
    run.settle()
    assert run.steps() == [10]
    (event,) = run.events
    assert event["shards"] == 1


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


def test_where_checkpoints_cannot_be_written_the_spools_stay(tmp_path: Path) -> None:
    run = Run(tmp_path)
    shutil.rmtree(run.folder)
    run.folder.write_text("in the way")
    with pytest.raises(CheckpointError, match="checkpoints cannot be written to"):
        run.collector.check()
    spooled(run.hosts["node0"].spool, 10, 0, 2)
    run.end(succeeded=False)
    assert run.hosts["node0"].steps() == [(10, 0)]
    run.folder.unlink()
    run.collector.check()
    run.end(succeeded=False)
    assert run.hosts["node0"].steps() == []


def test_the_last_checkpoint_stays_in_the_spools_until_it_is_here(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.written(10, 0, 1)
    run.settle()
    assert run.collector.missing(10) == ""
    run.written(20, 0)  # the rank of shard 1 was killed
    run.settle()
    assert run.collector.missing(20) == "a rank has ended before its shard of step 20 was written"
    run.collector.failed("node1", "no checkpoint was written: /spool is full")
    assert run.collector.missing(20) == "host node1: no checkpoint was written: /spool is full"
    run.hosts["node1"].reachable = False
    run.written(20, 1)
    run.settle()
    assert run.collector.missing(20).startswith(
        "the checkpoint of step 20 was not kept: host node1"
    )
    run.end(succeeded=True)
    assert run.hosts["node1"].steps() == [(20, 1)], "the only copy"
    lost = run.hosts.pop("node1")
    assert run.collector.missing(20).endswith("from its hosts when all of them are up")
    run.hosts["node1"] = lost
    assert run.collector.missing(30) == "host node1: no checkpoint was written: /spool is full"
    run.hosts["node1"].reachable = True
    (missed,) = run.collector._known.values()
    missed.retry.at = 0.0
    run.collector.fetch_due()
    run.settle()
    assert run.collector.missing(20) == ""
    run.end(succeeded=True)
    assert run.hosts["node1"].steps() == []


def test_a_checkpoint_that_is_still_being_fetched_is_not_lost(tmp_path: Path) -> None:
    """Nor one that waits for its turn, when the end of the run waits no longer."""
    run = Run(tmp_path)
    may_go_on, node0 = threading.Event(), run.hosts["node0"]
    receive = node0.receive

    def pause(remote: str, write: Callable[[bytes | memoryview], object]) -> None:
        assert may_go_on.wait(LIMIT_S)
        receive(remote, write)

    node0.receive = pause  # type: ignore[method-assign]
    run.written(10, 0, 1)
    run.written(20, 0, 1)
    for step in (10, 20):
        assert run.collector.missing(step) == (
            f"the checkpoint of step {step} has not been fetched yet. It stays on its hosts, from "
            "which --resume fetches it"
        )
    run.end(succeeded=True)
    assert node0.steps() == [(20, 0), (10, 0)]
    may_go_on.set()
    run.settle()
    assert run.collector.missing(20) == ""
    run.collector.failed("node1", "no checkpoint was written: /spool is full")
    run.collector.goes_on_from(None)
    assert "a rank has ended" in run.collector.missing(20), "that was in another history"


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


def test_the_end_tries_once_more_what_failed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the first try took."""
    monkeypatch.setattr(spool_collector, "_PAUSES_S", (3600.0,))
    run = Run(tmp_path)
    run.hosts["node1"].reachable = False
    run.written(10, 0, 1)
    run.settle()
    long_ago = time.monotonic() - 3600
    assert run.collector.is_awaited(long_ago)
    (missed,) = run.collector._known.values()
    missed.retry.at = 0.0
    run.collector.fetch_due()
    run.settle()
    assert missed.retry.failures == 2
    assert not run.collector.is_awaited(long_ago)


def test_a_checkpoint_that_could_not_be_fetched_is_tried_again_while_its_hosts_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_collector, "_PAUSES_S", (0.0, 3600.0, 0.0))
    run = Run(tmp_path)
    run.hosts["node1"].reachable = False
    run.written(10, 0, 1)
    run.settle()  # the second failure is followed by a long pause
    assert len(run.warnings) == 1
    assert run.warnings[0].endswith("node1: the connection is lost; trying again")
    ended_at = time.monotonic()
    assert run.collector.is_awaited(ended_at)
    assert not run.collector.is_awaited(ended_at - 3600)
    assert "the checkpoint of step 10 was not kept: host node1" in run.collector.why_missed
    run.hosts["node1"].reachable = True
    run.collector.fetch_due()
    assert not run.collector.busy, "the pause is not over"
    (missed,) = run.collector._known.values()
    missed.retry.at = 0.0
    run.collector.fetch_due()
    run.settle()
    assert run.steps() == [10]
    assert not run.collector.is_awaited(time.monotonic())
    assert run.hosts["node1"].steps() == []
    run.hosts["node1"].reachable = False
    run.written(20, 0, 1)
    gone = run.hosts.pop("node1")
    run.settle()
    assert run.warnings[1].endswith("node1: the connection is lost"), "nothing can be tried"
    assert not run.collector.is_awaited(time.monotonic())
    assert gone.steps() == [(20, 1)]
    for each in run.collector._known.values():
        each.retry.at = 0.0
    run.collector.fetch_due()
    assert not run.collector.busy, "a host that is gone is not asked"


def test_what_the_leader_before_had_fetched_already_is_no_loss(tmp_path: Path) -> None:
    """Agents tell the next leader what the last one may not have heard."""
    first = Run(tmp_path)
    first.written(20, 0, 1)
    told = [
        (name, first.hosts[name], find_shards(first.hosts[name].spool)[0])
        for name in ("node0", "node1")
    ]
    first.settle()
    assert first.steps() == [20]
    assert not find_shards(first.hosts["node0"].spool)
    second = Run(tmp_path / "next", resumed=True)
    shutil.copytree(first.folder, second.folder, dirs_exist_ok=True)
    second.collector.check()
    for name, host, shard in told:
        second.collector.written(name, host, checkpoint_written(shard, blocked_s=0.0))
    second.settle()
    assert second.warnings == []
    assert second.steps() == [20]


def test_copies_are_on_other_hosts_until_the_next_is_complete(tmp_path: Path) -> None:
    run = Run(tmp_path, copies=1)
    for step in (10, 20):
        run.written(step, 0, 1)
        run.settle()
    assert run.hosts["node0"].steps() == [(20, 0)]
    assert run.hosts["node1"].steps() == [(20, 0), (20, 1)]
    assert run.hosts["node2"].steps() == [(20, 1)]
    run.end(succeeded=False)
    assert run.hosts["node2"].steps() == [(20, 1)]
    run.end(succeeded=True)
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
    brought = Path(run.bring().manifest)
    assert brought.parent == run.hosts["node0"].spool / "restore-1"
    newest = newest_valid(brought.parent)
    assert newest is not None
    assert newest.step == 10
    assert run.steps() == [10]
    assert run.sender.restored_from == str(run.folder / "step-000000000010.json")
    assert [host.steps() for host in run.hosts.values()] == [[], [], []]


@pytest.mark.parametrize("gone_on", [True, False])
def test_what_a_late_host_completes_does_not_replace_what_training_goes_on_from(
    tmp_path: Path, gone_on: bool
) -> None:
    """Step 10 is chosen and being sent to the workers when the last shard of step 15 is offered."""
    run = Run(tmp_path, resumed=True, keep=1)
    complete_checkpoint(run.folder, [spooled(run.folder, 10, 0, 1)], keep=1)
    early, late = run.hosts["node1"], run.hosts["node2"]
    for index, host in enumerate([early, late]):
        spooled(host.spool, 15, index, 2)
    held = [shard.manifest() for shard in find_shards(early.spool)]
    run.collector.offered("node1", early, held)
    is_sending, may_go_on = threading.Event(), threading.Event()
    wanted = [True]

    def pause() -> None:
        is_sending.set()
        assert may_go_on.wait(LIMIT_S)

    run.hosts["node0"].on_put = pause
    found: list[Brought] = []
    run.sender.bring(["node0"], "restore-1", lambda: wanted[0], found.append)
    assert is_sending.wait(LIMIT_S)
    run.collector.offered("node2", late, [shard.manifest() for shard in find_shards(late.spool)])
    run.settle()
    wanted[0] = gone_on  # else the restart is called off meanwhile
    may_go_on.set()
    while not found:
        run.calls.get(timeout=LIMIT_S)()
    run.collector.fetch_due()
    run.settle()
    sent = found[0].checkpoint
    assert sent is not None
    assert sent.step == 10
    assert run.collector.newest_step == (10 if gone_on else 15)
    assert run.steps() == ([10] if gone_on else [15])
    assert late.steps() == [], "of a history given up, or collected"
    if gone_on:
        run.written(12, 0, 1)
        run.settle()
        assert run.steps() == [12]


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
    assert run.bring().manifest
    assert run.warnings == [f"checkpoint {cut} was skipped: it is truncated: 3 of 10 bytes"]
    run.written(15, 0, 1)
    run.settle()
    assert 15 in run.steps()


def test_without_a_checkpoint_nothing_is_brought(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.bring() == Brought()
    assert not run.warnings


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_TRY_AGAIN_S", (0.0, 0.0))


@pytest.mark.usefixtures("at_once")
def test_a_host_that_cannot_take_the_checkpoint_leaves_it_to_the_next(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.written(10, 0, 1)
    run.settle()
    run.hosts["node0"].full = True
    brought = run.bring("node0", "node1", "node2")
    assert (brought.host, brought.error) == ("node1", "")
    assert Path(brought.manifest).parent == run.hosts["node1"].spool / "restore-1"
    assert not (run.hosts["node0"].spool / "restore-1").exists(), "half of one is of no use"
    (said,) = run.warnings
    assert "cannot be written: no space; the workers take the checkpoint from host node1" in said


@pytest.mark.usefixtures("at_once")
def test_a_checkpoint_that_no_host_can_take_is_not_as_if_there_were_none(tmp_path: Path) -> None:
    run = Run(tmp_path, resumed=True)
    run.written(10, 0, 1)
    run.settle()
    for host in run.hosts.values():
        host.full = True
    brought = run.bring("node0", "node1")
    assert not brought.manifest
    assert brought.error.startswith(f"checkpoint {run.folder}/step-000000000010.json cannot be")
    assert "host node0: " in brought.error
    assert "host node1: " in brought.error
    (said,) = run.warnings
    assert said.endswith("; trying again")
    assert run.collector.newest_step == 10
    run.written(20, 0, 1)
    run.settle()
    assert run.steps() == [20, 10]


@pytest.mark.usefixtures("at_once")
def test_a_host_that_mends_itself_gets_it_and_what_is_called_off_is_not_tried_again(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.written(10, 0, 1)
    run.settle()
    run.hosts["node0"].full = True
    run.hosts["node0"].puts = 0
    assert run.bring(wanted=lambda: False).error
    assert run.hosts["node0"].puts == 3, "two shards and the manifest, once"

    def mended() -> bool:
        run.hosts["node0"].full = False
        return True

    assert run.bring(wanted=mended).host == "node0"
    run.written(20, 0, 1)
    run.settle()
    run.written(30, 0)
    late = run.bring(wanted=lambda: False)
    assert late.host == "node0"
    until(lambda: not Path(late.manifest).parent.exists(), "what no worker loads is removed")
    assert run.hosts["node0"].steps() == [(30, 0)], "a later generation trains, and wrote it"


@pytest.mark.usefixtures("at_once")
def test_what_the_hosts_have_and_cannot_be_fetched_is_kept_there_and_tried_again(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.hosts["node1"].reachable = False
    run.written(10, 0, 1)
    run.settle()
    brought = run.bring()
    assert brought.error.startswith("the checkpoint of step 10 was not kept: host node1: the conn")
    assert run.hosts["node1"].steps() == [(10, 1)], "not given up"
    run.hosts["node1"].reachable = True
    assert Path(run.bring().manifest).name == "step-000000000010.json"
    run.hosts["node1"].reachable = False
    run.written(20, 0, 1)
    run.settle()
    del run.hosts["node1"]
    shutil.rmtree(run.folder)
    assert "that of step 10 was written" in run.bring().error, "the host of step 20 is gone"


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("lost", ["gone", "damaged"])
def test_where_one_was_written_it_is_looked_for_until_it_is_there_again(
    tmp_path: Path, lost: str
) -> None:
    before = Run(tmp_path / "before")
    before.written(10, 0, 1)
    before.settle()
    away = before.folder.rename(tmp_path / "away")
    run = Run(tmp_path / "after", resumed=True)
    run.collector.expected = "that of step 10 was written"
    if lost == "damaged":
        shutil.copytree(away, run.folder, dirs_exist_ok=True)
        for shard in find_checkpoints(run.folder)[0].shards:
            os.truncate(shard.path, 3)
    half = spooled(run.hosts["node2"].spool, 20, 0, 2)
    run.collector.offered("node2", run.hosts["node2"], [half.manifest()])
    brought = run.bring()
    assert brought.error == (
        f"no whole checkpoint of run r1 is found in {run.folder}, though that of step 10 was "
        "written: that place is not mounted, or its files are gone or damaged"
    )
    assert f"{brought.error}; trying again" in run.warnings
    run.end(succeeded=False)
    assert run.hosts["node2"].steps() == [(20, 0)], "its other half may be on a host that is off"

    def mounted() -> bool:
        shutil.copytree(away, run.folder, dirs_exist_ok=True)
        return True

    assert Path(run.bring(wanted=mounted).manifest).name == "step-000000000010.json"


@pytest.mark.usefixtures("at_once")
def test_a_folder_that_cannot_be_read_is_not_as_if_it_were_empty(tmp_path: Path) -> None:
    run = Run(tmp_path)
    shutil.rmtree(run.folder)
    run.folder.write_text("a disk that went")
    assert run.bring().error.startswith("no checkpoint can be looked for: checkpoints cannot be")


def test_a_place_belongs_to_one_run(tmp_path: Path) -> None:
    place = tmp_path / "place"
    run = Run(tmp_path, str(place))
    run.written(10, 0, 1, run="r1")
    run.settle()
    with pytest.raises(CheckpointError, match=r"of run r1, step-0.*a new run needs a folder"):
        Run(tmp_path / "fresh", str(place))
    assert Run(tmp_path / "again", str(place), resumed=True).collector.newest_step == 10
    spooled(place, 20, 0, 1, run="r2")
    complete_checkpoint(tmp_path / "other", [spooled(tmp_path / "other", 20, 0, 1, run="r2")], 9)
    for path in (tmp_path / "other").iterdir():
        shutil.copy(path, place)
    with pytest.raises(CheckpointError, match=r"of run r2, .* run r1 neither resumes another"):
        Run(tmp_path / "mixed", str(place), resumed=True)
    # Where both were started at once, the second to write is told, and nothing is taken over.
    run.warnings.clear()
    run.written(30, 0, 1, run="r1")
    run.settle()
    assert "the checkpoint of step 30 was not kept: " in run.warnings[0]
    assert Path(run.bring().manifest).name == "step-000000000010.json"
    assert any("step-000000000020.json was skipped: it is of run r2" in w for w in run.warnings)


def test_checkpoints_of_a_training_that_was_no_run_are_resumed(tmp_path: Path) -> None:
    place = tmp_path / "place"
    complete_checkpoint(place, [spooled(place, 10, 0, 1, run="")], 9)
    run = Run(tmp_path, str(place), resumed=True)
    assert Path(run.bring().manifest).name == "step-000000000010.json"
    with pytest.raises(CheckpointError, match=r"of another run, step-0+10\.json"):
        Run(tmp_path / "fresh", str(place))


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
    assert again.bring().manifest.endswith("restore-1/step-000000000030.json")
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

    files = run.sender._store.url._files  # type: ignore[union-attr]
    monkeypatch.setattr(type(files), "put_file", refuse)
    run.written(10, 0, 1)
    run.settle()
    assert run.steps() == [10]
    (said,) = run.warnings
    assert said.startswith("a checkpoint is in the run folder alone: checkpoints at memory://")
    assert said.endswith("cannot be written: no such key")


def test_a_slow_upload_of_the_last_checkpoint_fails_no_run(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, url)
    may_go_on = threading.Event()
    files = run.sender._store.url._files  # type: ignore[union-attr]
    put_file = type(files).put_file

    def pause(*arguments: Any, callback: Any, **options: Any) -> None:
        assert may_go_on.wait(LIMIT_S)
        run.collector._received_at = 0.0
        callback.relative_update(1)
        assert run.collector._received_at, "an upload that goes on is not silent"
        put_file(*arguments, **options)

    monkeypatch.setattr(type(files), "put_file", pause)
    run.written(10, 0, 1)
    run.calls.get(timeout=LIMIT_S)()
    assert run.collector.busy
    assert run.collector.missing(10) == ""
    assert (run.collector.newest_step, run.collector.resume_step) == (10, 10)
    run.end(succeeded=True)
    (said,) = run.warnings
    assert said == (
        f"{url} lacks the checkpoint of step 10, whose upload has not ended; it is in {run.folder}"
    )
    # What is in the folder is not needed on the hosts, though the leader ends meanwhile.
    assert [host.steps() for host in run.hosts.values()] == [[], [], []]
    may_go_on.set()
    run.settle()
    assert run.warnings == [said]


@pytest.mark.usefixtures("at_once")
def test_a_url_that_cannot_be_read_is_not_as_if_it_were_empty(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "first", url)
    run.written(10, 0, 1, run="r1")
    run.settle()
    with pytest.raises(CheckpointError, match=f"{url} holds a checkpoint of run r1, step-0"):
        Run(tmp_path / "fresh", url)
    elsewhere = Run(tmp_path / "elsewhere", url, resumed=True)
    files = run.sender._store.url._files  # type: ignore[union-attr]
    opened = type(files).open

    def refuse(*_: object, **__: object) -> None:
        raise TimeoutError("the network is gone")

    monkeypatch.setattr(type(files), "open", refuse)
    error = elsewhere.bring().error
    assert error.startswith(f"no checkpoint can be looked for: checkpoints at {url} cannot be read")
    monkeypatch.setattr(type(files), "ls", refuse)
    assert Path(run.bring().manifest).name == "step-000000000010.json", "it is here, too"
    assert (
        f"cannot be read: the network is gone; the workers take checkpoint {run.folder}"
        in (run.warnings[-1])
    )
    monkeypatch.undo()
    assert type(files).open is opened
    for path in files.ls("/hvd_elastic-test/run", detail=False):
        if path.endswith(".shard"):
            files.rm_file(path)
    assert elsewhere.bring() == Brought(), "of a checkpoint without shards nothing can be had"


def test_a_missing_backend_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CheckpointError, match=r"needs a package .*s3fs"):
        CheckpointUrl("s3://bucket/run")
    with pytest.raises(CheckpointError, match="nonsense"):
        CheckpointUrl("nonsense://bucket/run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match="pip install fsspec"):
        CheckpointUrl("memory://run")
