"""The machine, one situation at a time: how a run starts, grows and shrinks."""

from __future__ import annotations

import pytest

from hvd_elastic.control import commands as cmd
from hvd_elastic.control import events as ev
from hvd_elastic.control.commands import (
    Abort,
    Finish,
    Hold,
    KillWorker,
    Leave,
    StartAgent,
    StartWorker,
    StopAgent,
)
from hvd_elastic.control.state_machine import MachineConfig, Phase
from tests.unit.control.play import Play, announced, is_running, members, start

# -- start ---------------------------------------------------------------------------------


def test_start_goes_by_agents_then_workers_then_one_announcement():
    play = Play("a*2", "b")
    assert play.first == [StartAgent("a"), StartAgent("b")]
    assert play.tell(ev.AgentReady("a")) == [
        StartWorker("a:0.1", "a", 0),
        StartWorker("a:1.1", "a", 1),
    ]
    assert play.tell(ev.AgentReady("b")) == [StartWorker("b:0.1", "b", 0)]
    assert play.ready("a:1.1", "b:0.1") == []
    answer = play.ready("a:0.1")
    new = announced(answer)
    assert answer == [new]
    assert (new.generation, new.root, new.restore) == (1, None, False)
    assert new.reason == "start on 2 hosts: 0 → 3 slots"
    places = [
        (m.worker, m.rank, m.local_rank, m.local_size, m.cross_rank, m.cross_size)
        for m in new.members
    ]
    assert places == [
        ("a:0.1", 0, 0, 2, 0, 2),
        ("a:1.1", 1, 1, 2, 0, 1),
        ("b:0.1", 2, 0, 1, 1, 2),
    ]


def test_ranks_follow_the_hostfile_and_then_the_slots():
    play = Play("b*2", "a*2", min_np=3)
    play.tell(ev.AgentReady("a"), ev.AgentReady("b"))
    play.ready("a:0.1", "a:1.1", "b:1.1")  # b:0 is late
    play.tell(ev.Tick(), after=5)
    assert play.names == ["b:1.1", "a:0.1", "a:1.1"]
    assert [member.local_rank for member in play.machine.members] == [0, 0, 1]


def test_start_waits_for_stragglers_only_so_long():
    play = Play("a", "b", "c", min_np=2, slow_start_s=60)
    play.tell(*(ev.AgentReady(name) for name in "abc"))
    assert play.ready("c:0.1") == []
    assert play.machine.deadline() == 60  # below min_np there is nothing to hurry for
    assert play.ready("a:0.1", after=3) == []
    assert play.machine.deadline() == 3 + 5
    assert play.tell(ev.Tick(), after=4.9) == []
    assert members(play.tell(ev.Tick(), after=0.1)) == ["a:0.1", "c:0.1"]


def waited_for(play: Play) -> list[object]:
    return [line["reason"] for line in play.kinds("waiting")]


def test_quick_start_says_once_what_it_waits_for():
    play = Play("a", "b", min_np=2)
    play.tell(ev.Tick(), ev.Tick())
    play.tell(ev.AgentReady("a"), ev.AgentReady("b"))
    play.ready("a:0.1", after=4)
    play.ready("b:0.1")
    assert play.kinds("waiting") == [{"reason": "starting workers on a, b", "have": 0, "need": 2}]


def test_slow_start_says_who_is_waited_for():
    play = Play("a", "b*2", "c", min_np=4)
    play.tell(*(ev.AgentReady(name) for name in "abc"))
    play.ready("a:0.1", after=1)
    assert play.machine.deadline() == 5
    play.tell(ev.Tick(), after=4)
    play.ready("b:0.1", after=1)
    play.ready("c:0.1", after=1)
    assert waited_for(play) == [
        "starting workers on a, b, c",
        "1 of 4 workers is warm, waiting for hosts b, c",
        "2 of 4 workers are warm, waiting for hosts b, c",
        "3 of 4 workers are warm, waiting for host b",
    ]
    assert play.kinds("waiting")[-1]["have"] == 3


def test_slow_start_with_enough_processes_says_who_is_still_waited_for():
    play = Play("a", "b")
    play.tell(ev.AgentReady("a"), ev.AgentReady("b"))
    play.ready("a:0.1", after=7)
    assert waited_for(play)[-1] == "1 of 2 workers is warm, waiting for host b"
    assert members(play.tell(ev.Tick(), after=5)) == ["a:0.1"]


def unknown(*hosts: str) -> list[ev.AgentFailed]:
    brief = "cannot be looked up"
    return [
        ev.AgentFailed(host, f"host {host}: no such name", unknown=True, brief=brief)
        for host in hosts
    ]


def try_again(play: Play, seconds: float, *hosts: str) -> list[cmd.Command]:
    """The delay is over, the agents are started once more, and the names are still unknown."""
    assert play.tell(ev.Tick(), after=seconds) == [StartAgent(host) for host in hosts]
    return play.tell(*unknown(*hosts))


def test_run_whose_hosts_are_all_unknown_ends_after_a_few_tries():
    play = Play("a", "b", min_np=2)
    assert play.tell(*unknown("a", "b")) == []
    for seconds in (1, 2):
        assert try_again(play, seconds, "a", "b") == []
    (finish,) = try_again(play, 5, "a", "b")
    assert isinstance(finish, Finish)
    assert finish.status == "failed"
    assert finish.message.startswith("the names of hosts a, b cannot be looked up (4 tries)")


def test_run_that_needs_one_of_its_unknown_hosts_ends_as_well():
    play = Play("a", "b", "c", np=1)
    assert play.tell(*unknown("a")) == [StartAgent("b")]
    assert play.tell(*unknown("b")) == [StartAgent("c")]
    assert play.tell(*unknown("c")) == []
    try_again(play, 1, "a")
    try_again(play, 2, "a")
    (finish,) = try_again(play, 5, "a")
    assert "hosts a, b, c" in finish.message  # type: ignore[union-attr]


def test_one_unknown_host_beside_a_good_or_a_silent_one_is_tried_for_ever():
    for other in (ev.AgentReady("a"), ev.AgentFailed("a", "host a: no answer")):
        play = Play("a", "b", min_np=2)
        play.tell(other, *unknown("b"))
        for seconds in (1, 2, 5, 10, 30, 30):
            again = play.tell(ev.Tick(), after=seconds)
            assert StartAgent("b") in again
            play.tell(*unknown("b"), *([other] if StartAgent("a") in again else []))
        assert play.machine.deadline() is not None


def test_run_that_trained_waits_for_names_that_were_known():
    play = start("a", min_np=1)
    play.tell(ev.AgentLost("a", "no heartbeat"))
    for seconds in (1, 2, 5, 10, 30, 30):
        assert play.tell(ev.Tick(), after=seconds) == [StartAgent("a")]
        assert play.tell(*unknown("a")) == []


def test_saved_hostfile_has_unknown_names_tried_anew():
    play = Play("a")
    play.tell(*unknown("a"))
    for seconds in (1, 2):
        try_again(play, seconds, "a")
    assert play.hosts("a") == [StartAgent("a")]
    for seconds in (0, 1, 2):
        play.tell(ev.Tick(), after=seconds)
        assert play.tell(*unknown("a")) == []


def test_waiting_names_hosts_in_brief_and_says_the_cause_once():
    play = Play("a", "b", "c", min_np=2)
    play.tell(ev.AgentReady("a"), *unknown("b"), ev.AgentFailed("c", "host c: gone", fatal=True))
    play.ready("a:0.1")
    try_again(play, 1, "b")
    assert waited_for(play)[-1] == (
        "waiting for 1 more of 2 workers: host b cannot be looked up (trying again in 2 s); "
        "host c cannot be used (not tried again before the hostfile is saved)"
    )
    assert [line["message"] for line in play.kinds("warning")] == [
        "host b: no such name; trying again",
        "host c: gone",
    ]


def test_a_checkpoint_is_asked_of_members_by_rank_or_of_who_waits_with_the_newest_state():
    play = start("a", "b", "c", min_np=3)

    def holders() -> list[str]:
        return [worker.name for worker in play.machine.state_holders]

    assert holders() == ["a:0.1", "b:0.1", "c:0.1"]
    play.killed("a:0.1")
    assert holders() == ["b:0.1", "c:0.1"], "they have not said yet how far they are"
    play.broken("c:0.1", 7)
    assert holders() == ["c:0.1", "b:0.1"]
    play.broken("b:0.1", 8)
    assert play.machine.phase is Phase.ASSEMBLING
    assert holders() == ["b:0.1", "c:0.1"]
    play.killed("b:0.1")
    assert holders() == ["c:0.1"]


def test_resumed_run_restores():
    play = Play("a", has_checkpoint=True)
    play.tell(ev.AgentReady("a"))
    new = announced(play.ready("a:0.1"))
    assert new.root is None
    assert new.restore


def test_np_and_max_np_limit_what_is_started():
    assert Play("a", "b", "c", np=2).first == [StartAgent("a"), StartAgent("b")]
    assert Play("a", "b", "c", max_np=1).first == [StartAgent("a")]


def test_spare_host_is_used_when_an_agent_fails_and_kept_when_it_comes_back():
    play = Play("a", "b", "c", np=2)
    play.tell(ev.AgentReady("a"))
    assert play.tell(ev.AgentFailed("b", "host b: unreachable")) == [StartAgent("c")]
    assert play.tell(ev.Tick(), after=1) == [StartAgent("b")]
    play.tell(ev.AgentReady("c"))
    assert play.tell(ev.AgentReady("b")) == [StopAgent("b")]  # its place is taken
    assert members(play.ready("a:0.1", "c:0.1")) == ["a:0.1", "c:0.1"]


def test_agent_is_retried_with_backoff_and_a_fatal_one_only_after_an_edit():
    play = Play("a", "b")
    play.tell(ev.AgentReady("a"), ev.AgentFailed("b", "host b: unreachable"))
    for delay in (1, 2, 5, 10, 30, 30):
        assert play.tell(ev.Tick(), after=delay - 0.1) == []
        assert play.tell(ev.Tick(), after=0.1) == [StartAgent("b")]
        play.tell(ev.AgentFailed("b", "host b: unreachable"))
    play.tell(ev.Tick(), after=30)
    play.tell(ev.AgentFailed("b", "host b: python 3.8", fatal=True))
    assert play.tell(ev.Tick(), after=1000) == []
    assert play.hosts("a", "b") == [StartAgent("b")]
    assert [line["message"] for line in play.kinds("warning")] == [
        "host b: unreachable; trying again",
        "host b: python 3.8",
    ]


# -- growing -------------------------------------------------------------------------------


def test_newcomer_joins_only_when_it_is_ready():
    play = start("a", "b")
    assert play.hosts("a", "b", "c") == [StartAgent("c")]
    assert play.tell(ev.AgentReady("c")) == [StartWorker("c:0.1", "c", 0)]
    new = announced(play.ready("c:0.1"))
    assert new.generation == 2
    assert new.root == "a:0.1"
    assert new.reason == "host c joined: 2 → 3 slots"
    assert play.kinds("rescale_started")[-1] == {
        "generation": 2,
        "from_size": 2,
        "to_size": 3,
        "hosts": ["a", "b", "c"],
        "slots": [1, 1, 1],
        "reason": "host c joined: 2 → 3 slots",
    }


def test_newcomers_that_are_nearly_ready_are_waited_for_once():
    play = start("a")
    play.hosts("a", "b*2", "c")
    play.tell(ev.AgentReady("b"), ev.AgentReady("c"))
    assert play.ready("b:1.1") == []
    assert play.ready("b:0.1", after=0.3) == []
    assert members(play.tell(ev.Tick(), after=0.2)) == ["a:0.1", "b:0.1", "b:1.1"]
    # The next one waits for the generation that is forming, not for another window.
    assert play.ready("c:0.1", after=5) == []
    assert members(play.joined("a:0.1", "b:0.1", "b:1.1"))[-1] == "c:0.1"


def grows_by_two(warm_s: float) -> Play:
    """b and c are started together; b became ready after ``warm_s``."""
    play = start("a")
    play.hosts("a", "b", "c")
    play.tell(ev.AgentReady("b"), ev.AgentReady("c"))
    assert play.ready("b:0.1", after=warm_s) == []
    return play


def test_newcomers_that_were_started_together_join_together():
    play = grows_by_two(10)
    assert play.tell(ev.Tick(), after=0.5) == []
    assert members(play.ready("c:0.1", after=0.8)) == ["a:0.1", "b:0.1", "c:0.1"]


@pytest.mark.parametrize(("warm_s", "waits_s"), [(1, 0.5), (10, 1.5), (100, 3)])
def test_newcomer_waits_for_a_slow_one_by_how_long_starts_take(warm_s, waits_s):
    play = grows_by_two(warm_s)
    assert play.machine.deadline() == pytest.approx(warm_s + waits_s)
    assert members(play.tell(ev.Tick(), after=waits_s)) == ["a:0.1", "b:0.1"]


def test_newcomer_does_not_wait_for_one_that_was_started_later():
    play = start("a")
    play.hosts("a", "b", "c")
    play.tell(ev.AgentReady("b"))
    play.tell(ev.AgentReady("c"), after=4)
    play.ready("b:0.1", after=6)
    assert members(play.tell(ev.Tick(), after=0.5)) == ["a:0.1", "b:0.1"]


def test_only_one_generation_forms_at_a_time():
    play = start("a")
    play.hosts("a", "b")
    play.tell(ev.AgentReady("b"))
    play.ready("b:0.1")
    assert play.hosts("a") == []
    assert play.joined("a:0.1") == []
    answer = play.joined("b:0.1")
    assert members(answer) == ["a:0.1"]
    assert answer[1:] == [Leave("b:0.1")]


# -- shrinking -----------------------------------------------------------------------------


def test_shrinking_announces_the_rest_before_anybody_is_told_to_leave():
    play = start("a", "b", "c")
    answer = play.hosts("a", "c")
    assert members(answer) == ["a:0.1", "c:0.1"]
    assert answer[1:] == [Leave("b:0.1")]
    assert announced(answer).reason == "host b left: 3 → 2 slots"
    assert play.ended("b:0.1") == [StopAgent("b")]
    assert play.joined("a:0.1", "c:0.1") == []
    assert play.kinds("worker_left") == [
        {"host": "b", "local_rank": 0, "cause": "left", "how": "left"}
    ]


def test_scaling_down_and_up_again():
    play = start("a*2", "b*2")
    answer = play.tell(ev.TargetChanged(3))
    assert answer[1:] == [Leave("b:1.1")]
    assert announced(answer).reason == "slot b:1 left: 4 → 3 slots"
    play.joined("a:0.1", "a:1.1", "b:0.1")
    # Its slot is not free before it is gone.
    assert play.tell(ev.TargetChanged(None)) == []
    assert play.ended("b:1.1") == [StartWorker("b:1.2", "b", 1)]
    assert members(play.ready("b:1.2"))[-1] == "b:1.2"


def test_scaling_stays_within_the_limits():
    play = start("a*4", min_np=2, max_np=3)
    assert len(play.names) == 3
    assert play.tell(ev.TargetChanged(9)) == []
    assert len(members(play.tell(ev.TargetChanged(1)))) == 2


def test_too_few_survivors_hold_their_state_until_hosts_come():
    # Horovod #3494: a graceful removal that leaves fewer than min_np never ends there.
    play = start("a", "b", "c", min_np=2)
    assert play.hosts("a") == [Hold("a:0.1"), Leave("b:0.1"), Leave("c:0.1")]
    short = "waiting for 1 more of 2 workers: the hosts have 1 slot, at least 2 are needed"
    assert play.kinds("waiting")[-1] == {"reason": short, "have": 1, "need": 2}
    assert play.ended("b:0.1") == [StopAgent("b")]
    assert play.tell(ev.WorkerHeld("a:0.1", 1, 17)) == []
    assert play.ended("c:0.1") == [StopAgent("c")]
    assert play.hosts("a", "d") == [StartAgent("d")]
    play.tell(ev.AgentReady("d"))
    new = announced(play.ready("d:0.1"))
    assert [m.worker for m in new.members] == ["a:0.1", "d:0.1"]
    assert new.root == "a:0.1"
    assert [line["reason"] for line in play.kinds("waiting")[-2:]] == [
        short,
        "starting workers on d",
    ]


def test_replacement_of_all_hosts_goes_over_a_bridge():
    play = start("a", "b")
    assert play.hosts("c", "d") == [StartAgent("c"), StartAgent("d")]
    play.tell(ev.AgentReady("c"), ev.AgentReady("d"))
    assert play.ready("c:0.1") == []  # the old hosts train on meanwhile
    bridge = announced(play.ready("d:0.1"))
    assert [m.worker for m in bridge.members] == ["c:0.1", "d:0.1", "a:0.1", "b:0.1"]
    assert bridge.root == "a:0.1"
    answer = play.joined("a:0.1", "b:0.1", "c:0.1", "d:0.1")
    assert members(answer) == ["c:0.1", "d:0.1"]
    assert announced(answer).root == "c:0.1"
    assert answer[1:] == [Leave("a:0.1"), Leave("b:0.1")]


def test_members_that_must_go_do_not_wait_for_ever_for_replacements():
    play = start("a", "b", min_np=2)
    assert play.hosts("a", "c") == [StartAgent("c")]
    play.tell(ev.AgentReady("c"))
    assert play.tell(ev.Tick(), after=59) == []
    assert play.tell(ev.Tick(), after=1) == [Hold("a:0.1"), Leave("b:0.1")]


def test_emptied_hostfile_keeps_the_state_in_one_worker():
    play = start("a", "b")
    assert play.hosts() == [Hold("a:0.1"), Leave("b:0.1")]
    play.ended("b:0.1")
    play.tell(ev.WorkerHeld("a:0.1", 1, 9))
    assert play.hosts("c") == [StartAgent("c")]
    play.tell(ev.AgentReady("c"))
    bridge = announced(play.ready("c:0.1"))
    assert [m.worker for m in bridge.members] == ["c:0.1", "a:0.1"]
    assert bridge.root == "a:0.1"
    answer = play.joined("c:0.1", "a:0.1")
    assert members(answer) == ["c:0.1"]
    assert answer[1:] == [Leave("a:0.1")]


def test_hostfile_that_is_refilled_takes_the_holder_back():
    play = start("a", "b")
    play.hosts()
    play.hosts("a", "b")
    new = announced(play.tell(ev.WorkerHeld("a:0.1", 1, 9)))
    assert ([m.worker for m in new.members], new.root) == (["a:0.1"], "a:0.1")
    assert play.ended("b:0.1") == [StartWorker("b:0.2", "b", 0)]  # as soon as its slot is free


def test_worker_that_does_not_leave_is_killed():
    play = start("a", "b")
    play.hosts("a")
    assert play.tell(ev.Tick(), after=500) == []  # perhaps all are in one long step
    play.joined("a:0.1")
    assert play.tell(ev.Tick(), after=60) == [
        KillWorker("b:0.1", "worker b:0 did not leave when asked to")
    ]
    assert play.killed("b:0.1") == [StopAgent("b")]


def test_leaver_that_dies_releases_those_blocked_with_it():
    play = start("a", "b", "c")
    play.hosts("a", "b")
    cause = "worker c:0 was killed by signal 9"
    assert play.killed("c:0.1") == [Abort(1, cause), StopAgent("c")]
    # They fall out of the old generation and go on to the one that was announced.
    assert play.broken("a:0.1", 4, generation=1) == []
    assert play.joined("a:0.1", "b:0.1") == []
    assert play.machine.phase is Phase.RUNNING
    assert play.machine.generation == 2


def test_leaver_that_breaks_off_releases_those_blocked_with_it():
    play = start("a", "b", "c")
    play.hosts("a", "b")
    assert play.broken("c:0.1", 4, generation=1) == [
        Abort(1, "worker c:0 broke off: a collective failed")
    ]
    assert play.ended("c:0.1") == [StopAgent("c")]


def test_member_that_breaks_off_while_all_are_being_held():
    play = start("a", "b", "c", min_np=3)
    assert play.hosts("a", "b") == [Hold("a:0.1"), Hold("b:0.1"), Leave("c:0.1")]
    assert play.broken("a:0.1", 4) == [Abort(1, "worker a:0 broke off: a collective failed")]
    assert play.tell(ev.WorkerHeld("b:0.1", 1, 5)) == []
    assert play.machine.phase is Phase.ASSEMBLING


def test_leaver_that_dies_while_others_are_being_held():
    play = start("a", "b", min_np=2)
    play.hosts("a")
    assert play.killed("b:0.1")[0] == Abort(1, "worker b:0 was killed by signal 9")
    play.broken("a:0.1", 4)
    assert play.machine.phase is Phase.ASSEMBLING


# -- the rest ------------------------------------------------------------------------------


def test_nonsense_from_strangers_is_ignored():
    play = start("a")
    assert play.killed("z:0.1") == []
    assert play.tell(ev.AgentLost("z", "gone"), ev.WorkerJoined("z:0.1", 1)) == []
    assert play.broken("a:0.1", 3, generation=9) == []
    assert play.machine.phase is Phase.RUNNING


@pytest.mark.parametrize(
    "wrong", [{"min_np": 0}, {"min_np": 3, "max_np": 2}, {"agent_retry_s": ()}]
)
def test_configuration_out_of_limits(wrong):
    with pytest.raises(ValueError, match=r"min_np|agent_retry_s"):
        MachineConfig(**wrong)


def test_pinned_hosts_come_before_all_others():
    play = Play("a", "b*2", "c", np=3, pinned=("c", "b"))
    assert play.first == [StartAgent("b"), StartAgent("c")]


def test_reports_that_all_members_send_in_a_pause_are_compared_once(monkeypatch):
    hosts = [f"h{number}" for number in range(40)]
    play = Play(*hosts)
    play.tell(*map(ev.AgentReady, hosts))
    newcomers = members(play.ready(*(f"{host}:0.1" for host in hosts)))
    compared = []
    compare = play.machine._compare

    def note(now):
        compared.append(now)
        compare(now)

    monkeypatch.setattr(play.machine, "_compare", note)
    play.joined(*newcomers[:-1])
    assert not compared, "that each has joined is recorded, and decides nothing"
    play.joined(newcomers[-1])
    assert compared
    assert is_running(play)
    *survivors, lost = play.names
    play.killed(lost)
    compared.clear()
    for worker in survivors[:-1]:
        assert play.broken(worker, 5) == []
    assert not compared
    forming = members(play.broken(survivors[-1], 5))
    compared.clear()
    play.joined(*forming[:-1])
    assert not compared
    play.joined(forming[-1])
    assert compared
    assert is_running(play)
