"""Which hosts a job may have, and what is refused since no host can give it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvd_elastic.errors import HvdElasticError, RunError
from hvd_elastic.hosts.hostfile import Host, parse_hosts
from hvd_elastic.jobs.gpus import HostGpus
from hvd_elastic.jobs.host_wish import Gpus, HostWish
from hvd_elastic.jobs.job import JobKind, JobRequest, JobStatus, Submit
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.server import ask_daemon
from tests.paths import LIMIT_S
from tests.unit.jobs import test_daemon
from tests.unit.jobs.test_daemon import SPEC, Running, hosts

place = test_daemon.place
TEXT = """
gpu[1-2] slots=2 labels=a100,fast
GPU3 slots=2 labels=fast devices=1,2
cpu1 slots=4
"""
GPUS = {
    "gpu1": Gpus((42.5, 42.5), ("NVIDIA A100-SXM4-40GB",) * 2),
    "GPU3": Gpus((8.0, 25.8, 25.8), ("NVIDIA GeForce RTX 4090",) * 3),
    "cpu1": Gpus(),
}
"""Of gpu2 nothing is known."""


def listed(text: str = TEXT) -> dict[str, Host]:
    return {host.name: host for host in parse_hosts(text, "hosts")}


@pytest.mark.parametrize(
    ("wish", "names"),
    [
        (HostWish("gpu[1-2],cpu1"), "gpu1 gpu2 cpu1"),
        (HostWish("gpu3,gone"), "GPU3"),
        (HostWish("@a100,cpu1"), "gpu1 gpu2 cpu1"),
        (HostWish(exclude="@a100,gone"), "GPU3 cpu1"),
        (HostWish("@fast", exclude="gpu1"), "gpu2 GPU3"),
        (HostWish(labels=("fast", "a100")), "gpu1 gpu2"),
        (HostWish(gpu_memory_gb=24.0), "gpu1 GPU3"),
        (HostWish("@fast", labels=("a100",), gpu_memory_gb=40.0), "gpu1"),
        (HostWish(labels=("gone",)), ""),
        (HostWish(labels=("RTX", "fast")), "GPU3"),
    ],
)
def test_a_job_may_have_the_hosts_that_are_all_that_it_asks(wish: HostWish, names: str) -> None:
    assert wish.allowed(listed(), GPUS) == frozenset(names.split())


@pytest.mark.parametrize(
    ("wish", "least", "told"),
    [
        (HostWish("gpu9"), 1, "--hosts: host 'gpu9' is not in cluster c (gpu1, gpu2, GPU3, cpu1)"),
        (
            HostWish(labels=("h100",)),
            1,
            "the label 'h100'; its labels are a100, fast, its GPUs are NVIDIA A100-SXM4-40GB, NV",
        ),
        (HostWish(exclude="gpu9"), 1, "--exclude: host 'gpu9' is not in"),
        (
            HostWish("GPU3,cpu1", gpu_memory_gb=40.0),
            1,
            (
                "no host of cluster c is as job j asks (--hosts GPU3,cpu1 --gpu-memory 40): GPU3 "
                "has GPUs of 25.8 GB; cpu1 has no GPU"
            ),
        ),
        (HostWish("gpu1", exclude="gpu1"), 1, "(--hosts gpu1 --exclude gpu1): all are excluded"),
        (
            HostWish("gpu1,cpu1", labels=("a100",)),
            3,
            (
                "job j needs 3 slots, and host gpu1 of cluster c, which it asks for (--hosts "
                "gpu1,cpu1 --labels a100), has 2. Lower --min-np"
            ),
        ),
        (HostWish(), 11, "job j needs 11 slots, and cluster c has 10 on 4 hosts. Lower --min-np"),
    ],
)
def test_what_no_host_can_give_is_refused(wish: HostWish, least: int, told: str) -> None:
    with pytest.raises(HvdElasticError) as error:
        wish.refuse_impossible(listed(), GPUS, least, ("job j", "cluster c"))
    assert told in str(error.value)


def test_a_host_that_has_not_told_its_memory_may_have_enough() -> None:
    HostWish("gpu2", gpu_memory_gb=80.0).refuse_impossible(listed(), GPUS, 2, ("j", "c"))


def test_jobs_run_on_the_hosts_that_they_ask_for_and_wait_for_new_ones(
    place: ClusterFolder,
) -> None:
    hosts(place).write_text("a slots=1\nb slots=1 labels=big\n")
    daemon = Running(place, hosts(place))

    def submit(wish: HostWish) -> int:
        request = JobRequest("train", SPEC, kind=JobKind.FIXED, max_np=1, wish=wish)
        return ask_daemon(place, Submit([request], {})).jobs[0]

    def held(number: int) -> Mapping[str, int]:
        return daemon.job(number).held

    runs, waits = submit(HostWish(labels=("big",))), submit(HostWish("@big"))
    daemon.until(lambda: held(runs) and daemon.job(waits).reason)
    assert held(runs) == {"b": 1}
    said = "waits: the one slot of the hosts that it asks for is held by 1 job that came earlier"
    daemon.until(lambda: daemon.job(waits).reason == said)
    last = submit(HostWish(exclude="b"))
    daemon.until(lambda: held(last) == {"a": 1})
    hosts(place).write_text("a slots=1\nb slots=1 labels=big\nc slots=1\nd slots=1 labels=big\n")
    daemon.until(lambda: held(waits) == {"d": 1})
    hosts(place).write_text("a slots=1\nb slots=1\nc slots=1\nd slots=1 labels=big\n")
    daemon.until(lambda: daemon.job(runs).status is JobStatus.QUEUED)
    daemon.down(leave_jobs=True)


def test_hosts_are_asked_for_the_memory_of_their_gpus(
    place: ClusterFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nprintf '40536, NVIDIA A100-SXM4-40GB\\n%.0s' 1 2\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("hvd_elastic.jobs.asked_hosts._LIMIT_S", LIMIT_S)
    hosts(place).write_text("localhost slots=1\n")
    daemon = Running(place, hosts(place))

    def submit(wish: HostWish) -> int:
        request = JobRequest("train", SPEC, kind=JobKind.FIXED, max_np=1, wish=wish)
        return ask_daemon(place, Submit([request], {})).jobs[0]

    with pytest.raises(RunError, match=r"\(--gpu-memory 80\): localhost has GPUs of 42.5 GB"):
        submit(HostWish(gpu_memory_gb=80.0))
    with pytest.raises(RunError, match="'h100'; it has no labels=, its GPUs are NVIDIA A100-SXM4"):
        submit(HostWish(labels=("h100",)))
    number = submit(HostWish(labels=("a100",), gpu_memory_gb=40.0))
    daemon.until(lambda: daemon.job(number).held)
    daemon.down(leave_jobs=True)

    tool.write_text("#!/bin/sh\nexit 9\n")
    gpus = HostGpus(hosts(place), None)
    assert gpus.ask(["localhost"])
    deadline = time.monotonic() + LIMIT_S
    while not gpus.changed():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert gpus.known == {}
    assert not gpus.ask(["localhost"]), "it is asked again after a while"
