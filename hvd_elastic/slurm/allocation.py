"""The hosts and slots of the Slurm allocation that this process runs in."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.slurm.batch import parse_left
from hvd_elastic.slurm.commands import call, require_commands

_COUNTS = re.compile(r"(?P<count>\d+)(\(x(?P<times>\d+)\))?")


@dataclass(frozen=True)
class Allocation:
    """An allocation of Slurm.

    Attributes:
        job_id: number of the job.
        hosts: its nodes with their slots, in Slurm's order.
        left_s: time until its limit, when it was looked at [s].
    """

    job_id: str
    hosts: tuple[Host, ...]
    left_s: float = math.inf


def is_inside(environment: Mapping[str, str]) -> bool:
    """Return whether a process with this environment runs in an allocation."""
    return bool(environment.get("SLURM_JOB_ID"))


def own_allocation(environment: Mapping[str, str], slots_per_node: int | None = None) -> Allocation:
    """Return the allocation that a process with this environment runs in.

    Args:
        environment: variables that Slurm has set for the batch script, or for salloc's shell.
        slots_per_node: slots of each node; None: see :func:`slots_of_nodes`.

    Raises:
        UsageError: there is no allocation, or ``srun`` has started several of this process.
        RunError: Slurm's commands are missing, or the job has ended.
    """
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id:
        raise UsageError(
            "there is no Slurm allocation here (SLURM_JOB_ID is not set). Start the run inside "
            "one (salloc -N2, or a script for sbatch), or submit it: hvd-elastic slurm submit "
            "--nodes 2 -- python train.py"
        )
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        raise UsageError(
            f"srun has started this command {tasks} times, and each would lead a run of its own. "
            "Start it once, in the batch script without srun: it starts what it needs on all nodes"
        )
    require_commands("srun", "scontrol", "squeue")
    names = expand_nodes(environment.get("SLURM_JOB_NODELIST", ""))
    if slots_per_node is None:
        slots = slots_of_nodes(environment, len(names))
    else:
        slots = [slots_per_node] * len(names)
    hosts = tuple(Host(name, slots=number) for name, number in zip(names, slots, strict=True))
    return Allocation(job_id, hosts, time_left(job_id))


def expand_nodes(nodelist: str) -> list[str]:
    """Return the names in one of Slurm's lists such as ``gpu[01-04,07]``.

    Raises:
        RunError: it is not a list of nodes.
    """
    return call("scontrol", "show", "hostnames", nodelist).split() if nodelist else []


def time_left(job_id: str) -> float:
    """Return the time until the limit of a job that runs [s].

    Raises:
        RunError: it does not run (any more).
    """
    try:
        printed = call("squeue", "--noheader", f"--jobs={job_id}", "--format=%T %L").strip()
    except RunError as error:
        printed = str(error)
    state, _, left = printed.partition(" ")
    if state == "RUNNING":
        return parse_left(left)
    raise RunError(
        f"the Slurm job {job_id} of SLURM_JOB_ID does not run ({printed or 'it has ended'}). "
        "Start the run inside a new allocation, or unset SLURM_JOB_ID"
    )


def slots_of_nodes(environment: Mapping[str, str], nodes: int) -> list[int]:
    """Return the number of slots of each node of an allocation.

    It is the first of these that the allocation has: GPUs of a node; tasks of a node, if the user
    has asked for tasks; CPUs of a node, divided by those that the user wants for a task.

    Raises:
        RunError: the variables of Slurm do not fit each other.

    >>> slots_of_nodes({"SLURM_JOB_CPUS_PER_NODE": "8(x2),4", "SLURM_CPUS_PER_TASK": "2"}, 3)
    [4, 4, 2]
    >>> tasks = {"SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "2(x3)"}
    >>> slots_of_nodes({**tasks, "SLURM_JOB_CPUS_PER_NODE": "8(x3)"}, 3)
    [2, 2, 2]
    >>> slots_of_nodes({**tasks, "SLURM_GPUS_ON_NODE": "4"}, 3)
    [4, 4, 4]
    """
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    if gpus.isdigit() and int(gpus):
        return [int(gpus)] * nodes
    per_task = 1
    name = "SLURM_TASKS_PER_NODE"
    if not {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & environment.keys():
        name = "SLURM_JOB_CPUS_PER_NODE"
        per_task = int(environment.get("SLURM_CPUS_PER_TASK") or 1)
    found: list[int] = []
    for part in environment.get(name, "").split(","):
        match = _COUNTS.fullmatch(part)
        if match is not None:
            found += [int(match["count"])] * int(match["times"] or 1)
    if len(found) != nodes:
        raise RunError(
            f"{name}={environment.get(name)!r} is not a number for each of the {nodes} nodes of "
            f"the allocation. Name the hosts with --hostfile"
        )
    return [max(1, number // per_task) for number in found]
