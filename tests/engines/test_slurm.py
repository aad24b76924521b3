"""Runs on a real Slurm: slurmctld on this machine, a slurmd on each of four virtual hosts."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from benchmarks.testbed.slurm import SlurmCluster, missing_programs
from hvd_elastic.engines.slurm.engine import SrunConnection
from hvd_elastic.hosts.hostfile import Host
from tests.dist.running import RunningJob, Stage
from tests.engines.submitted_job import SubmittedJob
from tests.paths import LIMIT_S

pytestmark = [pytest.mark.dist, pytest.mark.root]


@pytest.fixture(scope="module")
def slurm(stage: Stage) -> Iterator[SlurmCluster]:
    missing = missing_programs()
    if missing or stage.cluster.loopback:
        pytest.skip(f"needs root and Slurm (missing: {missing}); see make test-engines")
    with (
        SlurmCluster(stage.cluster, stage.folder / "slurm") as slurm,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", str(slurm.config))
        stage.services = frozenset({"slurmd", "slurmstepd"})
        yield slurm


@pytest.fixture
def nodes(stage: Stage, slurm: SlurmCluster) -> list[str]:
    """All nodes, up and idle."""
    for host in stage.hosts:
        if stage.cluster.status(host) == "off":
            stage.cluster.boot(host)
            slurm.start_slurmd(host)
    slurm.wait_idle(stage.hosts)
    return stage.hosts


@pytest.fixture
def two_nodes(nodes: list[str], slurm: SlurmCluster) -> Iterator[None]:
    with slurm.allocation("--nodes=2", "--ntasks-per-node=1"):
        yield


def test_streams_of_srun_are_binary_and_not_held_back(stage, nodes, slurm, tmp_path) -> None:
    with slurm.allocation("--nodes=1", "--ntasks-per-node=1") as variables:
        seen = tmp_path / "run.json"
        seen.write_text("{}")
        job_id, node = variables["SLURM_JOB_ID"], variables["SLURM_JOB_NODELIST"]
        connection = SrunConnection(Host(node), job_id, seen)
        data = bytes(range(256)) * 4096 + b"\r\n\r\n\x04\x03\x00"
        assert connection.run("cat", timeout_s=LIMIT_S, stdin=data).stdout == data
        process = connection.start("cat; echo ended >&2; exit 3")
        for number in range(20):
            process.stdin.write(b'{"n":%d}\n' % number)
            assert process.stdout.readline(timeout=LIMIT_S) == b'{"n":%d}\n' % number
        process.stdin.close()
        assert process.wait(LIMIT_S) == 3
        assert process.wait_drained(LIMIT_S)
        assert process.last_line == "ended"  # not what srun says about it
        assert connection.files is connection  # the node has another /tmp
        connection.close()


def test_a_lost_node_costs_one_step_and_no_example(stage, nodes, slurm) -> None:
    with (
        slurm.allocation("--nodes=3", "--no-kill", "--ntasks-per-node=1"),
        RunningJob(stage, None, "--failure-timeout", "5") as job,
    ):
        job.wait_size(3)
        job.wait_steps(10)
        since = job.mark()
        lost = job.events[0]["hosts"][-1][0]
        stage.cluster.crash(lost)
        job.wait_event("host_lost", since, host=lost)
        job.wait_size(2, since)
        job.wait_steps(10)
        job.finish_leaving_files()


def test_the_next_leader_goes_on_in_the_same_processes(stage, two_nodes) -> None:
    with RunningJob(stage, None) as job:
        job.wait_size(2)
        job.wait_event("checkpoint", 0)
        before = job.workers()
        job.process.kill()
        job.process.wait()
        job.resume(alive=True)
        job.wait_event("taken_over", 0, size=2)
        job.wait_steps(10)
        assert job.workers() == before
        job.finish()


def test_a_submitted_run_grows_shrinks_and_outlives_its_time_limit(stage, nodes, slurm) -> None:
    spare = nodes[-1]
    options = ("--nodes", "1-3", "--time", "30", f"--sbatch=-x {spare}")
    with SubmittedJob(slurm, stage, *options) as job:
        # Of another run with this name, which has another HVD_ELASTIC_HOME.
        theirs = slurm.call(
            *("sbatch", "--parsable", f"--nodelist={spare}", f"--job-name=hvd-{job.run_id}+"),
            "--wrap=sleep 1000",
        ).stdout.strip()
        job.wait_size(3)
        job.wait_steps(10)

        # An administrator, or a preemption, takes a node away: another one is asked for.
        since = job.mark()
        first, second = (each for each in job.further_jobs() if each != theirs)
        slurm.call("scancel", first)
        job.wait_event("rescale_finished", since)
        job.wait_size(3, since)
        assert first not in job.further_jobs()
        assert second in job.further_jobs()

        # A leader in another allocation is refused before it has done anything.
        resume = [sys.executable, "-m", "hvd_elastic.cli.app", "run", "--resume", job.run_id]
        done = slurm.call(
            *("salloc", "--quiet", f"--nodelist={spare}", *resume),
            check=False,
            env=job.environment(),
        )
        assert "has a live leader" in done.stderr
        assert job.size() == 3
        assert not job.kinds("hosts_changed", since)[2:]

        # Slurm announces the time limit to the batch script.
        since = job.mark()
        slurm.call("scancel", "--batch", "--signal=USR1", job.first_job())
        finished = job.wait_event("run_finished", since)
        assert (finished["status"], finished["checkpoint_step"]) == ("stopped", finished["steps"])
        restored = job.wait_event("restored", since)
        assert restored["step"] == finished["steps"]
        job.wait_size(3, since)
        assert not job.kinds("warning", since), "nodes of the job before are not asked"
        job.finish_leaving_files()
        job.wait_for(
            lambda: job.further_jobs() == [theirs], "the end of all allocations", ended_too=True
        )
        slurm.call("scancel", theirs)


def test_an_unused_node_is_given_back(stage, nodes, slurm) -> None:
    options = ("--nodes", "1-2", "--policy", "goodput", "--give-back-after", "4")
    with SubmittedJob(slurm, stage, *options) as job:
        job.wait_event("run_started", 0)
        job.command("policy", job.run_id, "pause")  # before a second node can come
        job.wait_size(1)
        (further,) = job.wait_for(job.further_jobs, "a further node")
        since = job.mark()
        job.wait_for(lambda: job.hosts() == 2, "a host that joins")
        job.wait_for(lambda: job.hosts() == 1, "a host that is given back")
        job.wait_for(lambda: further not in job.further_jobs(), "the end of its allocation")
        assert not job.kinds("rescale_finished", since)
        job.finish_leaving_files()


def test_a_policy_takes_a_node_that_it_uses_and_scancel_costs_no_step(stage, nodes, slurm) -> None:
    """A step is a sleep of 10 ms for each example of a rank, so more slots bring more."""
    device = ("--step-time", "0.002", "--example-time", "0.01", "--batch-size", "24")
    options = ("--nodes", "1-2", "--policy", "goodput", "--checkpoint-every", "600")
    with SubmittedJob(slurm, stage, *options, script_options=device) as job:
        job.wait_size(2)
        assert [each["action"] for each in job.kinds("decision")].count("grow") >= 1
        assert len(job.further_jobs()) == 1
        # The signal reaches srun of the further node as well, which then kills the step at once.
        slurm.call("scancel", job.first_job())
        (finished,) = job.wait_for(lambda: job.kinds("run_finished"), "its end", ended_too=True)
        assert finished["checkpoint_step"] == finished["steps"] > 0
        way_on = f"resume with: hvd-elastic slurm submit --resume {job.run_id}"
        job.wait_for(lambda: way_on in job.output_of_jobs(), way_on, ended_too=True)


def test_an_allocation_of_one_node_trains(stage, nodes, slurm) -> None:
    with slurm.allocation("--nodes=1", "--ntasks-per-node=2"), RunningJob(stage, None) as job:
        job.wait_size(2)
        job.finish()


def test_a_limit_of_the_partition_that_leaves_no_time_is_said(stage, nodes, slurm) -> None:
    """Slurm announces it as soon as the job starts, and before the leader could take a signal."""
    slurm.call("scontrol", "update", "PartitionName=main", "MaxTime=1")
    try:
        with SubmittedJob(slurm, stage, "--nodes", "1") as job:
            job.process.wait()
            assert "and the run leaves its nodes 120 s before that" in job.output_of_jobs()
    finally:
        slurm.call("scontrol", "update", "PartitionName=main", "MaxTime=INFINITE")


def test_each_node_has_the_gpus_that_slurm_has_given_it(stage, nodes, slurm) -> None:
    """Three GPUs are asked for together, so that the steps of the nodes need a number each."""
    hosts = ",".join(nodes[:2])
    with (
        slurm.allocation("--nodes=2", f"--nodelist={hosts}", "--gpus=3", "--no-kill"),
        RunningJob(stage, None, script=["sleep", "1000"]) as job,
    ):
        for node in nodes[:2]:
            job.wait_event("agent_started", 0, host=node)
        assert job.events[0]["hosts"] == [[nodes[0], 2], [nodes[1], 1]]
        job.process.terminate()
        job.wait()


def test_gpus_that_no_node_has_are_refused(nodes, slurm) -> None:
    submit = [sys.executable, "-m", "hvd_elastic.cli.app", "slurm", "submit", "--nodes", "1"]
    done = slurm.call(*submit, "--sbatch=--gpus-per-node=9", "--", "true", check=False)
    assert done.returncode == 1
    assert "sbatch --parsable failed: " in done.stderr
    assert "node configuration is not available" in done.stderr


def test_a_command_that_srun_starts_several_times_says_so(nodes, slurm) -> None:
    command = [sys.executable, "-m", "hvd_elastic.cli.app", "run", "--", "true"]
    done = slurm.call("srun", "--nodes=2", "--ntasks=2", *command, check=False)
    assert "srun has started this command 2 times" in done.stderr
    assert done.returncode == 2


def test_a_leader_that_outlives_its_allocation_ends_with_a_checkpoint(stage, nodes, slurm) -> None:
    with (
        slurm.allocation("--nodes=2", "--ntasks-per-node=1"),
        RunningJob(stage, None, "--checkpoint-every", "600") as job,
    ):
        job.wait_size(2)
        job.wait_steps(10)
        slurm.call("scancel", "--me")
        finished = job.wait_event("run_finished", 0)
        assert finished["message"] == "the allocation of its hosts has ended"
        assert finished["checkpoint_step"] == finished["steps"]


def test_an_allocation_that_has_ended_is_said(stage, two_nodes, slurm) -> None:
    slurm.call("scancel", "--me")
    with RunningJob(stage, None) as job:
        assert job.process.wait(LIMIT_S) == 1
        assert "does not run (" in job.output.read_text()
