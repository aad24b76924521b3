"""Lost hosts are tried again; the command that tries them is played by a script."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hvd_elastic.jobs.health import HostHealth
from hvd_elastic.jobs.operator_state import Drained, OperatorState
from hvd_elastic.run_events import Fault, HostFaults
from tests.paths import LIMIT_S


def test_faults_that_a_user_makes_up_are_bounded(tmp_path: Path) -> None:
    health = HostHealth(tmp_path / "hosts", None)
    many = [Fault("GPU\n" * 99, "\x1b[2J" * 9_999, 1 << 80) for _ in range(1000)]
    assert health.faults_told(HostFaults(host="a", faults=many, t=1e18, mono=0.0))
    told = health.faults["a"]
    assert len(told.faults) == 20
    assert told.faults[0].what.isprintable()
    assert len(told.faults[0].text) <= 1000
    state = OperatorState(tmp_path / "operator.json")
    state.drain("a", Drained("why", "ann", 0.0))
    state.undrain("a", told.faults, time.time())
    assert state.new_faults("a", told.faults, told.t) == []
    well = HostFaults(host="a", faults=[], t=time.time(), mono=0.0)
    assert health.faults_told(well), "what was told of the future is over now"


def test_faults_for_which_a_host_was_drained_are_known_to_a_daemon_that_heard_of_none(
    tmp_path: Path,
) -> None:
    OperatorState(tmp_path / "state").drain("a", Drained("fell off", "health", 0.0, {"bus": 2}))
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
