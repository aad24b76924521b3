"""The hosts of an allocation, with Slurm's commands in place of which small scripts answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.slurm.allocation import own_allocation, slots_of_nodes
from hvd_elastic.slurm.commands import call
from tests.unit.slurm.conftest import VARIABLES, Write


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


@pytest.mark.parametrize("cpus", ["", "8", "8(x3)", "eight(x2)"])
def test_numbers_that_do_not_fit_the_nodes_are_refused(cpus: str) -> None:
    with pytest.raises(RunError, match="not a number for each of the 2 nodes"):
        slots_of_nodes({"SLURM_JOB_CPUS_PER_NODE": cpus}, 2)


def test_gpus_come_before_tasks_and_tasks_before_cpus() -> None:
    cpus = {"SLURM_JOB_CPUS_PER_NODE": "8", "SLURM_TASKS_PER_NODE": "1"}
    tasks = {**cpus, "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2"}
    assert slots_of_nodes(cpus, 1) == [8]
    assert slots_of_nodes({**cpus, "SLURM_CPUS_PER_TASK": "16"}, 1) == [1]
    assert slots_of_nodes(tasks, 1) == [2]
    assert slots_of_nodes({**tasks, "SLURM_GPUS_ON_NODE": "4"}, 1) == [4]


def test_a_command_of_slurm_does_not_take_the_variables_of_the_allocation_for_options(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("scontrol", "env")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    printed = call("scontrol").splitlines()
    assert "SLURM_CONF=/etc/slurm/slurm.conf" in printed
    assert "SLURM_NTASKS=8" not in printed


def test_a_command_that_fails_is_quoted(write: Write) -> None:
    write("sbatch", "echo first >&2; echo sbatch: error: Invalid account >&2; exit 1")
    with pytest.raises(RunError, match="sbatch --parsable failed: sbatch: error: Invalid account"):
        call("sbatch", "--parsable", "script.sh")
