"""The command that is told of events."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_elastic.jobs import notify
from hvd_elastic.jobs.job import Cancel
from hvd_elastic.jobs.notify import Notifier
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.server import ask_daemon
from tests.paths import LIMIT_S
from tests.unit.jobs import test_daemon
from tests.unit.jobs.test_daemon import Running, hosts, submit

place = test_daemon.place
EVENT = {"kind": "job_finished", "job": 1}


def work_until(notifier: Notifier, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        notifier.work()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_events_come_in_their_order(tmp_path: Path) -> None:
    told = tmp_path / "it's told"
    warnings: list[str] = []
    notifier = Notifier(f"cat >> {shlex.quote(str(told))}", warnings.append)
    for number in range(5):
        notifier.tell({**EVENT, "job": number, "message": "a\n$(touch x)"})
        notifier.tell({"kind": "jobs_decided"})
    notifier.close()
    events = [json.loads(line) for line in told.read_text().splitlines()]
    assert [event["job"] for event in events] == [0, 1, 2, 3, 4]
    assert events[0]["message"] == "a\n$(touch x)"
    assert warnings == []


def test_command_that_hangs_floods_or_fails_hurts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_LIMIT_S", 0.2)
    warnings: list[str] = []
    last = tmp_path / "last"
    command = "case $(cat) in *hang*) sleep 1000 & wait;; *flood*) yes;; *fail*) exit 3;; esac"
    notifier = Notifier(f"{command}; touch {shlex.quote(str(last))}", warnings.append)
    for what in ("hang", "flood", "fail", "none"):
        notifier.tell({**EVENT, "message": what})
    work_until(notifier, last.exists)
    killed = "--notify: the command did not end within 0.2 s: killed"
    assert warnings[:2] == [killed] * 2
    assert "--notify: the command ended with exit status 3" in warnings
    monkeypatch.setattr(notify, "_LAST_S", 0.1)
    for number in range(notify._MOST_WAITING + 5):
        notifier.tell({**EVENT, "message": "hang", "job": number})
    assert warnings[-1] == "--notify: 1000 events wait to be told, so others are dropped"
    notifier.close()


def test_daemon_tells_of_its_jobs(place: ClusterFolder, tmp_path: Path) -> None:
    told = tmp_path / "told"
    daemon = Running(place, hosts(place), notify=f"cat >> {shlex.quote(str(told))}")
    number = submit(place)
    daemon.until(lambda: test_daemon.leads(daemon, number))
    ask_daemon(place, Cancel([number], "ann"))
    daemon.until(told.exists)
    daemon.down(leave_jobs=True)
    event = json.loads(told.read_text().splitlines()[0])
    assert event["run_id"] == daemon.job(number).run_id
    assert {key: event[key] for key in ("cluster", "kind", "job", "status", "message")} == {
        "cluster": "test",
        "kind": "job_finished",
        "job": number,
        "status": "cancelled",
        "message": "cancelled by ann",
    }
