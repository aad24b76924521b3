"""Runs on a real Ray cluster of virtual hosts, which ``hvd-elastic ray`` starts and ends."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks.testbed.ray import VirtualRay
from hvd_elastic.programs.ray_node import MARK
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import read_records
from tests.dist.running import RunningJob, Stage, processes_with
from tests.paths import ROOT, WORKER_PYTHONPATH

pytest.importorskip("ray", reason="Ray is not installed; see make test-engines")
pytestmark = [pytest.mark.dist, pytest.mark.root]

DRIVER = str(ROOT / "tests" / "engines" / "ray_driver.py")
PROGRAM = str(ROOT / "tests" / "engines" / "ray_program.py")


@pytest.fixture(scope="module")
def ray_cluster(stage: Stage) -> Iterator[VirtualRay]:
    if stage.cluster.loopback:
        pytest.skip("needs root")
    cluster = VirtualRay(stage.cluster, stage.folder / "ray", slots=2)
    cluster.use(stage.hosts[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", WORKER_PYTHONPATH)
        try:
            assert [host["new"] for host in cluster.up()] == [True] * 3
            yield cluster
        finally:
            stage.boot_all()
            cluster.call("down")


def test_rows_are_read_exactly_once_by_a_program_on_the_head(
    stage: Stage, ray_cluster: VirtualRay
) -> None:
    """Also where an actor is killed from which its worker reads."""
    folder = stage.folder / "rows"
    folder.mkdir()
    setting = ["env", f"HVD_ELASTIC_HOME={folder}", f"PYTHONPATH={ROOT}"]
    words = ["--cwd", str(ROOT), "--", *setting, "python", PROGRAM, str(folder), "1", "3", "200"]

    def sizes() -> list[int]:
        events = [e for path in folder.glob("runs/*/events.jsonl") for e in read_records(path)]
        return [event["size"] for event in events if event["kind"] == "rescale_finished"]

    with ThreadPoolExecutor(1) as pool:
        program = pool.submit(ray_cluster.call, "exec", *words)
        while 3 not in sizes() and not program.done():
            time.sleep(0.1)
        (actor,) = ray_cluster.processes(stage.hosts[1], "ray::HostActor")
        actor.kill()
        program.result()
    assert 2 in sizes()[sizes().index(3) :], "the others went on without it"
    result = json.loads((folder / "result.json").read_text())
    assert result["value"]["rank"] == 0
    assert result["value"]["rows"] == 480
    assert Path(result["checkpoint"]).is_file()
    audit = check_audit(read_records(Path(result["folder"], "audit.jsonl")), finished=True)
    assert audit.ok, audit.problems()


@pytest.mark.unsure("Ray's own server for a driver from outside ends now and then while it starts")
def test_a_lost_actor_or_node_is_a_lost_host_and_a_new_node_joins(
    stage: Stage,
    ray_cluster: VirtualRay,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The driver is no node of the cluster; each example once."""
    if getattr(request.node, "execution_count", 1) > 1:  # the first try may have left other nodes
        stage.boot_all()
        ray_cluster.call("down")
        ray_cluster.use(stage.hosts[:3])
        ray_cluster.up()
    for name, value in ray_cluster.outside.items():
        monkeypatch.setenv(name, value)
    stage.services = frozenset({"gcs_server", "raylet", "python", "python3"})
    sizes = ("--min-np", "1", "--max-np", "4")
    with RunningJob(stage, None, *sizes, program=(DRIVER,)) as job:
        job.wait_size(3, deadline_s=600)
        job.wait_steps(10)
        since = job.mark()
        (actor,) = ray_cluster.processes(stage.hosts[1], "ray::HostActor")
        actor.kill()
        job.wait_event("host_lost", since)
        job.wait_event("rescale_finished", since)
        job.wait_size(3, since)  # Ray has placed another actor
        since = job.mark()
        stage.cluster.crash(stage.hosts[2])
        job.wait_event("host_lost", since)
        job.wait_size(2, since)
        since = job.mark()
        ray_cluster.use(stage.hosts)
        new = {host["host"]: host["new"] for host in ray_cluster.up("--hosts", stage.hosts[3])}
        assert new == {stage.hosts[3]: True}
        job.wait_size(3, since)
        job.wait_steps(10)
        (job.folder / "enough").touch()
        assert job.wait() == 0, job.story()
        job.check_audit(finished=True)
        job.check_equal_parameters()


def test_what_the_cluster_cannot_hold_is_told_at_once(
    stage: Stage, ray_cluster: VirtualRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "from hvd_elastic.ray import ElasticTrainer\n"
        "from hvd_elastic.errors import HvdElasticError\n"
        "import threading\n"
        "lock = threading.Lock()\n"
        "for train, scaling, each in ((print, (9, 9), {'CPU': 1}), (print, 1, {'GPU': 1}),\n"
        "                             (lambda: lock, 1, {'CPU': 1})):\n"
        "    try:\n"
        "        ElasticTrainer(train, scaling=scaling, resources_per_worker=each).fit()\n"
        "    except HvdElasticError as error:\n"
        "        print(type(error).__name__, error)\n"
        "import ray\n"
        "from ray.util.placement_group import placement_group\n"
        "from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy\n"
        "group = PlacementGroupSchedulingStrategy(\n"
        "    placement_group([{'CPU': 1}]), placement_group_capture_child_tasks=True)\n"
        "@ray.remote(num_cpus=1, scheduling_strategy=group)\n"
        "def in_a_group():\n"
        "    each = {'CPU': 2}\n"
        "    ElasticTrainer(print, scaling=1, resources_per_worker=each).fit()\n"
        "try:\n"
        "    ray.get(in_a_group.remote())\n"
        "except RuntimeError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    path = stage.folder / "asks_for_too_much.py"
    path.write_text(program)
    said = ray_cluster.call("exec", "--cwd", str(ROOT), "--", "python", str(path))
    assert "RunError scaling asks for 9 workers at least" in said
    assert (
        "RunError resources_per_worker asks for 1 GPU, and no node of the cluster has any" in said
    )
    assert "ArgumentError <lambda>() cannot be sent to the workers: variable 'lock'" in said


def test_up_twice_says_so_and_down_ends_this_cluster_alone(
    stage: Stage, ray_cluster: VirtualRay
) -> None:
    """Also where the head was killed; another Ray cluster on a host goes on."""
    stage.boot_all()
    ray_cluster.up()
    assert not any(host["new"] for host in ray_cluster.up())
    another = VirtualRay(stage.cluster, stage.folder / "other-ray")
    another.use(stage.hosts[1:2])
    another.up()
    port = another.recorded.address.rpartition(":")[2]
    third = VirtualRay(stage.cluster, stage.folder / "third-ray")
    third.use(stage.hosts[1:2])
    try:
        said = third.call("up", "--port", port, status=1)
        assert f"port {port}" in said
        assert "is there already" in said
        for name in ("gcs_server", "raylet"):
            for process in ray_cluster.processes(stage.hosts[0]):
                with contextlib.suppress(psutil.NoSuchProcess):  # others end with the first ones
                    if process.name() == name:
                        process.kill()
        ray_cluster.call("status", status=1)
        mark = ray_cluster.recorded.mark
        ray_cluster.call("down")
        assert not [*processes_with(MARK, mark)]
        assert "nothing to end" in ray_cluster.call("down")
        another.call("status")
    finally:
        another.call("down")
        third.call("down")
