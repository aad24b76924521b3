"""Lost hosts are tried again; the command that tries them is played by a script."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hvd_elastic.errors import RunError
from hvd_elastic.jobs.health import HardwareHealth, HostHealth
from hvd_elastic.jobs.notify import ClusterRecord
from hvd_elastic.jobs.operator_state import Drained, OperatorState
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.records.json_lines import iter_records
from hvd_elastic.run_events import Fault, HostFaults
from tests.paths import LIMIT_S


class Watched:
    """The hardware of hosts whose faults drain them, and what is recorded."""

    def __init__(self, folder: Path) -> None:
        self.state = OperatorState(folder / "operator.json")
        place = ClusterFolder(folder)
        self.health = HardwareHealth("failed", self.state, ClusterRecord(place, ""))
        self.events = lambda: [*iter_records(place.events)]

    def tell(self, host: str, *faults: Fault, t: float = 1.0) -> None:
        self.health.note_faults(HostFaults(host=host, faults=[*faults], t=t, mono=0.0))


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_faults_that_a_user_makes_up_are_bounded(watched: Watched) -> None:
    many = [Fault("GPU\n" * 99, "\x1b[2J" * 9_999, 1 << 80) for _ in range(1000)]
    watched.tell("a", *many, t=1e18)
    told = watched.health.faults["a"]
    assert len(told.faults) == 20
    assert told.faults[0].what.isprintable()
    assert len(told.faults[0].text) <= 1000
    state = watched.state
    state.drain("a", Drained("why", "ann", 0.0), 0.0)
    state.undrain("a", told.faults, time.time())
    assert state.new_faults("a", told.faults, told.t) == []
    watched.tell("a", t=time.time())
    assert [len(event["faults"]) for event in watched.events()] == [20, 0], "told of the future"


def test_drain_for_faults_keeps_what_an_operator_has_planned(watched: Watched) -> None:
    planned = Drained("firmware", "ann", 100.0)
    watched.state.drain("a", planned, 1.0)
    broken = [Fault(f"GPU {n}", f"GPU {n} is lost", is_broken=True) for n in range(8)]
    watched.tell("a", *broken)
    assert watched.health.drain(["a", "b"], [], 2.0)
    assert watched.state.closed == {"a"}
    words = watched.state.drained["a"].words(3.0)
    assert words.startswith("drained: GPU 0 is lost; GPU 1 is lost; GPU 2 is lost; and 5 other")
    assert "; will be drained: firmware (ann, from " in words
    assert watched.state.undrain("a", broken, 4.0) == planned
    assert not watched.health.drain(["a", "b"], [], 5.0), "their operator knows of them"
    watched.state.changed(100.0)
    assert watched.state.closed == {"a"}, "as it was planned"
    watched.state.undrain("a", broken, 101.0)
    watched.state.drain("a", planned, 1.0)
    watched.tell("a", Fault("another", "another", is_broken=True))
    watched.state.changed(2.0)
    assert watched.health.drain(["a", "b"], [], 102.0) is False, "it is drained since 100"


def test_host_that_is_drained_is_not_given_back_by_a_later_drain(watched: Watched) -> None:
    watched.state.drain("a", Drained("bad DIMM", "ann", 1.0, {"memory": 2}), 1.0)
    with pytest.raises(RunError, match=r"host a is drained: bad DIMM .* hvd-elastic undrain a"):
        watched.state.drain("a", Drained("later", "ann", 9.0), 2.0)
    watched.state.drain("a", Drained("another reason", "ann", 2.0), 2.0)
    assert watched.state.drained["a"].faults == {"memory": 2}


def test_faults_for_which_a_host_was_drained_are_known_to_a_daemon_that_heard_of_none(
    tmp_path: Path,
) -> None:
    drained = Drained("fell off", "health", 0.0, {"bus": 2})
    OperatorState(tmp_path / "state").drain("a", drained, 0.0)
    state = OperatorState(tmp_path / "state")
    state.undrain("a", (), time.time())
    found = [Fault("bus", "fell off", number, is_broken=True) for number in (2, 3)]
    assert state.new_faults("a", found[:1], time.time()) == []
    assert state.new_faults("a", found[1:], time.time()) == found[1:]


class Tried:
    """The health of a host that answers, and the times at which it could be used again."""

    def __init__(self, path: Path) -> None:
        self.health = HostHealth(path / "hosts", None)
        self.answers = path / "answers"
        self.tries = path / "tries"
        self.tries.touch()
        self.changed: list[str] = []

    def lose(self, now: float) -> None:
        self.health.host_lost("a", "there is no space", now, "python")

    def suspect(self, now: float) -> None:
        cause = "there is no Python at /wrong"
        self.health.host_lost("a", cause, now, "/wrong", is_suspicion=True)

    def comes_back(self, now: float) -> None:
        self.changed.clear()
        deadline = time.monotonic() + LIMIT_S
        while not self.changed:
            assert time.monotonic() < deadline
            self.health.retry_lost_hosts(now, self.changed.append)
            time.sleep(0.01)
        assert self.health.lost == {}

    def stays_lost(self, now: float) -> None:
        before = self.tries.stat().st_size
        for _ in range(10):
            self.health.retry_lost_hosts(now, self.changed.append)
            time.sleep(0.02)
        assert self.health.lost == {"a": "there is no space"}
        assert self.tries.stat().st_size == before


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tried:
    made = Tried(tmp_path)
    script = made.answers
    answer = '{"kind": "host", "host": "a", "state": "ok"}'
    script.write_text(f"#!/bin/sh\necho try >> {made.tries}\necho '{answer}'\n")
    script.chmod(0o700)
    monkeypatch.setattr("hvd_elastic.jobs.health.sys.executable", str(script))
    return made


def test_host_that_answers_but_starts_no_job_is_tried_less_and_less_often(tried: Tried) -> None:
    tried.lose(0.0)
    tried.comes_back(0.0)
    tried.lose(1.0)
    tried.stays_lost(5.0)
    tried.comes_back(11.0)
    tried.lose(12.0)
    tried.stays_lost(40.0)
    tried.comes_back(42.0)


def test_host_is_tried_while_no_disk_has_space(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no such folder")
    tried.lose(0.0)
    tried.comes_back(0.0)


def test_host_on_which_a_job_has_trained_is_tried_at_once(tried: Tried) -> None:
    for now in (0.0, 100.0):
        tried.lose(now)
        tried.comes_back(now + 50.0)
    tried.health.host_works("a", "python")
    tried.lose(200.0)
    tried.comes_back(200.0)


def test_host_stays_in_use_while_a_job_may_be_at_fault(tried: Tried) -> None:
    for now in (0.0, 1.0, 2.0):
        tried.suspect(now)
        assert not tried.health.is_judged("a")
        assert tried.health.lost == {}
        tried.comes_back(now)
        assert tried.health.is_judged("a")


def test_suspected_host_on_which_python_cannot_start_is_lost(tried: Tried) -> None:
    tried.answers.write_text("#!/bin/sh\nexit 1\n")
    tried.suspect(0.0)
    deadline = time.monotonic() + LIMIT_S
    while not tried.health.is_judged("a"):
        assert time.monotonic() < deadline
        tried.health.retry_lost_hosts(0.0, tried.changed.append)
        time.sleep(0.01)
    assert tried.health.lost == {"a": "there is no Python at /wrong"}
    assert tried.changed == ["a"]


def test_host_that_is_taken_out_of_the_hostfile_is_tried_no_more(tried: Tried) -> None:
    tried.lose(0.0)
    tried.health.forget_others({"b": 1})
    assert tried.health.lost == {}
    tried.health.retry_lost_hosts(1.0, tried.changed.append)
    tried.health.close()
    assert tried.tries.stat().st_size == 0
