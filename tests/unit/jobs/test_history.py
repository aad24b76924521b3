"""What jobs took."""

from __future__ import annotations

import csv
import getpass
import io
import json
from pathlib import Path

import pytest

from hvd_elastic.cli.app import main
from hvd_elastic.cli.jobs.history import history_lines
from hvd_elastic.hosts.hostfile import parse_hosts
from hvd_elastic.jobs.history import PastJob, jobs_of, totals
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.records.cluster import summarize_cluster

HOUR = 3600.0
BEGAN = 1_795_000_000.0
EVENTS = [
    {"t": BEGAN, "kind": "cluster_hosts", "hosts": {"a": 4, "b": 2}},
    {"t": BEGAN, "kind": "job_submitted", "job": 1, "name": "one", "min_np": 1},
    {"t": BEGAN, "kind": "job_submitted", "job": 2, "name": "two", "min_np": 1},
    {"t": BEGAN + HOUR, "kind": "jobs_decided", "allocations": {"1": {"a": 2}}, "reasons": {}},
    {"t": BEGAN + HOUR, "kind": "job_started", "job": 1, "run_id": "one-1"},
    {"t": BEGAN + 2 * HOUR, "kind": "jobs_decided", "allocations": {"1": {"a": 2, "b": 2}}},
    {"t": BEGAN + 3 * HOUR, "kind": "job_finished", "job": 1, "status": "failed", "message": "x"},
    {"t": BEGAN + 3 * HOUR, "kind": "jobs_decided", "allocations": {"2": {"a": 4}}, "reasons": {}},
    {"t": BEGAN + 3 * HOUR, "kind": "job_started", "job": 2, "run_id": "two-2"},
]


def made(hostfile: str) -> list[PastJob]:
    hosts = {host.name: host for host in parse_hosts(hostfile, "hosts")}
    return [*jobs_of(summarize_cluster(EVENTS), hosts, {1: "ann"}, BEGAN + 4 * HOUR)]


def test_what_jobs_took() -> None:
    one, two = made("a slots=4 price=8\nb slots=2 price=3")
    assert (one.wait_s, one.run_s, one.slot_h, one.cost) == (HOUR, 2 * HOUR, 6.0, 11.0)
    assert (two.wait_s, two.run_s, two.slot_h, two.cost) == (3 * HOUR, HOUR, 4.0, 8.0)
    assert (one.status, one.message, one.user) == ("failed", "x", "ann")
    assert (two.status, two.ended, two.user) == ("running", None, getpass.getuser())


def test_cost_is_not_known_without_the_prices_of_all_hosts() -> None:
    one, two = made("a slots=4 price=8\nb slots=2")
    assert (one.cost, two.cost) == (None, 8.0)
    (total,) = totals([one, two], {1: "ann", 2: "ann"})
    assert (total.jobs, total.failed, total.slot_h, total.cost) == (2, 1, 10.0, None)
    words = history_lines([total], "user")[1].split()
    assert words[0] == "ann"
    assert words[-6:] == ["10.00", "-", "-", "2,", "1", "failed"]


def test_a_job_that_has_not_started_has_no_cost_yet() -> None:
    queued = [*jobs_of(summarize_cluster(EVENTS[:3]), {}, {}, BEGAN + HOUR)]
    _, *lines = history_lines(queued, "job")
    assert [line.split()[-2:] for line in lines] == [["-", "queued"]] * 2


def test_history_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    place = ClusterFolder.create("test")

    def call(*arguments: str) -> tuple[int, str]:
        try:
            main(["history", *arguments])
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        found = capsys.readouterr()
        return status, found.out + found.err

    assert call() == (0, "cluster test has no job in that time\n")
    place.events.write_text("".join(f"{json.dumps(event)}\n" for event in EVENTS))
    status, text = call()
    assert status == 0
    assert [line.split()[:2] for line in text.splitlines()] == [
        *(["JOB", "RUN"], ["1", "one-1"], ["2", "two-2"])
    ]
    _, text = call("--by", "month", "--csv")
    assert next(row["failed"] for row in csv.DictReader(io.StringIO(text))) == "1"
    _, text = call("--json")
    assert [row["job"] for row in json.loads(text)] == [1, 2]
    _, text = call("--json", "--user", "nobody-here")
    assert json.loads(text) == []
    for arguments, message in [
        (("--by", "host"), "--by 'host' is not known; valid: job, user, month"),
        (("--since", "lately"), "--since takes a time"),
        (("--csv", "--json"), "give one of them"),
    ]:
        status, text = call(*arguments)
        assert status == 2
        assert message in text
