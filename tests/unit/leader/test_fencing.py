"""A leader that meets another one of its run, told by the agent of a host."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.checkpoint.lease import Lease
from hvd_elastic.control.commands import Finish
from hvd_elastic.control.events import FoundWorker
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.failover.failover import TAKEOVER_S, Takeover
from hvd_elastic.leader.leader import Leader
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import COMMAND_TIMEOUT_S, RunFolder
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.wire import messages as msg

HELD = msg.HeldRun(generation=1, members=(), workers=())


def leader_since(since: float, leader: str = "another", heard_s: float = 0.5) -> msg.LeaderIdentity:
    return msg.LeaderIdentity("met", leader, "process 7 on alpha", since, heard_s)


@dataclass
class AgentHeard:
    """A connection to an agent, which was heard last then."""

    name: str = ""
    last_heard: float = 0.0
    up: bool = False
    is_starting: bool = False
    taken_over: bool = False
    acted_upon: int = 0

    @property
    def host(self) -> Host:
        return Host(self.name, slots=1)

    def send(self, message: msg.LeaderToAgent) -> None:
        """Nobody is there."""


def met(
    folder: Path,
    *,
    since: float,
    began: bool,
    leads: bool = True,
    by: str = "another",
    heard_s: float = 0.5,
) -> Finish | None:
    """How a leader that began to lead at 100 ends, if it does."""
    run = RunFolder.create("met", root=folder)
    leader = Leader(RunSpec(("true",), "/"), run, {}, lambda _: None, lambda *_: None)
    leader._run.fence.identity.led_since = 100.0
    if not began:
        leader._failover._takeover = Takeover(["n1", "n2"], RunSummary(), None, deadline=0.0)
    agent: Any = AgentHeard("n2")
    first: Any = AgentHeard("n1", up=leads)
    leader._run.agents.by_host |= {"n1": first, "n2": agent}
    by = leader._run.fence.identity.leader if by == "own" else by
    leader._heard(agent, msg.Refused(leader_since(since, by, heard_s)))
    return leader._executor.finish


@pytest.mark.parametrize("since", [50.0, 200.0])
def test_one_that_has_begun_nothing_ends_at_the_first_refusal(tmp_path: Path, since: float) -> None:
    finish = met(tmp_path, since=since, began=False)
    assert finish is not None
    assert finish.status == "failed"
    for words in (
        "run met has a leader: host n2 is led by process 7 on alpha since ",
        "which was heard from 0.50 s ago",
        "ends, and has started nothing",
        "hvd-elastic stop met",
        "after 5 s: try again",
    ):
        assert words in finish.message


def test_one_that_was_heard_from_at_this_moment_is_no_zero_seconds_old(tmp_path: Path) -> None:
    finish = met(tmp_path, since=50.0, began=False, heard_s=0.02)
    assert finish is not None
    assert "which was heard from just now. Two would" in finish.message


def test_of_two_that_train_the_later_one_ends(tmp_path: Path) -> None:
    finish = met(tmp_path / "later", since=50.0, began=True)
    assert finish is not None
    assert "which began later, ends" in finish.message
    assert met(tmp_path / "earlier", since=200.0, began=True) is None
    finish = met(tmp_path / "left", since=200.0, began=True, leads=False)
    assert finish is not None
    assert "which has no host left, ends" in finish.message


@pytest.mark.parametrize("began", [True, False])
def test_a_leader_is_not_its_own_rival(tmp_path: Path, began: bool) -> None:
    """After it was cut off it comes as another, to agents that may not have noticed."""
    assert met(tmp_path, since=50.0, began=began, by="own") is None


@pytest.mark.parametrize("closed", [False, True])
def test_a_leader_ends_when_its_last_host_has_been_taken_over(
    tmp_path: Path, *, closed: bool
) -> None:
    """Whether or not the end of the first one's connection was read by then."""
    run = RunFolder.create("met", root=tmp_path)
    leader = Leader(RunSpec(("true",), "/"), run, {}, lambda _: None, lambda *_: None)
    first: Any = AgentHeard("n1", up=True)
    last: Any = AgentHeard("n2", up=True)
    leader._run.agents.by_host |= {"n1": first, "n2": last}
    message = msg.TakenOver(leader_since(50.0, heard_s=0.0))
    leader._heard(first, message)
    assert leader._executor.finish is None, "another host still follows it"
    first.up = not closed
    leader._heard(last, message)
    assert leader._executor.finish is not None
    assert leader._executor.finish.status == "failed"
    assert "run met was taken over by process 7 on alpha (since " in leader._executor.finish.message
    assert "starts nothing again" in leader._executor.finish.message


def with_lease(folder: Path) -> Leader:
    run = RunFolder.create("met", root=folder)
    leader = Leader(RunSpec(("true",), "/"), run, {}, lambda _: None, lambda *_: None)
    leader._run.agents.by_host["n1"] = AgentHeard("n1")  # type: ignore[assignment]
    return leader


LEASE = Lease("met", "another", "process 7 on alpha", 200.0, "", 7)


@pytest.mark.parametrize("found", [(), (FoundWorker("n1:0.1", "n1", 0),)])
def test_a_leader_that_starts_ends_where_another_keeps_checkpoints(
    tmp_path: Path, found: tuple[FoundWorker, ...]
) -> None:
    """Whether its hosts follow nobody, or cannot hear the other one."""
    leader = with_lease(tmp_path)
    takeover = Takeover(["n1", "n2"], RunSummary(), None, deadline=math.inf)
    takeover.lease_open = True
    leader._failover._takeover = takeover
    leader._failover.met_lease(LEASE, lost=False)
    assert leader._executor.finish is None, "whom the hosts follow is asked first"
    takeover.answered("n1", msg.HeldRun(1, (), found))
    takeover.failed("n2")
    leader._failover._lead_if_complete()
    finish = leader._executor.finish
    assert finish is not None
    assert "run met has a leader: checkpoints in " in finish.message
    assert "are kept by process 7 on alpha since" in finish.message
    assert "ends, and has started nothing" in finish.message
    assert "is known after 9 s" in finish.message
    assert leader._run.fence.gave_way, "what trains is left to the other"


@pytest.mark.parametrize(
    ("lost", "why"), [(True, "which has lost its lease, ends"), (False, "which has no lease, ends")]
)
def test_a_leader_that_leads_ends_once_another_keeps_checkpoints(
    tmp_path: Path, lost: bool, why: str
) -> None:
    """One that was frozen meanwhile, and one that took the hosts of another, which lives."""
    leader = with_lease(tmp_path)
    leader._run.fence.has_led = True
    leader._failover.met_lease(LEASE, lost=lost)
    finish = leader._executor.finish
    assert finish is not None
    assert why in finish.message
    assert leader._run.fence.led_elsewhere
    assert leader._run.fence.gave_way is not lost, "no two of them train"


def test_nothing_begins_before_every_host_was_asked_who_leads() -> None:
    takeover = Takeover(["n1", "n2"], RunSummary(generation_hosts=["n1"]), None, deadline=0.0)
    takeover.answered("n1", None)
    assert not takeover.complete, "n2 may be led by another"
    takeover.answered("n2", None)
    assert takeover.complete
    takeover.lease_open = True
    assert not takeover.complete, "another may hold a lease on the run"


def test_where_the_last_generation_lives_nobody_else_leads() -> None:
    takeover = Takeover(
        ["n1", "n2", "n3"], RunSummary(generation_hosts=["n1", "n2"]), None, deadline=0.0
    )
    takeover.lease_open = True
    for host in ("n1", "n2"):
        assert not takeover.complete
        takeover.answered(host, HELD)
    assert takeover.complete, "n3 is not waited for"
    assert takeover.event(()).awaited == ("n3",)


def test_a_leader_that_stood_still_counts_nobodys_silence_before_it_begins(tmp_path: Path) -> None:
    run = RunFolder.create("met", root=tmp_path)
    leader = Leader(RunSpec(("true",), "/"), run, {}, lambda _: None, lambda *_: None)
    silent: Any = AgentHeard(last_heard=98.0, up=True)
    heard: Any = AgentHeard(last_heard=129.9, up=True)  # read while the leader was woken
    leader._run.agents.by_host |= {"n1": silent, "n2": heard}
    leader._run.agents._looked_at = 100.0
    leader._liveness.give_up_silent(130.0)
    assert (silent.last_heard, heard.last_heard) == (128.0, 130.0)


def test_who_asks_a_leader_that_looks_for_live_processes_waits_as_long_as_it_does() -> None:
    """And as long as a busy machine, or a slow disk, holds it up beside that."""
    assert COMMAND_TIMEOUT_S > TAKEOVER_S + 30


@pytest.mark.parametrize("has_led", [False, True])
def test_only_one_that_never_led_counts_as_never_there(tmp_path: Path, has_led: bool) -> None:
    """One that was cut off has a run folder with all that it did."""
    run = RunFolder.create("met", root=tmp_path)
    leader = Leader(RunSpec(("true",), "/"), run, {}, lambda _: None, lambda *_: None)
    leader._run.fence.has_led = has_led
    leader._failover._takeover = Takeover(["n1"], RunSummary(), None, deadline=0.0)
    agent: Any = AgentHeard("n1")
    leader._run.agents.by_host["n1"] = agent
    leader._heard(agent, msg.Refused(leader_since(50.0)))
    assert leader._executor.finish is not None
    assert ("has started nothing" in leader._executor.finish.message) is not has_led
    assert leader.gave_way is not has_led
