"""The leader's part for hosts that read, on agents that the test plays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.control.events import AgentFailed, FoundWorker
from hvd_elastic.control.progress import Position
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader import input_hosts
from hvd_elastic.leader.agents.agents import Agents
from hvd_elastic.leader.input_hosts import InputHosts
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.policy.input import Reading
from hvd_elastic.records.events import as_record
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import Event, InputHostJoined
from hvd_elastic.wire import messages as msg
from tests.checked_events import check_event
from tests.unit.records.made_events import fields_of

CPU1 = Host("cpu1", slots=0, cpus=3, labels=("input",))


class FakeAgents:
    """Stands for :class:`hvd_elastic.leader.agents.agents.Agents`."""

    def __init__(
        self, spec: RunSpec, environment: Mapping[str, str], post: Any, _engine: Any
    ) -> None:
        self.post = post
        self.by_host: dict[str, Any] = {}
        self.sent: list[tuple[str, Any]] = []
        self.silent: dict[str, float] = {}
        self.take_over = False

    def start(self, name: str, hosts: Mapping[str, Host], led: Any, *, take_over: bool) -> None:
        self.take_over = take_over
        self.by_host[name] = SimpleNamespace(host=hosts[name], info=None, drop=lambda: None)

    def send(self, host: str, message: Any) -> None:
        self.sent.append((host, message))

    def beat(self, now: float, recorded_step: int | None) -> None:
        pass

    def silence(self, now: float) -> dict[str, float]:
        return self.silent

    drop_silent: Any = Agents.drop_silent

    def leave(self, host: str) -> None:
        del self.by_host[host]

    def release(self, is_needed: Callable[[Any], bool]) -> None:
        pass

    def end(self) -> list[str]:
        return []


class Play:
    """A leader's input hosts, and what came of them."""

    def __init__(self, folder: RunFolder) -> None:
        self.events: list[Any] = []
        self.told: list[msg.UseInput] = []
        self.hosts = InputHosts(
            RunSpec(("true",), "/"),
            folder,
            {},
            led=lambda: msg.LeaderIdentity("run", "leader", "me", 0.0),
            post=lambda call: call(),
            emit=self.emit,
            changed=self.told.append,
        )
        self.agents: Any = self.hosts._agents

    def emit(self, event: Event) -> None:
        check_event(as_record(event))
        self.events.append(event)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def hear(self, message: Any) -> None:
        self.agents.post(self.agents.by_host["cpu1"], message)

    def say_hello(self, held: str = "") -> str:
        """The agent of cpu1 starts, or has held a worker; return the name of its worker."""
        found = FoundWorker(held, "cpu1", 0)
        hello: Any = msg.AgentHello(
            protocol=msg.PROTOCOL, version="", python="", spool="", spooled=[], saved=[],
            executable="", pid=1, hostname="cpu1", interface="eth0",
            interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.9"}, cpus=16, machine="", swept=0,
            held=msg.HeldRun(0, (), (found,)) if held else None,
        )  # fmt: skip
        self.agents.by_host["cpu1"].info = hello
        self.hear(hello)
        return str(self.agents.sent[-1][1].worker)

    def serve(self) -> str:
        worker = self.say_hello()
        self.hear(msg.WorkerSaid(worker, msg.InputServing(ports=[5, 6, 7])))
        return worker

    def look_later(self) -> None:
        self.hosts.tend_hosts(time.monotonic() + 3600)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    monkeypatch.setattr(input_hosts, "Agents", FakeAgents)
    made = Play(RunFolder.create("reads-1"))
    made.hosts.update({"cpu1": CPU1}, {})
    made.look_later()
    return made


def test_ranks_are_told_where_a_host_reads(play: Play) -> None:
    assert play.hosts.use is None
    worker = play.serve()
    (_, start), (_, tell) = play.agents.sent
    assert (start.worker, start.reads) == (worker, True)
    task = tell.message
    assert (task.processes, task.address) == (3, "10.0.0.9")  # cpus= of its line
    use = play.hosts.use
    assert use == play.told[-1]
    assert use is not None
    assert use.servers == [msg.InputServer("cpu1", "10.0.0.9", [5, 6, 7])]
    assert use.certificate == task.certificate
    assert "PRIVATE KEY" in use.certificate
    assert play.events == [InputHostJoined("cpu1", 3)]


def test_a_lost_host_is_started_again(play: Play) -> None:
    play.serve()
    play.hear(AgentFailed("cpu1", "the agent ended"))
    assert play.kinds() == ["input_host_joined", "input_host_left"]
    assert play.told[-1].servers == []
    assert play.agents.by_host == {}
    play.look_later()
    second = play.serve()
    assert second.endswith(".2")
    assert len(play.told[-1].servers) == 1


def test_a_silent_host_is_lost(play: Play) -> None:
    play.serve()
    play.agents.silent = {"cpu1": 99.0}
    play.hosts.give_up_silent(0.0)
    assert play.events[-1].cause == "no sign of life for 1 m 39 s"
    assert play.told[-1].servers == []


def test_a_worker_that_reads_under_an_earlier_leader_is_taken_over(play: Play) -> None:
    """Once, also where its host has a price; after a failure the host starts clean."""
    play.hosts.update({}, {})
    play.hosts.update({"cpu2": priced("cpu2", 0.4), "cpu1": priced("cpu1", 0.5)}, {}, {"cpu1"})
    play.look_later()
    assert list(play.agents.by_host) == ["cpu1"]
    assert play.agents.take_over
    play.agents.sent.clear()
    assert play.say_hello(held="cpu1:input.7") == "cpu1:input.7"
    ((_, tell),) = play.agents.sent
    assert "PRIVATE KEY" in tell.message.certificate
    play.hear(msg.WorkerSaid("cpu1:input.7", msg.InputServing(ports=[8])))
    assert play.told[-1].servers == [msg.InputServer("cpu1", "10.0.0.9", [8])]
    play.hear(msg.WorkerEnded("cpu1:input.7", code=None, signal=9))
    play.look_later()
    assert not play.agents.take_over
    assert play.serve() == "cpu1:input.1"


def test_a_killed_worker_is_started_again(play: Play) -> None:
    worker = play.serve()
    play.hear(msg.WorkerEnded(worker, code=None, signal=9))
    assert play.kinds()[-1] == "input_host_left"
    play.look_later()
    assert "cpu1" in play.agents.by_host


def test_a_host_without_the_data_set_is_left_out_until_the_hostfile_is_saved(play: Play) -> None:
    for _ in range(3):
        worker = play.say_hello()
        error = "Traceback …\nFileNotFoundError: /data/train"
        play.hear(msg.WorkerSaid(worker, msg.ScriptRaised(error, Position(0, 0, 0, 0))))
        play.hear(msg.WorkerEnded(worker, code=1, signal=None))
        play.look_later()
    assert play.kinds() == ["warning"] * 3
    last = play.events[-1].message
    assert "cpu1 cannot be used: FileNotFoundError: /data/train" in last
    assert "save the hostfile" in last
    assert play.agents.by_host == {}
    play.hosts.update({"cpu1": CPU1}, {})
    play.look_later()
    assert "cpu1" in play.agents.by_host


def test_a_host_of_another_version_is_not_tried_again(play: Play) -> None:
    play.hear(AgentFailed("cpu1", "host cpu1 has hvd_elastic 0.0.1", fatal=True))
    play.look_later()
    assert play.agents.by_host == {}
    assert "hvd_elastic 0.0.1" in play.events[-1].message


def test_a_host_leaves_with_its_line_in_the_hostfile(play: Play) -> None:
    play.serve()
    play.hosts.update({}, {})
    assert play.kinds()[-1] == "input_host_left"
    assert play.told[-1].servers == []
    assert play.hosts.use is None
    assert play.agents.by_host == {}


RANKS = {"gpu1": Host("gpu1", price=3.0), "gpu2": Host("gpu2", price=3.0)}


def priced(name: str, price: float) -> Host:
    return Host(name, slots=0, cpus=4, price=price, labels=("input",))


def wait_for_data(play: Play, until_s: float) -> None:
    """gpu1 trains, waits half of the time, and reads in its training process."""
    for loop_s in (until_s - 6.0, until_s):
        reading = Reading(loop_s, loop_s / 2, loop_s, loop_s / 2, 0.0, int(100 * loop_s), 0)
        play.hosts.watch.store_reading("gpu1:0", reading)
    play.hosts.watch.machines["gpu1"] = ("gpu1", 1)
    play.hosts.watch_ranks([("gpu1:0", "gpu1")])


def test_a_host_with_a_price_reads_once_the_ranks_wait(play: Play) -> None:
    readers = {"cpu1": priced("cpu1", 0.5), "cpu2": priced("cpu2", 0.4)}
    play.hosts.update({}, RANKS)
    play.hosts.update(readers, RANKS)
    play.look_later()
    assert play.agents.by_host == {}
    wait_for_data(play, 6.0)
    assert play.kinds() == ["input", "decision"]
    decision = fields_of(play.events[-1])
    assert decision["action"] == "grow"
    # 3.4 of 3 per hour for twice the examples
    assert "host cpu2 has 4 for 0.4 per hour: an example costs 43 % less" in decision["reason"]
    play.look_later()
    assert list(play.agents.by_host) == ["cpu2"]
    play.hosts.update(readers, RANKS)  # the hostfile is saved
    wait_for_data(play, 20.0)
    play.look_later()
    assert list(play.agents.by_host) == ["cpu2"]


def test_a_host_that_costs_too_much_does_not_read(play: Play) -> None:
    play.hosts.update({}, RANKS)
    play.hosts.update({"cpu1": priced("cpu1", 9.0)}, RANKS)
    wait_for_data(play, 6.0)
    decision = fields_of(play.events[-1])
    assert decision["action"] == "stay"
    assert "host cpu1 has 4 for 9 per hour: an example costs 100 % more" in decision["reason"]
    play.look_later()
    assert play.agents.by_host == {}
