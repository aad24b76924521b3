"""The machine when hosts are drained."""

from __future__ import annotations

from hvd_elastic.control import commands as cmd
from hvd_elastic.control import events as ev
from hvd_elastic.control.commands import (
    Hold,
    Leave,
    SaveState,
    StartAgent,
    StartWorker,
    StopAgent,
)
from hvd_elastic.run_events import HostSlots
from tests.unit.control.play import Play, announced, is_running, members, start


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


def test_worker_that_is_ended_while_it_starts_on_a_drained_host_has_left_and_not_failed():
    play = start("a")
    play.hosts("a", "b")
    for number in range(1, 6):
        play.tell(ev.AgentReady("b"))
        assert drain(play, "b") == [Leave(f"b:0.{number}")]
        assert play.killed(f"b:0.{number}") == [StopAgent("b")]
        assert play.kinds("worker_left")[-1]["cause"] == "left"
        assert play.tell(ev.HostReturned("b")) == [StartAgent("b")], "at once, and always"


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


def test_a_run_without_any_host_waits_and_uses_a_new_one_of_the_same_name():
    play = start("a")
    drain(play, "a")
    play.tell(ev.WorkerHeld("a:0.1", 1, 5))
    play.tell(ev.StateSaved(5))
    play.ended("a:0.1")
    assert play.hosts() == []
    assert play.hosts("a") == [StartAgent("a")]
    play.tell(ev.AgentReady("a"))
    play.ready("a:0.2")
    play.joined("a:0.2")
    assert is_running(play)


def test_last_host_that_is_drained_at_once_saves_its_state_when_it_holds():
    play = start("a")
    assert drain(play, "a") == [Hold("a:0.1")]
    assert play.tell(ev.WorkerHeld("a:0.1", 1, 7)) == [SaveState("a:0.1")]


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


def test_all_hosts_that_go_at_once_save_their_state_at_once_and_before_they_go():
    """As where an allocation ends: the second notice arrives while the first host is left."""
    play = start("a", "b")
    assert members(drain(play, "a", 20.0)) == ["b:0.1"]
    assert drain(play, "b", 20.0) == []
    assert play.joined("b:0.1") == [SaveState("b:0.1")], "it may go before that time"
    assert play.ended("a:0.1") == [StopAgent("a")]
    assert play.tell(ev.StateSaved(8)) == []
    assert play.tell(ev.Tick(), after=20.0) == [Hold("b:0.1")]
    assert play.tell(ev.WorkerHeld("b:0.1", 2, 90)) == [SaveState("b:0.1")]
    assert play.tell(ev.StateSaved(90)) == [Leave("b:0.1")]
    end = "(hosts a, b drained and not counted). Nothing is lost: the checkpoint of step 90 is "
    assert str(play.kinds("waiting")[-1]["reason"]).endswith(f"{end}complete")


def test_one_of_several_hosts_that_go_needs_no_checkpoint():
    play = start("a", "b", "c")
    answer = [*drain(play, "a", 20.0), *drain(play, "b", 20.0)]
    answer += [*play.joined("b:0.1", "c:0.1"), *play.joined("c:0.1")]
    assert play.names == ["c:0.1"]
    assert is_running(play)
    assert not [command for command in answer if isinstance(command, SaveState)]


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


def test_plain_command_stays_on_its_host_and_never_runs_twice():
    play = Play("a", plain=True)
    assert StartWorker("a:0.1", "a", 0) in play.tell(ev.AgentReady("a"))
    assert play.kinds("waiting")[-1]["reason"] == "starting the command on a"
    assert play.hosts("b") == [], "it cannot go on there"
    assert drain(play, "a", 60.0) == []
    assert play.tell(ev.Tick(), after=3600.0) == []
    assert len(play.kinds("waiting")) == 1, "it runs"
    assert StartAgent("b") in play.tell(ev.AgentLost("a", "a test"))
    assert StartWorker("b:0.1", "b", 0) in play.tell(ev.AgentReady("b"))
    (end,) = (each for each in play.ended("b:0.1") if isinstance(each, cmd.Finish))
    assert (end.status, end.message) == (
        "succeeded",
        "the command ended with exit status 0 on host b",
    )
