"""What is said of the hosts of a cluster: nothing is free where a process lives."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from hvd_elastic import run_events as ev
from hvd_elastic.jobs.hosts import BarredHosts, ClusterHosts, Use
from hvd_elastic.jobs.job import Job, JobKind, JobRequest, JobStatus
from hvd_elastic.jobs.progress import RunHosts


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb slots=2\n")
    return path


def running(number: int, held: dict[str, int], kind: JobKind = JobKind.ELASTIC) -> Job:
    request = JobRequest("job", {"command": ["true"]}, kind)
    return Job(number, request, f"job-{number}", JobStatus.RUNNING, held=held)


def test_a_slot_is_free_when_nobody_holds_it_and_no_process_lives_in_it(hostfile: Path) -> None:
    hosts = ClusterHosts(hostfile, print)
    leaving = Use(running(1, {"a": 1}), {"a": 1, "b": 1})
    rows = {row["host"]: row for row in hosts.rows([leaving], {})}
    assert [rows[host]["free"] for host in "ab"] == [1, 1]
    assert (rows["b"]["jobs"], rows["b"]["occupied"]) == ({}, {"job-1": 1})
    rows = {row["host"]: row for row in hosts.rows([leaving], {"a": "no answer"})}
    assert (rows["a"]["state"], rows["a"]["free"], rows["a"]["cause"]) == ("lost", 0, "no answer")
    rows = {row["host"]: row for row in hosts.rows([leaving], {}, {"a": "being tried"})}
    assert (rows["a"]["state"], rows["a"]["free"]) == ("silent", 0)
    assert rows["a"]["jobs"] == {"job-1": 1}


def test_a_host_that_leaves_the_hostfile_is_shown_until_it_is_empty(hostfile: Path) -> None:
    hosts = ClusterHosts(hostfile, print)
    command = running(1, {"b": 1}, JobKind.PLAIN)
    trains = running(2, {"b": 1})
    uses = [Use(command, {"b": 1}), Use(trains, {"b": 2})]
    assert hosts.slots(uses) == {"a": 2, "b": 2}
    hostfile.write_text("a slots=2\n")
    assert hosts.changed()
    assert hosts.slots(uses) == {"a": 2, "b": 1}, "the command keeps its slot"
    assert hosts.slots([Use(command, {}, {"b"})]) == {"a": 2}, "unless its run has lost the host"
    assert hosts.known["b"].slots == 2, "it can still be named in the hostfile of the command"
    rows = {row["host"]: row for row in hosts.rows(uses, {})}
    assert (rows["b"]["state"], rows["b"]["slots"], rows["b"]["free"]) == ("leaving", 0, 0)
    told = "taken out of the hostfile; empty as soon as job-1 has ended and job-2 has left it"
    assert rows["b"]["cause"] == told
    assert [row["host"] for row in hosts.rows([], {})] == ["a"]


def of_user(number: int, user: int | None, python: str = "/usr/bin/python3") -> Job:
    request = JobRequest("job", {"command": ["true"], "python": python}, user=user)
    return Job(number, request, f"job-{number}", JobStatus.RUNNING)


def hosts_after(*events: ev.Event) -> RunHosts:
    hosts = RunHosts()
    for event in events:
        hosts.note_event(structs.replace(event, t=1.0))
    return hosts


REFUSED = ev.Warned("Permission denied", unusable_host="a")
WRONG = ev.Warned("no Python at /no/such", unusable_host="a", fatal=True)
STARTS = ev.WorkerStarted(host="a", local_rank=0)


def test_what_a_job_finds_of_a_host_holds_for_jobs_of_its_user_with_the_same_interpreter() -> None:
    finds, other, foreign = of_user(1, 5), of_user(2, 5), of_user(3, 6)
    wrong, as_wrong = of_user(4, 5, "/no/such"), of_user(5, 5, "/no/such")

    def barred(*found: tuple[Job, RunHosts]) -> tuple[BarredHosts, set[int]]:
        hosts = BarredHosts(found, ["a", "b"], now=2.0)
        jobs = [finds, other, foreign, wrong, as_wrong]
        return hosts, {job.number for job in jobs if hosts.of(job) == {"a"}}

    hosts, whose = barred((finds, hosts_after(REFUSED)))
    assert (whose, hosts.causes) == ({1, 2}, {(5, "a"): "Permission denied"})
    hosts, whose = barred((wrong, hosts_after(WRONG)))
    assert whose == {4, 5}, "the job's own option is wrong, which is no other job's fault"
    # It is enough that a process begins there: others find that before it trains.
    hosts, whose = barred((wrong, hosts_after(WRONG)), (other, hosts_after(STARTS)))
    assert (whose, hosts.causes) == ({4, 5}, {})
    hosts, whose = barred((finds, hosts_after(REFUSED)), (other, hosts_after(STARTS)))
    assert (whose, hosts.causes) == ({1}, {})
    hosts, whose = barred((finds, hosts_after(REFUSED)), (foreign, hosts_after(STARTS)))
    assert (whose, [*hosts.causes]) == ({1, 2}, [(5, "a")])
    later = BarredHosts([(finds, hosts_after(REFUSED))], ["a"], now=60.0)
    assert (later.of(finds), later.causes) == (frozenset(), {}), "it is tried again"
