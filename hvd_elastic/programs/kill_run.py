"""End processes of this user with a run id in their environment, and their descendants.

With "strays", end the workers of other launchers whose launcher is gone.

Input (JSON on stdin): {"run": run id or null for any, "home": the caller's HVD_ELASTIC_HOME or "",
"strays": bool, "ours": whether processes of our own runs count as strays too, "pattern": a regular
expression for command lines to use instead, or null, "grace_s": seconds, "dry_run": bool}.
Output: {"processes": [{"pid", "command", "run", "ended": "TERM" | "KILL" | "" | "left"}], "others":
[text about a process of a run of this name in another HVD_ELASTIC_HOME, which is another run]}.
Processes are found by environment and parentage, so that no other process is touched; only with
"pattern" (``killclust --user-processes``) are they found by their command line.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path

from hvd_elastic.programs.processes import (
    Process,
    all_processes,
    command_line,
    descendants,
    end_processes,
    environment,
    own_ancestors,
    read,
)

VARIABLE = "HVD_ELASTIC_RUN_ID"
SPOOL = "HVD_ELASTIC_SPOOL"
HOST_FOLDER = "HVD_ELASTIC_HOST_FOLDER"  # of dial_back.py
OURS = "hvd-elastic"
# Launcher, a variable that it sets for its workers, and the variable that names the job.
LAUNCHERS = (
    ("torchrun", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RUN_ID"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"),
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
)
# Jobs without a name, and those of torchrun with its default id, are told apart by these.
UNNAMED = ("", "none")
MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT")
# Begins a word in the command line of a launcher, which may be PID 1 of a container.
LAUNCHES = re.compile(
    r"torchrun|torch\.distributed|accelerate|deepspeed|mpirun|mpiexec|orterun|prterun|horovod"
    r"|hvd[-_]elastic"
)
# Python programs and modules that may be PID 1 of a container, and are no launchers.
SUPERVISORS = re.compile(
    r"(supervisor\.)?supervisord|(circus\.)?circusd|honcho|my_init|jupyter(lab|hub)?(-[\w-]+)?"
)
SHELLS = (b"sh", b"bash", b"dash", b"zsh", b"ksh", b"csh", b"tcsh", b"fish")
# Maximum length of the command line that a pattern is searched in.
MOST_LETTERS = 1 << 20
# Appears in the command line of a `killclust` that searches by pattern.
ASKS = "--user-processes"


def job_of(variables: dict[str, str], ours: bool) -> str | None:
    """Return the launcher and the job that a process is a worker of, or None."""
    if VARIABLE in variables:
        return f"{OURS} {variables[VARIABLE]}" if ours else None
    for launcher, mark, name in LAUNCHERS:
        if mark in variables:
            return f"{launcher} {variables.get(name, '')}".rstrip()
    return None


def job_key(job: str, variables: dict[str, str]) -> tuple[str | None, ...]:
    """Return what two workers have in common if they may be of the same job."""
    is_named = job.partition(" ")[2] not in UNNAMED
    return (job,) if is_named else (job, *map(variables.get, MEETING_POINT))


def launched(pid: int, processes: dict[int, Process], jobs: dict[int, str]) -> float | None:
    """Return when the launcher of a worker was started; None if it is left behind.

    It is if only workers and their shells are between it and init. Any other process in between,
    such as a living launcher, an sshd or a terminal, means that somebody still controls the job.
    """
    while True:
        parent = processes[pid].parent
        name = read(parent, "comm").strip()
        if name == b"systemd" or (parent == 1 and not is_launcher(parent)):
            return None
        if parent not in processes or not (parent in jobs or name in SHELLS):
            return processes.get(parent, processes[pid]).started
        pid = parent


def is_launcher(pid: int) -> bool:
    """Return whether a process may have started workers.

    Its command line names a program that does, or is of Python: a script of any name may be one.
    """
    words = command_line(pid, MOST_LETTERS).split()
    # A folder is none, as in: sh -c "cd /work/hvd_elastic && …"
    words = [word for word in words if not ("/" in word and os.path.isdir(word))]  # noqa: PTH112
    names = [word.rpartition("/")[2] for word in words]
    if any(map(LAUNCHES.match, names)):
        return True
    # Not the name of the process: a program may give itself another one, and PyTorch does.
    program = next((name for name in names[1:] if not name.startswith("-")), "")
    return bool(names) and names[0].startswith("python") and not SUPERVISORS.fullmatch(program)


def home_of(spool: str) -> str:
    """Return the HVD_ELASTIC_HOME of a run's spool on a host, which is HOME/spool/RUN/HOST."""
    return os.path.realpath(str(Path(spool).parent.parent.parent))  # "spool" may be a link


def is_elsewhere(pid: int, home: str) -> bool:
    """Return whether a process is of a run in another HVD_ELASTIC_HOME than the caller's."""
    variables = environment(pid)
    spool = variables.get(SPOOL)
    own = str(Path.home() / (home or os.environ.get("HVD_ELASTIC_HOME") or ".hvd_elastic"))
    # Hosts of Ray and Spark may have a folder of their own, for this run alone; that of its leader
    # is not known there, so it counts as the caller's.
    homes = (own, variables.get(HOST_FOLDER) or own)
    return spool is not None and home_of(spool) not in map(os.path.realpath, homes)


def is_own(pid: int) -> bool:
    """Return whether a process belongs to this user."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()  # noqa: PTH116  # hot loop
    except OSError:
        return False


def find(
    run: str | None,
    strays: bool = False,
    ours: bool = False,
    pattern: str | None = None,
    variable: str = VARIABLE,
    home: str | None = None,
) -> dict[Process, str]:
    """Return the processes to end, with run or job; never this process or its ancestors.

    Without ``strays`` and ``pattern`` they are those with a ``variable`` in their environment; of a
    certain run in this ``home`` only, unless it is None.
    """
    processes = {pid: process for pid, process in all_processes().items() if is_own(pid)}
    spared = own_ancestors()
    marked: dict[int, str] = {}
    if pattern is not None:
        wanted = re.compile(pattern)
        for pid in processes:
            command = command_line(pid, MOST_LETTERS)
            # The command that asks for this has the pattern in its own command line.
            if ASKS not in command and wanted.search(command):
                marked[pid] = environment(pid).get(VARIABLE, "")
    elif strays:
        found = {pid: environment(pid) for pid in processes}
        jobs = {pid: job for pid in found for job in [job_of(found[pid], ours)] if job is not None}
        keys = {pid: job_key(jobs[pid], found[pid]) for pid in jobs}
        starts = {pid: launched(pid, processes, jobs) for pid in jobs}
        alive: dict[tuple[str | None, ...], float] = {}
        for pid, start in starts.items():
            if start is not None:
                alive[keys[pid]] = min(start, alive.get(keys[pid], start))
        # What a worker of a live job has started in the background is not left behind. What is
        # older than the job is of one that was started with the same name before.
        marked = {
            pid: jobs[pid]
            for pid, start in starts.items()
            if start is None and processes[pid].started < alive.get(keys[pid], math.inf)
        }
    else:
        runs = {pid: environment(pid).get(variable) for pid in processes}
        marked = {pid: name for pid, name in runs.items() if name is not None}
        if run is not None:
            marked = {pid: name for pid, name in marked.items() if name == run}
            if home is not None:
                marked = {pid: name for pid, name in marked.items() if not is_elsewhere(pid, home)}
    ending: dict[Process, str] = {}
    for pid, name in marked.items():
        if pid not in spared:
            for process in [processes[pid], *descendants([pid], processes)]:
                if process.pid not in spared:
                    ending.setdefault(process, marked.get(process.pid, name))
    return ending


def main() -> None:
    """Read the request, end the processes, and write the answer."""
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    run, home = request["run"], request["home"]
    seen: dict[tuple[int, int], dict[str, object]] = {}

    def find_and_note() -> dict[Process, str]:
        strays, ours, pattern = request["strays"], request["ours"], request["pattern"]
        found = find(run, strays, ours, pattern, home=home)
        for process, name in found.items():
            entry = {"pid": process.pid, "command": command_line(process.pid), "run": name}
            seen.setdefault(process.key, {**entry, "ended": ""})
        return found

    if request["dry_run"]:
        find_and_note()
    else:
        for key, how in end_processes(find_and_note, request["grace_s"]).items():
            seen[key]["ended"] = how
    others = [
        f"process {each.pid} of a run {name} in {home_of(environment(each.pid).get(SPOOL, ''))}: "
        f"{command_line(each.pid)}"
        for each, name in (find(run) if run is not None else {}).items()
        if each.key not in seen and is_elsewhere(each.pid, home)
    ]
    processes = [seen[key] for key in sorted(seen)]
    sys.stdout.write(json.dumps({"processes": processes, "others": others}))
