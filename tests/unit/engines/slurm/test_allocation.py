"""The hosts of an allocation, with Slurm's commands in place of which small scripts answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_elastic.engines.slurm.allocation import call, has_ended, own_allocation, slots_of_nodes
from hvd_elastic.engines.slurm.engine import srun_command
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.hosts.hostfile import Host
from tests.unit.engines.slurm.conftest import VARIABLES, Write


def test_the_nodes_are_hosts_in_slurms_order(write: Write) -> None:
    found = own_allocation(VARIABLES)
    assert found.job_id == "17"
    assert found.hosts == (Host("gpu1", slots=8), Host("gpu2", slots=8))
    assert found.left_s == 60.0
    assert [host.slots for host in own_allocation(VARIABLES, slots_per_node=3).hosts] == [3, 3]


def test_outside_of_an_allocation_it_says_how_to_get_one() -> None:
    with pytest.raises(UsageError, match="salloc -N2"):
        own_allocation({})


def test_a_command_that_srun_has_started_several_times_is_refused() -> None:
    with pytest.raises(UsageError, match="started this command 4 times"):
        own_allocation({**VARIABLES, "SLURM_STEP_NUM_TASKS": "4"})


def test_missing_commands_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="srun and scontrol and squeue cannot be found"):
        own_allocation(VARIABLES)


@pytest.mark.parametrize(
    ("squeue", "said"),
    [
        ("echo COMPLETING 0:10", "does not run \\(COMPLETING 0:10\\)"),
        ("exit 0", "does not run \\(it has ended\\)"),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", "Invalid job id"),
    ],
)
def test_a_job_that_has_ended_is_refused(write: Write, squeue: str, said: str) -> None:
    write("squeue", squeue)
    with pytest.raises(RunError, match=said):
        own_allocation(VARIABLES)


def test_a_job_that_is_being_signalled_runs(write: Write) -> None:
    """As one is of which Slurm announces the end."""
    write("squeue", "echo SIGNALING 0:58")
    assert own_allocation(VARIABLES).left_s == 58.0


@pytest.mark.parametrize(
    ("squeue", "ended"),
    [
        ("echo RUNNING", False),
        ("echo SIGNALING", False),
        ("echo COMPLETING", True),
        ("echo TIMEOUT", True),
        ("exit 0", True),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", True),
        ("echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1", False),
    ],
)
def test_a_slurmctld_that_does_not_answer_ends_no_allocation(
    write: Write, squeue: str, ended: bool
) -> None:
    write("squeue", squeue)
    assert has_ended("17") is ended


@pytest.mark.parametrize("cpus", ["", "8", "8(x3)", "eight(x2)"])
def test_numbers_that_do_not_fit_the_nodes_are_refused(cpus: str) -> None:
    with pytest.raises(RunError, match="not a number for each of the 2 nodes"):
        slots_of_nodes({"SLURM_JOB_CPUS_PER_NODE": cpus}, [0, 0])


def test_gpus_come_before_tasks_and_tasks_before_cpus() -> None:
    cpus = {"SLURM_JOB_CPUS_PER_NODE": "8", "SLURM_TASKS_PER_NODE": "1"}
    tasks = {**cpus, "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2"}
    assert slots_of_nodes(cpus, [0]) == [8]
    assert slots_of_nodes({**cpus, "SLURM_CPUS_PER_TASK": "16"}, [0]) == [1]
    assert slots_of_nodes(tasks, [0]) == [2]
    assert slots_of_nodes({**tasks, "SLURM_GPUS_ON_NODE": "1"}, [4]) == [4]


@pytest.mark.parametrize(
    ("asked", "gpus"), [("gres:gpu:4", "3"), ("gres:gpu:v100:2,gres:gpu:a100:2", "a100:2,v100:1")]
)
def test_a_slot_for_each_gpu_that_the_job_has_on_a_node(
    write: Write, asked: str, gpus: str
) -> None:
    write(
        "scontrol",
        f"""case "$*" in
"show job --details 17") echo '   JOB_GRES=gpu:a100:2,gpu:v100:2,nvme:1
     Nodes=gpu1 CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0,3),gpu:v100:1(IDX:1),nvme:1(CNT:1)
     Nodes=gpu2 CPU_IDs=0 Mem=0 GRES=gpu:v100:1(IDX:0)
   TresPerJob={asked}
';;
*\\[*) echo gpu1 gpu2;;
*) echo "$3";;
esac""",
    )
    found = own_allocation(VARIABLES)
    assert [host.slots for host in found.hosts] == [3, 1]
    command = srun_command("17", "gpu1", "true", found.gres["gpu1"])
    assert {f"--gpus={gpus}", "--gres=nvme:1"} <= {*command}


def test_nodes_without_gpus_beside_others_are_refused() -> None:
    with pytest.raises(RunError, match="1 of the 3 nodes of the allocation have no GPU"):
        slots_of_nodes({}, [2, 0, 2])


def test_a_job_of_several_components_is_refused() -> None:
    with pytest.raises(UsageError, match="the Slurm job 17 is heterogeneous: it has 2 components"):
        own_allocation({"SLURM_JOB_ID": "17", "SLURM_HET_SIZE": "2"})


def test_a_command_of_slurm_does_not_take_the_variables_of_the_allocation_for_options(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("scontrol", "env")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SQUEUE_PARTITION", "gpu")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    printed = call("scontrol").splitlines()
    assert "SLURM_CONF=/etc/slurm/slurm.conf" in printed
    assert "SLURM_NTASKS=8" not in printed
    assert "SQUEUE_PARTITION=gpu" not in printed


def test_a_command_that_fails_is_quoted(write: Write) -> None:
    write("sbatch", "echo first >&2; echo sbatch: error: Invalid account >&2; exit 1")
    with pytest.raises(RunError, match="sbatch --parsable failed: sbatch: error: Invalid account"):
        call("sbatch", "--parsable", "script.sh")
    write(
        "sbatch",
        """echo "sbatch: unrecognized option '--acount'
Try \\"sbatch --help\\" for more information" >&2; exit 255""",
    )
    with pytest.raises(RunError, match="unrecognized option '--acount'"):
        call("sbatch", "--parsable", "script.sh")
