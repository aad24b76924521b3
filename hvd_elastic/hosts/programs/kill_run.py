"""Ends this user's processes that carry a run id in their environment, and their descendants.

Or, as strays, the workers of other launchers that their launcher has left behind.

Input (JSON on stdin): {"run": run id or null for any, "strays": bool, "ours": whether what our own
agents left counts among the strays, "pattern": instead of these a regular expression for command
lines, or null, "grace_s": seconds, "dry_run": bool}.
Output: {"processes": [{"pid", "command", "run", "ended": "TERM" | "KILL" | "" | "left"}]}.
Found by environment and parentage, not by name: a bystander is never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

VARIABLE = b"HVD_ELASTIC_RUN_ID="
OURS = "hvd-elastic"
# What stock launchers put into their workers' environment, and which of it names the job.
LAUNCHERS = (
    ("torchrun", b"TORCHELASTIC_RUN_ID=", b"TORCHELASTIC_RUN_ID="),
    ("mpirun", b"OMPI_COMM_WORLD_RANK=", b"PMIX_NAMESPACE="),
    ("horovodrun", b"HOROVOD_RANK=", b"HOROVOD_GLOO_RENDEZVOUS_PORT="),
)
SHELLS = (b"sh", b"bash", b"dash", b"zsh", b"ksh", b"csh", b"tcsh", b"fish")
MOST_LETTERS = 1 << 20
ASKS = "--user-processes"
ROUNDS = 5
PAUSE_S = 0.05


def read(path: str) -> bytes:
    """A file of /proc, or b"" when its process is gone or another user's."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def stat_of(pid: int) -> tuple[int, int] | None:
    """(parent, start time) of a process, or None."""
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    # A zombie is dead already; its parent's, or init's, to reap.
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[1]), int(fields[19])


def run_of(pid: int) -> str | None:
    """The run id in a process's environment, or None."""
    for entry in read(f"/proc/{pid}/environ").split(b"\0"):
        if entry.startswith(VARIABLE):
            return entry[len(VARIABLE) :].decode("utf-8", "replace")
    return None


def job_of(pid: int, ours: bool) -> str | None:
    """The launcher and the job that a process is a worker of, or None."""
    run = run_of(pid)
    if run is not None:
        return f"{OURS} {run}" if ours else None
    entries = read(f"/proc/{pid}/environ").split(b"\0")
    for launcher, mark, name in LAUNCHERS:
        if any(entry.startswith(mark) for entry in entries):
            names = [entry[len(name) :] for entry in entries if entry.startswith(name)]
            return " ".join([launcher, *(each.decode("utf-8", "replace") for each in names[:1])])
    return None


def is_left_behind(pid: int, processes: dict[int, tuple[int, int]], jobs: dict[int, str]) -> bool:
    """Whether nothing but workers and their shells stands between a worker and init.

    A launcher that lives, an sshd that serves one, a terminal: any other process there means that
    somebody still holds the job.
    """
    while True:
        parent = processes[pid][0]
        name = read(f"/proc/{parent}/comm").strip()
        if parent == 1 or name == b"systemd":
            return True
        if parent not in processes or not (parent in jobs or name in SHELLS):
            return False
        pid = parent


def own_processes() -> dict[int, tuple[int, int]]:
    """Pid -> (parent, start time) of this user's processes."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == os.geteuid():
                    stat = stat_of(int(folder.name))
                    if stat is not None:
                        found[int(folder.name)] = stat
    return found


def find(
    run: str | None, strays: bool, ours: bool, pattern: str | None
) -> dict[tuple[int, int], str]:
    """(pid, start time) -> run id, or job, of what is to end; never this one or those above it."""
    processes = own_processes()
    spared = set()
    pid = os.getpid()
    while pid in processes and pid not in spared:
        spared.add(pid)
        pid = processes[pid][0]
    marked: dict[int, str] = {}
    if pattern is not None:
        wanted = re.compile(pattern)
        for pid in processes:
            command = command_of(pid, MOST_LETTERS)
            # Who asks for this has the pattern on its command line, and may be on this host.
            if pid not in spared and ASKS not in command and wanted.search(command):
                marked[pid] = run_of(pid) or ""
    elif strays:
        jobs = {pid: job for pid in processes for job in [job_of(pid, ours)] if job is not None}
        marked = {
            pid: job
            for pid, job in jobs.items()
            if pid not in spared and is_left_behind(pid, processes, jobs)
        }
    else:
        for pid in processes:
            if pid not in spared:
                name = run_of(pid)
                if name is not None and run in (None, name):
                    marked[pid] = name
    grew = True
    while grew:
        grew = False
        for pid, (parent, _) in processes.items():
            if parent in marked and pid not in marked and pid not in spared:
                marked[pid] = marked[parent]
                grew = True
    return {(pid, processes[pid][1]): name for pid, name in marked.items()}


def send(pid: int, started: int, number: int) -> None:
    """Signals a process, through a pidfd where there is one, so never its pid's next owner."""
    with contextlib.suppress(OSError):
        if not hasattr(os, "pidfd_open"):
            if (stat_of(pid) or (0, -1))[1] == started:
                os.kill(pid, number)
            return
        handle = os.pidfd_open(pid)
        try:
            if (stat_of(pid) or (0, -1))[1] == started:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def wait_gone(keys: Iterable[tuple[int, int]], seconds: float) -> list[tuple[int, int]]:
    """Those of the processes that are still there after at most so many seconds."""
    deadline = time.monotonic() + seconds
    left = list(keys)
    while True:
        left = [(pid, started) for pid, started in left if (stat_of(pid) or (0, -1))[1] == started]
        if not left or time.monotonic() >= deadline:
            return left
        # Not our children: the kernel tells no one but their parent when they end.
        time.sleep(PAUSE_S)


def command_of(pid: int, most: int = 200) -> str:
    """The command line, cut to a readable length."""
    text = read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return text[:most]


def main() -> None:
    """Reads what to end, ends it, tells what was ended."""
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    seen: dict[tuple[int, int], dict[str, object]] = {}
    for _ in range(1 if request["dry_run"] else ROUNDS):
        # Again until nothing is found: what was forked while the others were ended comes next.
        found = find(request["run"], request["strays"], request["ours"], request["pattern"])
        if not found:
            break
        for key, name in found.items():
            entry = {"pid": key[0], "command": command_of(key[0]), "run": name, "ended": ""}
            seen.setdefault(key, entry)
        if request["dry_run"]:
            break
        for pid, started in found:
            send(pid, started, signal.SIGTERM)
        left = wait_gone(found, request["grace_s"])
        for key in found:
            seen[key]["ended"] = "KILL" if key in left else "TERM"
        for pid, started in left:
            send(pid, started, signal.SIGKILL)
        for key in wait_gone(left, 5.0):
            seen[key]["ended"] = "left"
    sys.stdout.write(json.dumps({"processes": [seen[key] for key in sorted(seen)]}))


if __name__ == "__main__":
    main()
