"""The machine when workers and hosts die or fall silent, and spares take their places."""

from __future__ import annotations

import pytest

from hvd_elastic.control import commands as cmd
from hvd_elastic.control import events as ev
from hvd_elastic.control.commands import (
    Abort,
    Finish,
    KillWorker,
    Leave,
    StartAgent,
    StartWorker,
    StopAgent,
)
from hvd_elastic.run_events import HostSlots
from tests.unit.control.play import Play, announced, is_running, members, start, starts

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
    assert grown.reason == "host b rejoined: 2 → 3 slots"


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


def crash(
    play: Play, number: int, step: int = -1, signal: int = 11, *, out_of_memory: bool = False
) -> list[str]:
    """The worker on host a ends for the ``number``-th time; that on b, if any, holds ``step``."""
    answer = play.tell(ev.WorkerExited(f"a:0.{number}", None, signal, out_of_memory))
    others = ["b:0.1"] if step >= 0 else []
    for other in others:
        answer += play.broken(other, step)
    for _ in range(3):
        play.tell(ev.Tick(), after=20)
    play.ready(f"a:0.{number + 1}")
    for _ in range(3):
        play.tell(ev.Tick(), after=20)
    play.joined(f"a:0.{number + 1}", *others)
    return [command.message for command in answer if isinstance(command, Finish)]


def test_crashes_without_progress_end_the_run():
    """An example that crashes whichever rank reads it would be read for ever."""
    play = start("a", "b", min_np=2, max_stuck_generations=3)
    assert [crash(play, number, 12) for number in (1, 2)] == [[], []]
    text = "workers crashed 3 times without progress, now at step 12: worker a:0 was killed by "
    assert crash(play, 3, 12) == [text + "signal 11"]


def test_a_script_that_is_out_of_memory_at_the_same_step_ends_the_run():
    """Nobody but the kernel sends SIGKILL there again and again."""
    play = start("a", "b", min_np=2, max_stuck_generations=3)
    assert [crash(play, n, 12, 9, out_of_memory=True) for n in (1, 2)] == [[], []]
    (text,) = crash(play, 3, 12, 9, out_of_memory=True)
    assert text.startswith(
        "workers crashed 3 times without progress, now at step 12: worker a:0 was killed by the "
        "kernel, out of memory. Its host"
    )
    assert "a smaller batch" in text


@pytest.mark.parametrize(
    ("steps", "signal"), [((12, 12, 13, 13, 14), 11), ((12,) * 5, 9), ((12,) * 5, 15)]
)
def test_crashes_with_progress_and_workers_that_are_killed_do_not(
    steps: tuple[int, ...], signal: int
):
    play = start("a", "b", min_np=2, max_stuck_generations=3)
    for number, step in enumerate(steps, 1):
        assert crash(play, number, step, signal) == []
        assert is_running(play)


@pytest.mark.parametrize("saves", [False, True])
def test_crashes_that_leave_nobody_end_the_run_unless_checkpoints_progress(saves: bool):
    play = start("a", max_stuck_generations=3)
    for number in range(1, 3):
        assert crash(play, number) == []
    if saves:
        play.tell(ev.StateSaved(10))
    text = "workers crashed 3 times without progress and none is left: worker a:0 was killed by "
    assert crash(play, 3) == ([] if saves else [text + "signal 11"])


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


def test_a_report_of_a_generation_that_was_not_announced_does_not_count():
    play = start("a", "b", "c")
    play.killed("b:0.1")
    play.broken("c:0.1", 5)
    assert play.tell(ev.WorkerBroken("a:0.1", 2, 5)) == []
    assert members(play.broken("a:0.1", 5)) == ["a:0.1", "c:0.1"]
