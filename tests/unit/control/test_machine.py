"""The machine, one situation at a time: events in, commands compared."""

from __future__ import annotations

import pytest

from hvd_elastic.control import commands as cmd
from hvd_elastic.control import events as ev
from hvd_elastic.control.commands import (
    Abort,
    Announce,
    Emit,
    Finish,
    Hold,
    KillWorker,
    Leave,
    SaveState,
    StartAgent,
    StartWorker,
    StopAgent,
)
from hvd_elastic.control.machine import HostSlots, MachineConfig, Phase, RunMachine


class Play:
    """A machine, a clock that stands still until told, and what came out."""

    def __init__(self, *hosts: str, has_checkpoint: bool = False, **config) -> None:
        self.machine = RunMachine(MachineConfig(**config), has_checkpoint)
        self.now = 0.0
        self.emitted: list[Emit] = []
        self.first = self.hosts(*hosts)

    def tell(self, *events: ev.Event, after: float = 0.0) -> list[cmd.Command]:
        """Commands that answer the events, without lines for the event log."""
        self.now += after
        answer = []
        for event in events:
            due = self.machine.deadline()
            commands = self.machine.handle(event, self.now)
            if isinstance(event, ev.Tick) and commands:
                assert due is not None, "nobody would have told the time"
                assert due <= self.now
            answer += commands
        self.emitted += [c for c in answer if isinstance(c, Emit)]
        return [c for c in answer if not isinstance(c, Emit)]

    def hosts(self, *hosts: str) -> list[cmd.Command]:
        """A new hostfile: "a" has one slot, "a*3" has three."""
        parts = [host.partition("*") for host in hosts]
        listed = tuple(HostSlots(name, int(number or 1)) for name, _, number in parts)
        return self.tell(ev.HostsChanged(listed))

    def ready(self, *workers: str, after: float = 0.0) -> list[cmd.Command]:
        return self.tell(*(ev.WorkerReady(worker, 1.0) for worker in workers), after=after)

    def joined(self, *workers: str) -> list[cmd.Command]:
        number = self.machine.generation
        return self.tell(*(ev.WorkerJoined(worker, number) for worker in workers))

    def broken(self, worker: str, step: int, generation: int | None = None) -> list[cmd.Command]:
        number = self.machine.generation if generation is None else generation
        return self.tell(ev.WorkerBroken(worker, number, step))

    def killed(self, worker: str) -> list[cmd.Command]:
        return self.tell(ev.WorkerExited(worker, None, 9))

    def ended(self, worker: str, code: int = 0) -> list[cmd.Command]:
        return self.tell(ev.WorkerExited(worker, code, None))

    def kinds(self, kind: str) -> list[dict[str, object]]:
        return [dict(line.fields) for line in self.emitted if line.kind == kind]

    @property
    def names(self) -> list[str]:
        return [member.worker for member in self.machine.members]


def start(*hosts: str, **config) -> Play:
    """A run whose first generation trains; workers are named host:slot.1."""
    play = Play(*hosts, **config)
    names = [host.partition("*")[0] for host in hosts]
    started = play.tell(*(ev.AgentReady(name) for name in names))
    workers = [c.worker for c in started if isinstance(c, StartWorker)]
    play.ready(*workers)
    play.joined(*workers)
    assert play.machine.phase is Phase.RUNNING
    return play


def announced(commands: list[cmd.Command]) -> Announce:
    """The one announcement among the commands."""
    (found,) = [command for command in commands if isinstance(command, Announce)]
    return found


def is_running(play: Play) -> bool:
    return play.machine.phase is Phase.RUNNING


def starts(commands: list[cmd.Command]) -> list[str]:
    """Workers that are started, if nothing else is asked for."""
    workers = [command.worker for command in commands if isinstance(command, StartWorker)]
    assert len(workers) == len(commands)
    return workers


def members(commands: list[cmd.Command]) -> list[str]:
    return [member.worker for member in announced(commands).members]


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
        "1 of 4 processes is warm, waiting for hosts b, c",
        "2 of 4 processes are warm, waiting for hosts b, c",
        "3 of 4 processes are warm, waiting for host b",
    ]
    assert play.kinds("waiting")[-1]["have"] == 3


def test_slow_start_with_enough_processes_says_who_is_still_waited_for():
    play = Play("a", "b")
    play.tell(ev.AgentReady("a"), ev.AgentReady("b"))
    play.ready("a:0.1", after=7)
    assert waited_for(play)[-1] == "1 of 2 processes is warm, waiting for host b"
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
        "waiting for 1 more of 2 processes: host b cannot be looked up (trying again in 2 s); "
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
    short = "waiting for 1 more of 2 processes: the hostfile has 1 slot, at least 2 are needed"
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
        KillWorker("b:0.1", "worker b:0 was told to leave and did not")
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


# -- failures ------------------------------------------------------------------------------


def test_death_of_a_member_regroups_the_survivors_at_once():
    play = start("a", "b", "c")
    cause = "worker b:0 was killed by signal 9"
    assert play.killed("b:0.1") == [Abort(1, cause)]
    assert play.broken("a:0.1", 7) == []
    new = announced(play.broken("c:0.1", 8))
    assert [m.worker for m in new.members] == ["a:0.1", "c:0.1"]
    assert new.root == "c:0.1"  # it had completed the step
    assert new.reason == f"{cause}: 3 → 2 slots"
    assert play.tell(ev.Tick(), after=0.5) == [StartWorker("b:0.2", "b", 0)]
    assert play.ready("b:0.2") == []
    grown = announced(play.joined("a:0.1", "c:0.1"))
    assert [m.worker for m in grown.members] == ["a:0.1", "b:0.2", "c:0.1"]
    assert grown.reason == "host b joined: 2 → 3 slots"


def test_root_is_the_lowest_rank_among_equals():
    play = start("a", "b", "c")
    play.killed("a:0.1")
    play.broken("c:0.1", 7)
    assert announced(play.broken("b:0.1", 7)).root == "b:0.1"


def test_root_among_equals_is_the_one_whose_state_is_newer():
    play = start("a", "b", "c", "d")
    play.killed("a:0.1")
    play.tell(ev.WorkerBroken("b:0.1", 1, 7), ev.WorkerBroken("c:0.1", 1, 7, state=2))
    assert announced(play.tell(ev.WorkerBroken("d:0.1", 1, 7, state=1))).root == "c:0.1"


def test_root_is_by_step_before_it_is_by_state():
    play = start("a", "b", "c")
    play.killed("a:0.1")
    play.tell(ev.WorkerBroken("b:0.1", 1, 6, state=9))
    assert announced(play.broken("c:0.1", 7)).root == "c:0.1"


def test_state_of_an_earlier_generation_does_not_count():
    play = start("a", "b", "c", restart_backoff_s=(100,))
    play.killed("a:0.1")
    play.tell(ev.WorkerBroken("b:0.1", 1, 7), ev.WorkerBroken("c:0.1", 1, 7, state=1))
    play.joined("b:0.1", "c:0.1")
    play.tell(ev.Tick(), after=100)
    assert announced(play.ready("a:0.2")).root == "b:0.1"


def test_newer_state_of_the_same_step_is_kept_though_its_host_left():
    play = start("a", "b", min_np=1)
    play.broken("a:0.1", 7)
    play.hosts("a")
    new = announced(play.tell(ev.WorkerBroken("b:0.1", 1, 7, state=1)))
    assert ([m.worker for m in new.members], new.root) == (["a:0.1", "b:0.1"], "b:0.1")


def test_broken_before_the_death_that_caused_it_is_known():
    play = start("a", "b", "c")
    assert play.broken("a:0.1", 7) == [Abort(1, "worker a:0 broke off: a collective failed")]
    assert play.broken("c:0.1", 7) == []
    assert members(play.killed("b:0.1")) == ["a:0.1", "c:0.1"]


def test_lost_host_takes_all_its_workers_along():
    play = start("a", "b*2")
    assert play.tell(ev.AgentLost("b", "no heartbeat", 3.2)) == [
        Abort(1, "host b was lost (no heartbeat)")
    ]
    new = announced(play.broken("a:0.1", 7))
    assert new.reason == "host b was lost (no heartbeat): 3 → 1 slot"
    assert play.kinds("host_lost") == [{"host": "b", "cause": "no heartbeat", "silent_s": 3.2}]
    assert len(play.kinds("worker_left")) == 2
    assert play.killed("b:0.1") == []  # said by the old agent, too late
    assert play.tell(ev.Tick(), after=1) == [StartAgent("b")]
    assert starts(play.tell(ev.AgentReady("b"))) == ["b:0.2", "b:1.2"]


def test_below_min_np_survivors_wait_and_then_go_on():
    play = start("a", "b", min_np=2)
    play.killed("b:0.1")
    assert play.broken("a:0.1", 7) == []
    assert play.kinds("waiting")[-1]["have"] == 1
    play.tell(ev.Tick(), after=0.5)
    new = announced(play.ready("b:0.2"))
    assert (new.root, len(new.members)) == ("a:0.1", 2)


def test_member_that_gives_no_answer_is_killed_and_not_waited_for():
    play = start("a", "b", "c")
    play.killed("c:0.1")
    play.broken("a:0.1", 7)
    assert play.tell(ev.Tick(), after=59.9)[1:] == []
    answer = play.tell(ev.Tick(), after=0.1)
    assert KillWorker("b:0.1", "worker b:0 gave no answer") in answer
    assert members(answer) == ["a:0.1"]
    assert play.broken("b:0.1", 9, generation=1) == []  # its kill is on the way
    assert play.killed("b:0.1") == []
    assert play.tell(ev.Tick(), after=0.5) == [StartWorker("b:0.2", "b", 0)]


def test_member_that_is_being_killed_is_not_counted_on():
    play = start("a", "b", "c", min_np=2)
    play.killed("c:0.1")
    play.broken("a:0.1", 7)
    assert KillWorker("b:0.1", "worker b:0 gave no answer") in play.tell(ev.Tick(), after=60)
    assert play.broken("b:0.1", 7) == []
    assert play.ready("c:0.2") == []
    assert members(play.tell(ev.Tick(), after=0.5)) == ["a:0.1", "c:0.2"]


def test_nobody_is_let_go_before_it_is_known_who_survives():
    play = start("a", "b", "c")
    play.killed("a:0.1")
    play.hosts("b")
    assert play.broken("c:0.1", 8) == []
    assert play.broken("b:0.1", 7)[0] != Leave("c:0.1")  # it alone has step 8
    assert play.names == ["b:0.1", "c:0.1"]
    answer = play.joined("b:0.1", "c:0.1")
    assert members(answer) == ["b:0.1"]
    assert Leave("c:0.1") in answer


def test_the_only_holders_of_the_state_are_given_more_time():
    # A newcomer gave up its rendezvous while the members were busy with a long validation.
    play = start("a", "b")
    play.hosts("a", "b", "c")
    play.tell(ev.AgentReady("c"))
    play.ready("c:0.1")
    assert play.broken("c:0.1", -1)[0] == Abort(2, "worker c:0 broke off: a collective failed")
    assert play.tell(ev.Tick(), after=290) == []
    assert play.broken("a:0.1", 7, generation=1) == []
    assert play.tell(ev.Tick(), after=59) == []  # b is likely to follow
    answer = play.tell(ev.Tick(), after=1)
    assert KillWorker("b:0.1", "worker b:0 gave no answer") in answer
    assert members(answer) == ["a:0.1", "c:0.1"]


def test_nobody_survives():
    play = start("a", "b")
    play.killed("a:0.1")
    play.killed("b:0.1")
    assert starts(play.tell(ev.Tick(), after=0.5)) == ["a:0.2", "b:0.2"]
    new = announced(play.ready("a:0.2", "b:0.2"))
    assert new.root is None
    assert new.restore


def test_member_dies_while_the_generation_forms():
    play = start("a", "b")
    play.hosts("a", "b", "c")
    play.tell(ev.AgentReady("c"))
    play.ready("c:0.1")
    play.joined("a:0.1")
    assert play.killed("b:0.1") == [Abort(2, "worker b:0 was killed by signal 9")]
    assert play.broken("c:0.1", -1) == []
    new = announced(play.broken("a:0.1", 5))
    assert [m.worker for m in new.members] == ["a:0.1", "c:0.1"]
    assert new.root == "a:0.1"


def test_newcomer_dies_in_the_rendezvous():
    play = start("a", "b")
    play.hosts("a", "b", "c")
    play.tell(ev.AgentReady("c"))
    play.ready("c:0.1")
    play.killed("c:0.1")
    assert play.broken("a:0.1", 5, generation=1) == []  # it had not even begun to join
    assert members(play.broken("b:0.1", 5)) == ["a:0.1", "b:0.1"]


def test_newcomer_that_cannot_reach_the_others_does_not_stop_them_for_ever():
    play = start("a", "b")
    play.hosts("a", "b", "c")
    play.tell(ev.AgentReady("c"))
    play.ready("c:0.1")
    for tries, delay in ((1, 0.5), (2, 1.0)):
        play.tell(ev.WorkerBroken("c:0.1", play.machine.generation, -1, "connect timed out"))
        play.broken("b:0.1", 5)
        assert members(play.broken("a:0.1", 5)) == ["a:0.1", "b:0.1"], tries
        play.joined("a:0.1", "b:0.1")
        assert members(play.tell(ev.Tick(), after=delay)) == ["a:0.1", "b:0.1", "c:0.1"]
    play.tell(ev.WorkerBroken("c:0.1", play.machine.generation, -1, "connect timed out"))
    play.broken("b:0.1", 5)
    answer = play.broken("a:0.1", 5)
    assert Leave("c:0.1") in answer
    assert members(answer) == ["a:0.1", "b:0.1"]
    assert "connect timed out" in str(play.kinds("warning")[-1]["message"])


def test_start_that_never_comes_about_fails_with_the_cause():
    play = Play("a", "b", min_np=2)
    play.tell(ev.AgentReady("a"), ev.AgentReady("b"))
    play.ready("a:0.1", "b:0.1")
    answer: list[cmd.Command] = []
    for delay in (0.5, 1.0, 2.0):
        play.tell(ev.WorkerBroken("a:0.1", play.machine.generation, -1, "no route to b"))
        answer = play.broken("b:0.1", -1)
        play.tell(ev.Tick(), after=delay)
    assert isinstance(answer[-1], Finish)
    assert answer[-1].status == "failed"
    assert "no route to b" in answer[-1].message


def test_training_that_always_breaks_at_the_same_step_fails():
    play = start("a", "b", max_stuck_generations=3)
    answer: list[cmd.Command] = []
    for _ in range(3):
        play.tell(ev.WorkerBroken("a:0.1", play.machine.generation, 12, "shapes differ"))
        answer = play.broken("b:0.1", 12)
        play.tell(ev.Tick(), after=10)
        play.joined("a:0.1", "b:0.1")
    assert answer == [
        Finish(
            "failed",
            "training broke 3 times at step 12 though no worker died: "
            "worker a:0 broke off: shapes differ",
        )
    ]


def test_ranks_that_block_each_other_by_the_script_end_the_run():
    play = start("a", "b")
    stuck = ev.GenerationStuck(play.machine.generation - 1, "an older one", by_script=True)
    assert play.tell(stuck) == []
    stuck = ev.GenerationStuck(play.machine.generation, "different collectives", by_script=True)
    assert play.tell(stuck) == [Finish("failed", "different collectives")]


def test_generation_that_is_stuck_before_its_members_leave_it_is_called_off():
    play = start("a", "b")
    first = play.machine.generation, play.machine.members
    assert play.machine.training == first
    play.tell(ev.HostsChanged((HostSlots("a", 1), HostSlots("b", 1), HostSlots("c", 1))))
    play.tell(ev.AgentReady("c"))
    assert announced(play.ready("c:0.1")).generation == first[0] + 1
    assert play.machine.training == first
    assert play.tell(ev.GenerationStuck(first[0], "all wait")) == [Abort(first[0], "all wait")]
    assert play.machine.training == (0, ()), "told once"
    play.joined("a:0.1", "b:0.1", "c:0.1")
    assert play.machine.training == (play.machine.generation, play.machine.members)


def test_root_whose_state_turns_out_torn_is_replaced():
    play = start("a", "b", "c")
    play.killed("c:0.1")
    play.broken("b:0.1", 6)
    new = announced(play.broken("a:0.1", 7))
    assert new.root == "a:0.1"
    # Said before it had heard of generation 2.
    assert play.broken("a:0.1", -1, generation=1) == [
        Abort(2, "the state of worker a:0 is not whole")
    ]
    play.broken("a:0.1", -1)
    assert announced(play.broken("b:0.1", 6)).root == "b:0.1"


def test_events_of_old_generations_change_nothing():
    play = start("a", "b", "c")
    play.killed("c:0.1")
    play.broken("a:0.1", 7)
    play.broken("b:0.1", 7)
    assert play.tell(ev.WorkerJoined("a:0.1", 1)) == []
    assert not is_running(play)
    assert play.tell(ev.WorkerHeld("a:0.1", 1, 7))[1:] == []
    assert play.joined("a:0.1", "b:0.1") == []
    assert is_running(play)


def test_repeated_crashes_of_a_slot_are_slowed_down_then_given_up():
    play = start("a", "b")
    play.killed("b:0.1")
    play.broken("a:0.1", 7)
    last = play.joined("a:0.1")
    for number, delay in ((2, 0.1), (3, 1.0), (4, 2.0)):
        assert play.tell(ev.Tick(), after=delay / 2) == []
        name = f"b:0.{number}"
        assert play.tell(ev.Tick(), after=delay / 2) == [StartWorker(name, "b", 0)]
        last = play.killed(name)
    assert last == [StopAgent("b")]
    assert play.tell(ev.Tick(), after=1000) == []
    assert "slot b:0 is given up" in str(play.kinds("warning")[-1]["message"])


def test_slot_that_was_sound_for_long_starts_its_backoff_anew():
    play = start("a", "b")
    for number, lived, delay in ((1, 0, 0.1), (2, 0, 1.0), (3, 100, 0.1)):
        play.now += lived
        play.killed(f"b:0.{number}")
        play.broken("a:0.1", 7)
        play.joined("a:0.1")
        assert play.machine.deadline() == play.now + delay
        play.tell(ev.Tick(), after=delay)
        play.ready(f"b:0.{number + 1}")
        play.joined("a:0.1", f"b:0.{number + 1}")


def test_host_that_was_taken_out_and_put_back_is_tried_at_once():
    play = Play("a", "b")
    play.tell(ev.AgentFailed("b", "host b: unreachable"))
    assert play.hosts("a") == []
    assert play.hosts("a", "b") == [StartAgent("b")]


def test_slot_that_is_given_up_is_replaced_by_a_spare_one():
    play = start("a", "b", "c", np=2)
    play.killed("b:0.1")
    play.broken("a:0.1", 7)
    last = play.joined("a:0.1")
    for number, delay in ((2, 0.1), (3, 1.0), (4, 2.0)):
        play.tell(ev.Tick(), after=delay)
        last = play.killed(f"b:0.{number}")
    assert last == [StartAgent("c"), StopAgent("b")]


def test_run_without_usable_slots_fails_and_names_the_causes():
    play = Play("a", "b", min_np=2)
    play.tell(ev.AgentReady("a"))
    (end,) = play.tell(ev.AgentFailed("b", "host b: no module named torch", fatal=True))
    assert end == Finish(
        "failed",
        "1 of 2 slots can be used and at least 2 are needed: host b: no module named torch",
    )


def test_survivors_outlive_a_host_that_cannot_come_back():
    play = start("a", "b", min_np=2)
    play.tell(ev.AgentLost("b", "rebooted"))
    play.broken("a:0.1", 7)
    play.tell(ev.Tick(), after=1)
    assert play.tell(ev.AgentFailed("b", "host key changed", fatal=True)) == []
    assert "host b cannot be used" in str(play.kinds("waiting")[-1]["reason"])
    assert "host key changed" in str(play.kinds("warning")[-1]["message"])
    assert play.hosts("a", "b") == [StartAgent("b")]


# -- the script's own end ------------------------------------------------------------------


def test_script_error_ends_the_run_once_with_its_traceback():
    play = start("a", "b")
    (end,) = play.tell(ev.ScriptFailed("b:0.1", "Traceback ...\nValueError: bad data\n"))
    assert end == Finish("failed", "the training script failed in worker b:0: ValueError: bad data")
    assert play.kinds("script_failed") == [
        {"host": "b", "local_rank": 0, "traceback": "Traceback ...\nValueError: bad data\n"}
    ]
    assert play.tell(ev.ScriptFailed("a:0.1", "x"), ev.Tick()) == []
    assert play.machine.deadline() is None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (0, "ended with exit status 0 without ever calling the run function of hvd_elastic"),
        (1, "ended with exit status 1 before training began"),
    ],
)
def test_script_that_ends_before_training(code, message):
    play = Play("a")
    play.tell(ev.AgentReady("a"))
    (end,) = play.ended("a:0.1", code)
    assert isinstance(end, Finish)
    assert end.status == "failed"
    assert message in end.message


@pytest.mark.parametrize("code", [0, 1, 255])
def test_member_that_ends_by_itself_fails_the_run(code):
    play = start("a", "b")
    (end,) = play.ended("a:0.1", code)
    assert isinstance(end, Finish)
    assert "before its training function returned" in end.message


def test_exit_status_of_a_shell_that_reports_a_signal_is_a_death():
    play = start("a", "b")
    assert play.ended("b:0.1", 137) == [Abort(1, "worker b:0 was killed by signal 9")]


def test_newcomer_whose_script_fails_does_not_end_a_healthy_run():
    play = start("a")
    play.hosts("a", "b")
    play.tell(ev.AgentReady("b"))
    assert play.tell(ev.ScriptFailed("b:0.1", "FileNotFoundError: data")) == []
    assert play.ended("b:0.1", 1) == []
    assert play.machine.phase is Phase.RUNNING
    assert play.tell(ev.Tick(), after=0.5) == [StartWorker("b:0.2", "b", 0)]


def test_all_finish():
    play = start("a", "b")
    assert play.tell(ev.WorkerFinished("b:0.1"), ev.WorkerFinished("a:0.1")) == []
    assert play.ended("a:0.1") == []
    (end,) = play.ended("b:0.1")
    assert isinstance(end, Finish)
    assert end.status == "succeeded"
    assert play.tell(ev.Tick(), ev.StopRequested("late")) == []


def test_nobody_joins_any_more_once_somebody_finished():
    play = start("a", "b")
    play.hosts("a", "b", "c", "d")
    play.tell(ev.AgentReady("c"), ev.AgentReady("d"))
    play.ready("c:0.1")
    assert play.tell(ev.WorkerFinished("a:0.1")) == [Leave("c:0.1"), Leave("d:0.1")]
    assert play.ended("d:0.1", 1) == []  # whatever a standby does is of no interest
    assert play.tell(ev.Tick(), after=2) == []
    assert play.hosts("a", "b", "e") == []


def test_member_dies_while_others_finish():
    play = start("a", "b", "c", min_np=2)
    play.tell(ev.WorkerFinished("a:0.1"))
    assert play.ended("a:0.1") == []
    assert play.killed("c:0.1") == [Abort(1, "worker c:0 was killed by signal 9")]
    new = announced(play.broken("b:0.1", 99))
    assert [m.worker for m in new.members] == ["b:0.1"]  # min_np does not matter now
    assert new.root == "b:0.1"
    play.joined("b:0.1")
    play.tell(ev.WorkerFinished("b:0.1"))
    (end,) = play.ended("b:0.1")
    assert isinstance(end, Finish)
    assert end.status == "succeeded"


def test_rank_0_that_dies_before_its_end_fails_the_run():
    play = start("a", "b")
    play.tell(ev.WorkerFinished("b:0.1"))
    play.ended("b:0.1")
    (abort, end) = play.killed("a:0.1")
    assert isinstance(abort, Abort)
    assert isinstance(end, Finish)
    assert end.status == "failed"
    assert "killed by signal 9" in end.message


def test_rank_0_that_was_told_to_leave_need_not_come_to_the_end():
    play = start("a", "b")
    assert Leave("a:0.1") in play.hosts("b")
    play.tell(ev.WorkerFinished("b:0.1"))
    play.ended("a:0.1")
    (end,) = play.ended("b:0.1")
    assert isinstance(end, Finish)
    assert end.status == "succeeded"


def test_script_that_fails_after_training_fails_the_run():
    play = start("a")
    play.tell(ev.WorkerFinished("a:0.1"))
    (end,) = play.ended("a:0.1", 1)
    assert isinstance(end, Finish)
    assert end.status == "failed"
    assert "after training was done" in end.message


def test_training_ends_while_a_newcomer_is_being_taken_in():
    play = start("a", "b")
    play.hosts("a", "b", "c")
    play.tell(ev.AgentReady("c"))
    play.ready("c:0.1")
    assert play.tell(ev.WorkerFinished("a:0.1")) == [
        Leave("c:0.1"),
        KillWorker("c:0.1", "worker c:0 came when training was over"),
    ]
    assert play.killed("c:0.1") == []
    play.tell(ev.WorkerFinished("b:0.1"))
    play.ended("a:0.1")
    (end,) = play.ended("b:0.1")
    assert isinstance(end, Finish)
    assert end.status == "succeeded"


def starts_alone(**config) -> Play:
    """a trains alone; b, which the run is wanted on too, is still starting."""
    play = Play("a", "b", **config)
    play.tell(ev.AgentReady("a"), ev.AgentReady("b"))
    play.ready("a:0.1")
    assert members(play.tell(ev.Tick(), after=5)) == ["a:0.1"]
    play.joined("a:0.1")
    return play


def finish_of(commands: list[cmd.Command]) -> Finish:
    (end,) = commands
    assert isinstance(end, Finish)
    return end


def test_run_ends_well_though_its_second_worker_becomes_ready_after_training():
    play = starts_alone()
    assert play.tell(ev.WorkerFinished("a:0.1")) == [Leave("b:0.1")]
    assert play.ready("b:0.1") == []
    assert finish_of(play.ended("a:0.1")).status == "succeeded"


def test_run_does_not_wait_for_a_worker_that_starts_when_all_have_finished():
    play = start("a", "b")
    play.hosts("a", "b", "c")
    play.tell(ev.AgentReady("c"))
    assert play.tell(ev.WorkerFinished("a:0.1"), ev.WorkerFinished("b:0.1")) == [Leave("c:0.1")]
    play.ended("a:0.1")
    assert finish_of(play.ended("b:0.1")).status == "succeeded"


def test_worker_that_finished_while_it_was_told_to_leave_is_waited_for():
    play = start("a", "b")
    play.hosts("b")
    play.killed("b:0.1")  # the one that was to stay; its host's agent still answers
    play.tell(ev.WorkerFinished("a:0.1"))
    assert finish_of(play.ended("a:0.1")).status == "succeeded"


def test_worker_that_is_silent_after_its_end_is_named_when_it_is_killed():
    play = starts_alone()
    play.tell(ev.WorkerFinished("a:0.1"))
    kill, end = play.tell(ev.WorkerSilent("a:0.1", "gave no sign of life for 60.0 s"))
    assert isinstance(kill, KillWorker)
    assert end == Finish(
        "failed",
        "rank 0 did not come to its end: worker a:0 gave no sign of life for 60.0 s after its "
        "training function had returned; resume to complete the run",
    )


def test_member_whose_joining_is_told_late_is_not_taken_for_one_that_waits():
    play = start("b")
    play.hosts("a", "b")
    play.tell(ev.AgentReady("a"))
    assert members(play.ready("a:0.1")) == ["a:0.1", "b:0.1"]
    # Training is over at once; the connection to a is slower than that to b.
    play.joined("b:0.1")
    assert play.tell(ev.WorkerFinished("b:0.1")) == []
    assert play.ended("b:0.1") == []
    play.joined("a:0.1")
    play.tell(ev.WorkerFinished("a:0.1"))
    assert finish_of(play.ended("a:0.1")).status == "succeeded"


def test_member_that_joined_too_late_is_freed_when_the_others_finished():
    play = start("a", "b")
    play.hosts("a", "b", "c")
    play.tell(ev.AgentReady("c"))
    play.ready("c:0.1")
    play.tell(ev.WorkerFinished("a:0.1"))
    play.killed("c:0.1")
    play.ended("a:0.1")
    assert play.tell(ev.Tick(), after=60) == [Abort(2, "training is over for some of its members")]
    assert members(play.broken("b:0.1", 7)) == ["b:0.1"]


# -- stopping ------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["start", "forming", "running", "regrouping", "held"])
def test_stop_at_any_moment(moment):
    play = Play("a", "b", min_np=2) if moment == "start" else start("a", "b", min_np=2)
    if moment == "forming":
        play.hosts("a", "b", "c")
        play.tell(ev.AgentReady("c"))
        play.ready("c:0.1")
    elif moment == "regrouping":
        play.killed("b:0.1")
    elif moment == "held":
        play.hosts("a")
    assert play.tell(ev.StopRequested("Ctrl-C")) == [Finish("stopped", "Ctrl-C")]
    assert play.tell(ev.WorkerExited("a:0.1", 1, None), ev.AgentReady("c"), ev.Tick()) == []
    assert play.machine.deadline() is None


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


# -- silence -------------------------------------------------------------------------------


def test_silent_member_is_killed_and_the_others_go_on_without_it():
    play = start("a", "b", "c")
    cause = "worker b:0 gave no sign of life for 5.0 s"
    answer = play.tell(ev.WorkerSilent("b:0.1", "gave no sign of life for 5.0 s"))
    assert answer == [KillWorker("b:0.1", cause), Abort(1, cause)]
    play.broken("a:0.1", 9)
    assert members(play.broken("c:0.1", 9)) == ["a:0.1", "c:0.1"], "nobody waits for its end"
    play.joined("a:0.1", "c:0.1")
    assert is_running(play)
    play.killed("b:0.1")
    left = play.kinds("worker_left")[-1]
    assert (left["cause"], left["how"]) == (cause, "killed")
    assert is_running(play)
    assert starts(play.tell(ev.Tick(), after=1.0)) == ["b:0.2"]


def test_silence_is_told_once():
    play = start("a", "b")
    play.tell(ev.WorkerSilent("b:0.1", "gave no sign of life"))
    assert play.tell(ev.WorkerSilent("b:0.1", "gave no sign of life")) == []


def test_silent_standby_is_replaced_without_the_others_noticing():
    play = start("a")
    play.hosts("a", "b")
    play.tell(ev.AgentReady("b"))
    answer = play.tell(ev.WorkerSilent("b:0.1", "gave no sign of life"))
    assert answer == [KillWorker("b:0.1", "worker b:0 gave no sign of life")]
    play.killed("b:0.1")
    assert starts(play.tell(ev.Tick(), after=1.0)) == ["b:0.2"]
    assert is_running(play)


def test_silent_leaver_releases_those_blocked_with_it():
    play = start("a", "b")
    play.hosts("a")
    cause = "worker b:0 gave no sign of life"
    answer = play.tell(ev.WorkerSilent("b:0.1", "gave no sign of life"))
    assert answer[0] == KillWorker("b:0.1", cause)
    play.broken("a:0.1", 5, generation=1)
    play.killed("b:0.1")
    play.joined("a:0.1")
    assert is_running(play) or play.names == ["a:0.1"]


def test_generation_that_is_stuck_is_called_off_and_formed_again():
    play = start("a", "b")
    assert play.tell(ev.GenerationStuck(1, "all wait")) == [Abort(1, "all wait")]
    play.broken("a:0.1", 5)
    assert members(play.broken("b:0.1", 5)) == ["a:0.1", "b:0.1"]
    assert play.tell(ev.GenerationStuck(1, "all wait")) == [], "an old one"


# -- spares --------------------------------------------------------------------------------


def start_with_spare(*hosts: str, members: int) -> Play:
    """A run on the first hosts, the last one's worker a warm spare."""
    play = Play(*hosts, np=members, spares=len(hosts) - members)
    play.tell(*(ev.AgentReady(host) for host in hosts))
    play.ready(*(f"{host}:0.1" for host in hosts))
    play.joined(*(f"{host}:0.1" for host in hosts[:members]))
    assert is_running(play)
    assert len(play.names) == members
    return play


def test_spares_are_warmed_and_wait():
    play = start_with_spare("a", "b", members=1)
    assert play.tell(ev.Tick(), after=100.0) == []


def test_spares_are_taken_from_all_slots_where_no_number_is_asked_for():
    play = Play("a*2", "b", spares=1)
    play.tell(ev.AgentReady("a"), ev.AgentReady("b"))
    play.ready("a:0.1")
    assert members(play.ready("a:1.1")) == ["a:0.1", "a:1.1"]


def test_spare_takes_the_place_of_a_lost_worker_in_the_same_rescale():
    play = start_with_spare("a", "b", "c", members=2)
    play.killed("b:0.1")
    assert members(play.broken("a:0.1", 5)) == ["a:0.1", "c:0.1"]
    play.joined("a:0.1", "c:0.1")
    # The slot of the lost worker holds the next spare.
    assert starts(play.tell(ev.Tick(), after=1.0)) == ["b:0.2"]
    assert play.ready("b:0.2") == []
    assert is_running(play)


def test_spare_comes_before_the_next_worker_of_the_slot_however_late_survivors_answer():
    play = start_with_spare("a", "b", "c", members=2)
    play.killed("b:0.1")
    assert starts(play.tell(ev.Tick(), after=1.0)) == ["b:0.2"]
    assert members(play.broken("a:0.1", 5)) == ["a:0.1", "c:0.1"]


def test_too_few_slots_for_spares_are_used_for_training():
    play = start("a", "b", np=2, spares=2)
    assert play.names == ["a:0.1", "b:0.1"]


def test_spare_of_a_host_that_left_the_hostfile_is_dismissed():
    play = start_with_spare("a", "b", members=1)
    assert play.hosts("a") == [Leave("b:0.1")]
    assert play.ended("b:0.1") == [StopAgent("b")]


# -- another leader ------------------------------------------------------------------------


def found(play: Play, **changes: ev.FoundWorker) -> ev.RunTakenOver:
    """What another leader finds of the run: all as it was, but for some workers."""
    number = play.machine.generation
    workers = {
        member.worker: ev.FoundWorker(
            *(member.worker, member.host, member.slot),
            ready=True,
            generation=number,
            joined=number,
            holds_state=True,
        )
        for member in play.machine.members
    }
    for host, worker in changes.items():
        workers[f"{host}:0.1"] = worker
    hosts = tuple(ev.HostSlots(name, 1) for name in ("a", "b", "c"))
    return ev.RunTakenOver(
        hosts,
        agents=("a", "b", "c"),
        generation=number,
        members=play.machine.members,
        workers=tuple(worker for worker in workers.values() if worker.worker),
    )


LOST = ev.FoundWorker("", "", 0)


def successor(event: ev.RunTakenOver, **config) -> tuple[Play, list[cmd.Command]]:
    play = Play.__new__(Play)
    play.machine, play.now, play.emitted = RunMachine(MachineConfig(**config), True), 0.0, []
    return play, play.tell(event)


def test_next_leader_goes_on_with_a_run_that_trains():
    old = start("a", "b", "c")
    play, answer = successor(found(old))
    assert answer == []
    assert is_running(play)
    assert play.names == old.names
    assert play.kinds("taken_over") == [{"generation": 1, "size": 3, "workers": 3}]
    # What it does next is numbered on from there, and so are its workers.
    play.killed("b:0.1")
    play.broken("a:0.1", 5)
    assert announced(play.broken("c:0.1", 5)).generation == 2
    play.joined("a:0.1", "c:0.1")
    assert starts(play.tell(ev.Tick(), after=1.0)) == ["b:0.2"]


def test_next_leader_misses_a_member():
    play, answer = successor(found(start("a", "b", "c"), b=LOST))
    assert [type(command) for command in answer] == [Abort, StartWorker]
    play.broken("a:0.1", 5)
    new = announced(play.broken("c:0.1", 5))
    assert [member.worker for member in new.members] == ["a:0.1", "c:0.1"]
    assert "worker b:0 was lost with the leader" in new.reason


def test_next_leader_finds_a_generation_that_broke():
    waits = ev.FoundWorker(
        *("b:0.1", "b", 0),
        ready=True,
        generation=1,
        joined=1,
        waiting=True,
        holds_state=True,
        step=7,
        state=1,
    )
    play, answer = successor(found(start("a", "b", "c"), b=waits))
    assert [type(command) for command in answer] == [Abort]
    play.broken("a:0.1", 7)
    assert announced(play.broken("c:0.1", 6)).root == "b:0.1"


def test_next_leader_finds_a_generation_that_was_being_formed():
    newcomer = ev.FoundWorker("c:0.1", "c", 0, ready=True, generation=1)
    play, answer = successor(found(start("a", "b", "c"), c=newcomer))
    assert answer == [], "its joining may be among the news that come late"
    assert [type(c) for c in play.tell(ev.GenerationStuck(1, "lost"))] == [Abort]
    play.tell(ev.WorkerBroken("c:0.1", 1, -1))
    play.broken("a:0.1", 5)
    assert members(play.broken("b:0.1", 5)) == ["a:0.1", "b:0.1", "c:0.1"]


def test_next_leader_hears_late_that_the_first_generation_was_formed():
    starting = {
        host: ev.FoundWorker(f"{host}:0.1", host, 0, ready=True, generation=1) for host in "abc"
    }
    play, answer = successor(found(start("a", "b", "c"), **starting))
    assert answer == []
    play.joined("a:0.1", "b:0.1", "c:0.1")
    assert is_running(play)


def test_next_leader_finds_workers_that_never_trained():
    standby = ev.FoundWorker("a:0.1", "a", 0, ready=True)
    event = ev.RunTakenOver((ev.HostSlots("a", 1),), agents=("a",), workers=(standby,))
    play, answer = successor(event)
    assert announced(answer).restore
    assert play.names == ["a:0.1"]


def test_next_leader_finds_nothing():
    hosts = (ev.HostSlots("a", 1), ev.HostSlots("b", 1))
    play, answer = successor(ev.RunTakenOver(hosts, agents=("a",), awaited=("b",)))
    assert answer == [StartWorker("a:0.1", "a", 0)]
    assert play.tell(ev.AgentReady("b")) == [StartWorker("b:0.1", "b", 0)]


def test_next_leader_has_a_shorter_hostfile():
    event = found(start("a", "b", "c"))
    shorter = ev.RunTakenOver(
        event.hosts[:2],
        agents=event.agents,
        generation=1,
        members=event.members,
        workers=event.workers,
    )
    _play, answer = successor(shorter)
    assert members(answer) == ["a:0.1", "b:0.1"]
    assert Leave("c:0.1") in answer


def test_next_leader_keeps_the_size_that_was_asked_for():
    _play, answer = successor(
        ev.RunTakenOver((ev.HostSlots("a", 4),), agents=("a",), requested_np=2)
    )
    assert starts(answer) == ["a:0.1", "a:1.1"]


def test_leaver_that_the_last_leader_told_is_no_surprise():
    leaver = ev.FoundWorker(
        "c:0.1", "c", 0, ready=True, generation=1, joined=1, holds_state=True, leaving=True
    )
    play, _answer = successor(found(start("a", "b", "c"), c=leaver))
    assert is_running(play)
    play.ended("c:0.1")
    assert play.kinds("worker_left")[-1]["cause"] == "left"


def test_training_that_ended_without_a_leader_ends_the_run():
    play, _ = successor(found(start("a", "b", "c")))
    for name in ("a:0.1", "b:0.1", "c:0.1"):
        play.tell(ev.WorkerFinished(name))
    assert play.ended("a:0.1") == []
    play.ended("b:0.1")
    assert play.ended("c:0.1")[-1] == Finish(
        "succeeded", "the training function returned on every worker"
    )


def test_slots_that_were_asked_for_come_before_those_in_use():
    machine = RunMachine(MachineConfig(min_np=1, np=1))
    hosts = (HostSlots("a", 1), HostSlots("b", 1))
    machine.handle(ev.HostsChanged(hosts), 0.0)
    commands = machine.handle(ev.TargetChanged(1, (("b", 0),)), 0.0)
    assert StartAgent("b") in commands
    machine.handle(ev.AgentReady("a"), 0.1)
    started = machine.handle(ev.AgentReady("b"), 0.2)
    assert [c.host for c in started if isinstance(c, StartWorker)] == ["b"]


# -- hosts that are drained ----------------------------------------------------------------


def drain(play: Play, host: str, train_for_s: float | None = None) -> list[cmd.Command]:
    return play.tell(ev.HostDraining(host, "a test", train_for_s))


def test_drained_host_is_left_and_not_used_until_it_is_given_back():
    play = start("a", "b")
    answer = drain(play, "b")
    assert members(answer) == ["a:0.1"]
    assert Leave("b:0.1") in answer
    play.joined("a:0.1")
    assert play.kinds("host_drained") == []
    assert play.ended("b:0.1") == [StopAgent("b")]
    assert play.kinds("host_drained") == [{"host": "b"}]
    assert play.hosts("a", "b") == [], "saving the hostfile does not give it back"
    assert play.tell(ev.HostReturned("b")) == [StartAgent("b")]
    assert play.kinds("host_returned") == [{"host": "b"}]
    assert play.tell(ev.HostReturned("b")) == [], "once"


def test_drained_host_that_leaves_the_hostfile_and_comes_back_is_used():
    play = start("a", "b")
    drain(play, "b")
    play.joined("a:0.1")
    play.ended("b:0.1")
    play.hosts("a")
    assert play.hosts("a", "b") == [StartAgent("b")]


def test_host_with_time_left_serves_until_its_replacement_is_warm():
    play = start("a", "b", np=2)
    play.hosts("a", "b", "c")
    assert drain(play, "b", 60.0) == [StartAgent("c")]
    play.tell(ev.AgentReady("c"))
    assert is_running(play), "nothing is changed before"
    answer = play.ready("c:0.1", after=5.0)
    assert members(answer) == ["a:0.1", "c:0.1"]
    assert Leave("b:0.1") in answer


def test_host_with_time_left_is_left_in_time_when_no_replacement_becomes_warm():
    play = start("a", "b", np=2)
    play.hosts("a", "b", "c")
    drain(play, "b", 60.0)
    assert play.tell(ev.Tick(), after=59.0) == []
    assert play.machine.deadline() == 60.0
    answer = play.tell(ev.Tick(), after=1.0)
    assert members(answer) == ["a:0.1"]
    assert Leave("b:0.1") in answer


def test_host_without_a_replacement_is_left_at_once():
    play = start("a", "b")
    assert members(drain(play, "b", 60.0)) == ["a:0.1"]


def test_last_host_saves_its_state_trains_on_and_lets_it_go_once_it_is_saved():
    play = start("a*2")
    assert drain(play, "a", 100.0) == [SaveState("a:0.1")]
    assert is_running(play)
    assert play.tell(ev.StateSaved(40)) == [], "it trains on"
    answer = play.tell(ev.Tick(), after=100.0)
    assert answer == [Hold("a:0.1"), Leave("a:1.1")]
    play.ended("a:1.1")
    assert play.tell(ev.WorkerHeld("a:0.1", 1, 90)) == [SaveState("a:0.1")]
    assert play.tell(ev.StateSaved(40)) == [], "an older checkpoint is not enough"
    assert play.tell(ev.StateSaved(90)) == [Leave("a:0.1")]
    assert play.ended("a:0.1") == [StopAgent("a")]
    assert play.kinds("host_drained") == [{"host": "a"}]
    assert "host a drained" in str(play.kinds("waiting")[-1]["reason"])
    play.hosts("a", "b")
    play.tell(ev.AgentReady("b"))
    new = announced(play.ready("b:0.1"))
    assert (new.root, new.restore) == (None, True)


def test_state_that_is_held_for_a_host_that_goes_moves_to_one_that_comes():
    play = start("a")
    drain(play, "a", 0.0)
    play.tell(ev.WorkerHeld("a:0.1", 1, 7))
    play.hosts("a", "b")
    play.tell(ev.AgentReady("b"))
    new = announced(play.ready("b:0.1"))
    assert (new.root, len(new.members)) == ("a:0.1", 2)
    answer = play.joined("a:0.1", "b:0.1")
    assert members(answer) == ["b:0.1"]
    assert Leave("a:0.1") in answer


def test_host_that_comes_back_takes_its_held_state_along_and_can_be_drained_again():
    play = start("a")
    drain(play, "a", 0.0)
    play.tell(ev.WorkerHeld("a:0.1", 1, 7))
    new = announced(play.tell(ev.HostReturned("a")))
    assert new.root == "a:0.1"
    play.joined("a:0.1")
    drain(play, "a", 0.0)
    assert play.tell(ev.WorkerHeld("a:0.1", 2, 9)) == [SaveState("a:0.1")]


def test_too_few_that_stay_hold_the_state_when_the_time_is_over():
    play = start("a", "b", min_np=2)
    assert drain(play, "b", 30.0) == []
    assert play.tell(ev.Tick(), after=30.0) == [Hold("a:0.1"), Leave("b:0.1")]


def test_next_leader_knows_what_was_drained():
    play = Play()
    answer = play.tell(
        ev.RunTakenOver(hosts=(HostSlots("a", 1), HostSlots("b", 1)), draining=("b", "gone"))
    )
    assert answer == [StartAgent("a")]
    assert play.machine.draining == {"b"}


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
