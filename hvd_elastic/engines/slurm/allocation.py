"""Call Slurm's commands, and read the hosts and slots of the allocation of this process."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hvd_elastic.engines.slurm.batch import parse_left
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.hosts.hostfile import Host

_TIMEOUT_S = 60.0
"""Time limit of a command [s]; a busy slurmctld answers after some seconds."""
RUNNING = ("RUNNING", "RESIZING", "SIGNALING", "STOPPED")
"""What ``%T`` of squeue says of a job that runs; the others are its flags, such as that of a signal
that is on its way to the job."""
_OPTIONS = ("SLURM_", "SRUN_", "SBATCH_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SCONTROL_")
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_ARRAY_")
"""What the names of variables begin with that are kept."""


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for Slurm's commands, without variables that are options of theirs.

    A batch script's ``--ntasks`` would be taken for that of each ``srun`` in it, and a user's
    ``SQUEUE_PARTITION`` would hide jobs of the run.

    >>> clean_environment({"SLURM_NTASKS": "8", "SLURM_ARRAY_TASK_ID": "1", "HOME": "/root"})
    {'SLURM_ARRAY_TASK_ID': '1', 'HOME': '/root'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_KEPT) or not name.startswith(_OPTIONS)
    }


def require_commands(*names: str) -> None:
    """Raise RunError if one of Slurm's commands is not on PATH."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        raise RunError(
            f"Slurm's {' and '.join(missing)} cannot be found on PATH on this machine "
            f"({os.uname().nodename}). Start the run where Slurm's commands are (in a container, "
            "bind them and Slurm's configuration), or name the hosts with --hostfile"
        )


def call(*command: str) -> str:
    """Run a command of Slurm and return what it has printed.

    Raises:
        RunError: it is not on PATH, failed or took too long; shows its last line.
    """
    require_commands(command[0])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=clean_environment(os.environ),
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{' '.join(command[:2])} failed: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        said = [line for line in lines if not line.startswith('Try "')]  # sbatch --help
        last = said[-1] if said else f"exit status {done.returncode}"
        raise RunError(f"{' '.join(command[:2])} failed: {last}")
    return done.stdout


_COUNTS = re.compile(r"(?P<count>\d+)(\(x(?P<times>\d+)\))?")
_GRES = re.compile(r"^ +Nodes=(?P<nodes>\S+) .*\bGRES=(?P<gres>\S+)", re.MULTILINE)
"""A line of ``scontrol show job --details`` about nodes that have generic resources in a job."""
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)
_TYPED = re.compile(r"\bTresPer\w+=\S*\bgpu:(?!\d+(,|\s|$))")
"""That a job has asked for GPUs by their type, in what ``scontrol show job`` prints."""


@dataclass(frozen=True)
class Allocation:
    """An allocation of Slurm.

    Attributes:
        hosts: its nodes with their slots, in Slurm's order.
        left_s: time until its limit, when it was looked at [s].
        gres: what the job has on each node of its generic resources, such as ``gpu:2``.
        kill_wait_s: time between SIGTERM and SIGKILL at the end of a job [s].
    """

    job_id: str
    hosts: tuple[Host, ...]
    left_s: float = math.inf
    gres: Mapping[str, str] = field(default_factory=dict)
    kill_wait_s: float = 30.0


def is_inside(environment: Mapping[str, str]) -> bool:
    """Return whether a process with this environment runs in an allocation."""
    return bool(environment.get("SLURM_JOB_ID"))


def own_allocation(environment: Mapping[str, str], slots_per_node: int | None = None) -> Allocation:
    """Return the allocation that a process with this environment runs in.

    Args:
        environment: variables that Slurm has set for the batch script, or for salloc's shell.
        slots_per_node: slots of each node; None: see :func:`slots_of_nodes`.

    Raises:
        UsageError: there is no allocation, it is one of several, or ``srun`` has started several
            of this process.
        RunError: Slurm's commands are missing, or the job has ended.
    """
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id:
        raise UsageError(
            "there is no Slurm allocation here (SLURM_JOB_ID is not set). Start the run inside "
            "one (salloc -N2, or a script for sbatch), or submit it: hvd-elastic slurm submit "
            "--nodes 2 -- python train.py, and to resume: hvd-elastic slurm submit --resume RUN"
        )
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        raise UsageError(
            f"srun has started this command {tasks} times, and each would lead a run of its own. "
            "Start it once, in the batch script without srun: it starts what it needs on all nodes"
        )
    if (parts := environment.get("SLURM_HET_SIZE", "1")) != "1":
        raise UsageError(
            f"the Slurm job {job_id} is heterogeneous: it has {parts} components, and a run takes "
            "its nodes from a job without components. Ask for all nodes alike, or submit the run: "
            "hvd-elastic slurm submit --nodes 2 -- python train.py"
        )
    require_commands("srun", "scontrol", "squeue")
    left_s = time_left(job_id)
    names = expand_nodes(environment.get("SLURM_JOB_NODELIST", ""))
    gres = gres_of_nodes(job_id)
    if slots_per_node is None:
        slots = slots_of_nodes(environment, [count_gpus(gres.get(name, "")) for name in names])
    else:
        slots = [slots_per_node] * len(names)
    hosts = tuple(Host(name, slots=number) for name, number in zip(names, slots, strict=True))
    said = _KILL_WAIT.search(call("scontrol", "show", "config"))
    kill_wait_s = float(said[1]) if said else Allocation.kill_wait_s
    return Allocation(job_id, hosts, left_s, gres, kill_wait_s)


def gres_of_nodes(job_id: str, ask: Callable[..., str] = call) -> dict[str, str]:
    """Return the generic resources that a job has on each of its nodes, as ``srun`` takes them.

    A job may have asked for them by node, by task, by socket or all together (``--gpus``); in the
    last case its nodes may have different numbers. GPUs have a type if the job has asked for one:
    a step cannot ask for it otherwise. Nodes that have none are left out.

    Args:
        ask: calls one of Slurm's commands.

    Raises:
        RunError: the job has ended.
    """
    shown = ask("scontrol", "show", "job", "--details", job_id)
    found: dict[str, str] = {}
    for match in _GRES.finditer(shown):
        gres = re.sub(r"\([^)]*\)", "", match["gres"])  # without their indices
        if (gpus := count_gpus(gres)) and not _TYPED.search(shown):
            others = [each for each in gres.split(",") if not each.startswith("gpu:")]
            gres = ",".join([f"gpu:{gpus}", *others])
        if gres:
            found |= dict.fromkeys(expand_nodes(match["nodes"], ask), gres)
    return found


def count_gpus(gres: str) -> int:
    """Return the number of GPUs among generic resources.

    >>> count_gpus("gpu:a100:2,gpu:v100:1,nvme:4"), count_gpus("")
    (3, 0)
    """
    parts = [part.split(":") for part in gres.split(",")]
    return sum(int(words[-1]) for words in parts if words[0] == "gpu" and words[-1].isdigit())


def expand_nodes(nodelist: str, ask: Callable[..., str] = call) -> list[str]:
    """Return the names in one of Slurm's lists such as ``gpu[01-04,07]``.

    Raises:
        RunError: it is not a list of nodes.
    """
    return ask("scontrol", "show", "hostnames", nodelist).split() if nodelist else []


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
    if state in RUNNING:
        return parse_left(left)
    raise RunError(
        f"the Slurm job {job_id} of SLURM_JOB_ID does not run ({printed or 'it has ended'}). "
        "Start the run inside a new allocation, or unset SLURM_JOB_ID"
    )


def has_ended(job_id: str) -> bool:
    """Return whether a job has ended for certain; a slurmctld that does not answer says nothing."""
    try:
        states = call("squeue", "--noheader", f"--jobs={job_id}", "--states=all", "--format=%T")
    except RunError as error:
        return "Invalid job id" in str(error)  # some minutes after its end
    living = {"PENDING", "CONFIGURING", *RUNNING, "SUSPENDED", "REQUEUED"}
    return not living & {*states.split()}


def slots_of_nodes(environment: Mapping[str, str], gpus: Sequence[int]) -> list[int]:
    """Return the number of slots of each node of an allocation.

    It is the first of these that the allocation has: GPUs of a node; tasks of a node, if the user
    has asked for tasks; CPUs of a node, divided by those that the user wants for a task.

    Args:
        environment: variables that Slurm has set.

    Raises:
        RunError: the variables of Slurm do not fit each other, or only some nodes have GPUs.

    >>> none = [0, 0, 0]
    >>> slots_of_nodes({"SLURM_JOB_CPUS_PER_NODE": "8(x2),4", "SLURM_CPUS_PER_TASK": "2"}, none)
    [4, 4, 2]
    >>> tasks = {"SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "2(x3)"}
    >>> slots_of_nodes({**tasks, "SLURM_JOB_CPUS_PER_NODE": "8(x3)"}, none)
    [2, 2, 2]
    >>> slots_of_nodes(tasks, [4, 4, 2])
    [4, 4, 2]
    """
    nodes = len(gpus)
    if all(gpus) and nodes:
        return [*gpus]
    if any(gpus):
        raise RunError(
            f"{gpus.count(0)} of the {nodes} nodes of the allocation have no GPU, and the others "
            "have. Ask for GPUs on each node (--gpus-per-node), or name the hosts with --hostfile"
        )
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
