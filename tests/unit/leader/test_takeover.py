"""What another leader makes of what the hosts of a run still hold."""

from __future__ import annotations

import math
import time
from pathlib import Path
from unittest.mock import Mock

import msgspec

from hvd_elastic.control.events import AgentFailed, FoundWorker
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.failover.failover import Takeover
from hvd_elastic.leader.leader import Leader
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import Draining, RunSummary
from hvd_elastic.run_events import HostSlots
from hvd_elastic.wire.messages import AgentHello, HeldRun
from tests.unit.records.made_events import summarized

HELD = HeldRun(generation=1, members=(), workers=())


def test_who_gave_notice_and_holds_nothing_has_been_away_and_is_back() -> None:
    asked, notice = Draining(0.0, "", None, asked=True), Draining(0.0, "", None, asked=False)
    past = RunSummary(draining={"a": notice, "b": notice, "c": asked})
    takeover = Takeover(["a", "b", "c"], past, None, deadline=0.0)
    takeover.answered("a", HELD)  # it still has workers, and goes soon
    takeover.answered("b", None)
    takeover.answered("c", None)
    assert takeover.came_back == ("b",)
    event = takeover.event(tuple(HostSlots(host, 1) for host in "abc"))
    assert event.draining == ("a", "c"), "c was drained by the user, who has not given it back"


def test_what_the_earlier_leader_may_not_know_is_heard_before_the_run_is_led() -> None:
    """Without the message that its worker has joined, a host would seem stuck in forming."""
    takeover = Takeover(["a", "b"], RunSummary(), None, deadline=math.inf)
    takeover.answered("a", HELD)
    takeover.answered("b", msgspec.structs.replace(HELD, untold=2))
    takeover.told("b")
    takeover.told("a")  # a sample of its use, say
    assert not takeover.complete
    takeover.told("b")
    assert takeover.complete


def test_hosts_that_are_in_no_allocation_any_more_are_not_asked() -> None:
    past = RunSummary(generation_hosts=["gone", "here"])
    assert Takeover(["here", "new"], past, None, deadline=0.0).asked == ["gone", "here", "new"]
    takeover = Takeover(["here", "new"], past, None, deadline=0.0, of_engine=True)
    assert takeover.asked == ["here", "new"]
    takeover.answered("here", HELD)
    assert takeover.complete


def test_generations_are_numbered_on_though_nothing_is_left_of_the_last_one() -> None:
    """The audit orders by them what is told late."""
    began = {"t": 1.0, "kind": "rescale_started", "generation": 7, "hosts": ["a"]}
    takeover = Takeover(["a"], summarized([began]), None, deadline=0.0)
    takeover.answered("a", None)
    assert takeover.event((HostSlots("a", 1),)).generation == 7
    takeover.answered("a", HELD)
    assert takeover.event((HostSlots("a", 1),)).generation == 1, "its workers go by that number"


def test_a_returning_leader_tries_unreachable_hosts_again_and_waits_no_longer_than_before(
    tmp_path: Path,
) -> None:
    folder = RunFolder.create("r1", root=tmp_path)
    leader = Leader(RunSpec(("true",), "/"), folder, {}, print, print, resumed=True)
    failover = leader._failover
    soon = time.monotonic() + 1.0
    takeover = failover._takeover = Takeover(["a"], RunSummary(), None, soon, patient=True)
    failover.hasten()
    assert takeover.deadline == soon
    by_host = failover._run.agents.by_host
    agent = by_host["a"] = Mock(up=False, host=Host("a"))
    failover.hear(agent, AgentFailed("a", "no route"))
    assert "a" not in by_host, "nothing more of that connection is heard"
    assert not takeover.complete
    assert takeover.due(math.inf) == ["a"]


def test_hosts_whose_agents_start_slowly_keep_their_workers(tmp_path: Path) -> None:
    """As on busy machines, where a login and Python's imports take long."""
    folder = RunFolder.create("r1", root=tmp_path)
    leader = Leader(RunSpec(("true",), "/"), folder, {}, print, print, resumed=True)
    failover, led = leader._failover, list[Takeover]()
    failover._lead = led.append
    past = RunSummary(generation_hosts=["a", "b", "dead"])
    takeover = failover._takeover = Takeover(["a", "b", "dead", "new"], past, None, deadline=0.0)
    takeover.latest = math.inf
    by_host = failover._run.agents.by_host
    for host in takeover.asked:
        by_host[host] = Mock(up=False, host=Host(host), is_starting=host != "dead")
    found = msgspec.structs.replace(HELD, workers=(FoundWorker("w1", "b", 0),))
    for host, held in (("a", HELD), ("b", found)):
        failover.retry_unreachable_hosts(time.monotonic())
        assert not led, f"{host} is starting"
        assert failover.deadline is not None
        assert failover.deadline > time.monotonic() - 1.0, "the loop does not spin"
        failover.hear(by_host[host], Mock(spec=AgentHello, held=held))
    takeover.deadline = 0.0
    failover.retry_unreachable_hosts(time.monotonic())
    assert led == [takeover], "what is unreachable, or was no member, is not waited for"
    assert takeover.workers == {"w1": ("b", 0)}


def test_an_agent_that_never_says_hello_is_not_waited_for_without_end(tmp_path: Path) -> None:
    folder = RunFolder.create("r1", root=tmp_path)
    leader = Leader(RunSpec(("true",), "/"), folder, {}, print, print, resumed=True)
    failover, led = leader._failover, list[Takeover]()
    failover._lead = led.append
    failover._takeover = Takeover(["a"], RunSummary(), None, time.monotonic() - 46.0)
    failover._run.agents.by_host["a"] = Mock(up=False, host=Host("a"), is_starting=True)
    failover.retry_unreachable_hosts(time.monotonic())
    assert led


def test_a_stop_is_heard_while_the_hosts_are_asked_and_all_else_waits(tmp_path: Path) -> None:
    folder = RunFolder.create("r1", root=tmp_path)
    shown: list[str] = []
    leader = Leader(
        RunSpec(("true",), "/"),
        folder,
        {},
        lambda event: shown.append(event.kind),
        lambda *_: None,
        resumed=True,
    )
    takeover = leader._failover._takeover = Takeover(["a"], RunSummary(), None, deadline=math.inf)
    folder.send_request("scale", {"np": 2})
    folder.send_request("stop")
    leader._next_tick = 0.0
    leader._tick()
    assert shown == ["stop_requested", "command_done"]
    assert leader._executor.finish is None, "workers that are found write a checkpoint first"
    assert takeover.deadline < math.inf
    assert [request.op for request in folder.take_requests()] == ["scale"]
