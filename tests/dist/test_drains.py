"""Hosts of a cluster that are drained at a bad moment: jobs leave them, and nothing is lost."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.jobs.job import DrainHost, UndrainHost
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.server import ask_daemon
from tests.dist import jobs
from tests.dist.jobs import TINY, assert_nothing_left, audit_of, hostfile_of, write_script
from tests.dist.running import Stage
from tests.dist.test_jobs import Cluster, in_terminal, till, until
from tests.paths import COSTLY
from tests.unit.programs import test_hardware

pytestmark = pytest.mark.dist
shared = jobs.shared
nvml = test_hardware.nvml

LARGE = TINY.replace(
    "optimizer = torch.optim",
    'model.register_buffer("ballast", torch.randn(16_000_000))\noptimizer = torch.optim',
    1,
)
"""The same model, whose checkpoints take a while."""


class Drained(Cluster):
    """A cluster of virtual hosts with one slot each."""

    def __init__(self, stage: Stage, folder: Path, hosts: int) -> None:
        self.hosts = stage.hosts[:hosts]
        hostfile = hostfile_of(folder / "hosts", self.hosts, slots=1)
        super().__init__(folder, hostfile, "drains", ("-F", stage.cluster.ssh_config))

    def drain(self, host: str) -> None:
        """As the command does, but at once."""
        ask_daemon(ClusterFolder(self.folder), DrainHost(host, "a test", "ann", time.time()))

    def undrain(self, host: str) -> None:
        ask_daemon(ClusterFolder(self.folder), UndrainHost(host, "ann"))

    def state(self, host: str) -> str:
        return self.states()[self.hosts.index(host)]

    def drained_in(self, spans: Callable[[], Iterator[tuple[float, float]]]) -> bool:
        """Whether a host was drained within one of these times."""
        times = [event["t"] for event in self.events("host_drained")]
        return any(begin <= t <= end for begin, end in spans() for t in times)


def rescales(cluster: Cluster, run_id: str) -> Iterator[tuple[float, float]]:
    """Begin and end of each change of size."""
    finished = cluster.events("rescale_finished", run_id)  # first: of each the begin is there then
    begun = {e["generation"]: e["t"] for e in cluster.events("rescale_started", run_id)}
    for event in finished:
        yield begun[event["generation"]], event["t"]


def checkpoints(cluster: Cluster, run_id: str) -> Iterator[tuple[float, float]]:
    """Begin and end of the writing of each checkpoint."""
    for event in cluster.events("checkpoint", run_id):
        yield event["t"] - event["seconds"], event["t"]


def disturb(cluster: Drained, number: int, host: str, kind: str, spans: Callable[..., Any]) -> None:
    """Drain a host just after an event of the run, again and again until it was within a span."""
    run_id = cluster.job(number)["run_id"]
    for _ in range(20):
        before = len(cluster.events(kind, run_id))
        cluster.undrain(host)
        deadline = time.monotonic() + jobs.START_S
        while len(cluster.events(kind, run_id)) == before:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        cluster.drain(host)
        until(lambda: cluster.state(host) == "drained", "it is left")
        if cluster.drained_in(lambda: spans(cluster, run_id)):
            return
    pytest.fail(f"no drain was within a {kind}")


def test_jobs_leave_drained_hosts_during_a_rescale_and_all_hosts(
    stage: Stage, shared: Path, tmp_path: Path
) -> None:
    """Plain commands end first; drains hold when the daemon is killed."""
    stage.boot_all()
    script = write_script(shared)
    enough, go = (shared / f"{tmp_path.name}.{name}" for name in ("enough", "go"))
    cluster = Drained(stage, tmp_path, 3)
    with cluster:
        plain = cluster.submit("--plain", "--", "sh", "-c", till(go))
        until(lambda: cluster.job(plain)["status"] == "running", "the command runs")
        (holds,) = cluster.job(plain)["hosts"]
        keeps, goes = (host for host in cluster.hosts if host != holds)
        cluster.drain(goes)
        call = (sys.executable, script, "--until", enough, "--example-time", 0.005)
        trains = cluster.submit("--audit", "--", *call)
        run_id = cluster.job(trains)["run_id"]
        until(lambda: [*rescales(cluster, run_id)], "it trains")
        assert cluster.job(trains)["hosts"] == {keeps: 1}
        status, shown = in_terminal(
            tmp_path, ["shell", f"{trains}.0"], b"echo $((6 * 7)) on $(hostname); exit 5\n"
        )
        assert status == 5, shown
        assert f"42 on {keeps}" in shown

        disturb(cluster, trains, goes, "rescale_started", rescales)

        cluster.drain(holds)
        cluster.kill_daemon()
        cluster.up()
        assert [cluster.state(goes), cluster.state(holds)] == ["drained", "leaving"]
        cluster.drain(keeps)
        until(lambda: cluster.state(keeps) == "drained", "the last one is left")
        until(lambda: cluster.job(trains)["status"] == "queued", "it waits, with a checkpoint")
        assert cluster.job(plain)["status"] == "running"
        go.touch()
        until(lambda: cluster.state(holds) == "drained", "the command has ended")
        assert cluster.job(plain)["status"] == "succeeded"
        assert cluster.job(plain)["attempts"] == 1
        for host in cluster.hosts:
            cluster.undrain(host)
        enough.touch()
        cluster.call("wait", trains)
        assert audit_of(tmp_path / "runs" / run_id).ok
        assert_nothing_left(run_id=run_id)


@COSTLY
def test_a_drain_of_the_leaders_own_host_loses_nothing(tmp_path: Path) -> None:
    script, enough = write_script(tmp_path), tmp_path / "enough"
    with Cluster(tmp_path, hostfile_of(tmp_path / "hosts", ["localhost"], slots=2)) as cluster:
        call = ("python", script, "--step-time", "0.02", "--until", enough)
        number = cluster.submit("--audit", "--", *call)
        run_id = cluster.job(number)["run_id"]
        until(lambda: cluster.events("metrics", run_id), "it trains")
        keys = b"echo $((6 * 7)) $PWD; exit 5\n"
        status, shown = in_terminal(tmp_path, ["shell", f"{number}.0"], keys)
        assert status == 5, shown
        assert f"42 {tmp_path}" in shown
        cluster.call("drain", "localhost", "--reason", "a test")
        assert cluster.states() == ["drained"]
        assert cluster.job(number)["status"] == "queued"
        cluster.call("undrain", "localhost")
        enough.touch()
        cluster.call("wait", number)
        assert audit_of(tmp_path / "runs" / run_id).ok


@COSTLY
def test_a_host_whose_gpu_breaks_is_drained_while_a_run_trains(
    tmp_path: Path, nvml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both names are those of this machine, and its NVML is played by a library."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.parent))
    hostfile = hostfile_of(tmp_path / "hosts", ["localhost", "127.0.0.1"], slots=1)
    script, enough = write_script(tmp_path), tmp_path / "enough"
    with Cluster(tmp_path, hostfile, options=("--drain-unhealthy", "failed")) as cluster:
        call = (sys.executable, script, "--until", enough, "--example-time", 0.005)
        trains = cluster.submit("--audit", "--", *call)
        run_id = cluster.job(trains)["run_id"]
        until(lambda: "drained" in cluster.states(), "one is drained, and the last is not")
        assert sorted(cluster.states()) == ["drained", "up"]
        shown = cluster.call("hosts").stdout
        assert "drained: GPU 1: 2 uncorrected memory errors. Reset it" in shown
        assert "(health, since " in shown
        seen = "unhealthy: GPU 1: 2 uncorrected memory errors."
        until(lambda: seen in cluster.call("hosts").stdout, "the other has the same GPUs")
        (event,) = cluster.events("host_drained")
        assert event["by"] == "health"
        assert "GPU 2 fell off the bus" in cluster.call("status", run_id).stdout
        kinds = [fault["what"] for fault in cluster.events("host_faults", run_id)[-1]["faults"]]
        assert {"GPU 1 uncorrected", "GPU 1 action", "GPU 2 lost"} <= {*kinds}
        cluster.call("undrain", event["host"])
        until(lambda: "drained" in cluster.states(), "the other one is not the last any more")
        (other,) = {"localhost", "127.0.0.1"} - {event["host"]}
        cluster.call("undrain", other)
        until(lambda: cluster.slots(trains) == 2, "both are used again")
        enough.touch()
        cluster.call("wait", trains)
        assert cluster.states() == ["up", "up"], "their operator knew of it"
        assert audit_of(tmp_path / "runs" / run_id).ok


@COSTLY
def test_jobs_leave_drained_hosts_during_a_checkpoint(
    stage: Stage, shared: Path, tmp_path: Path
) -> None:
    stage.boot_all()
    script = write_script(shared, LARGE)
    enough = shared / f"{tmp_path.name}.enough"
    cluster = Drained(stage, tmp_path, 2)
    with cluster:
        call = (sys.executable, script, "--until", enough, "--example-time", 0.005)
        trains = cluster.submit("--audit", "--checkpoint-every", 0.1, "--", *call)
        run_id = cluster.job(trains)["run_id"]
        until(lambda: cluster.slots(trains) == 2, "it takes what is free")
        until(lambda: cluster.events("checkpoint", run_id), "it trains")

        def left(host: str) -> bool:
            return cluster.state(host) == "drained"

        for host in cluster.hosts:  # rank 0 writes it
            cluster.drain(host)
            until(functools.partial(left, host), "it is left")
            disturb(cluster, trains, host, "checkpoint", checkpoints)
            cluster.undrain(host)
            until(lambda: cluster.slots(trains) == 2, "it is used again")
        enough.touch()
        cluster.call("wait", trains)
        assert audit_of(tmp_path / "runs" / run_id).ok
