"""Removes what dead processes of this user left in files, and tells who still holds GPU memory.

Input (JSON on stdin): {"run": run id or null for any, "host": the host's name in the hostfile,
"dry_run": bool}.
Output: {"removed": [{"path", "kind", "bytes", "problem"}], "gpus": [text]}.

Removed is only what surely nobody uses: scratch folders of agents of ours that do not live, shared
memory and lock files that no process of any container has open (the kernel grants a write lease
on no other).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from pathlib import Path

from hvd_elastic.hosts.programs.nvidia import ask_nvidia_smi
from hvd_elastic.hosts.programs.processes import all_processes, environment, read

# What an agent of ours listens on, as /proc/net/unix has it (agent/agent.py).
AGENT = re.compile(r"@hvd_elastic/(?P<run>[^/\s]+)/")
# agent/scratch.py: 12 digits of the SHA-256 of run and host.
SCRATCH = re.compile(r"hvd-[0-9a-f]{12}-.+")
# PyTorch's data loaders (with the process id), NCCL, Open MPI; unlinked at an orderly end.
SHARED_MEMORY = re.compile(r"torch_(?P<pid>\d+)_.+|nccl-.+|vader_segment\..+|sm_segment\..+")
BUILD_LOCKS = ("torch_extensions/*/*/lock", "torch_extensions/*/lock")
MANAGER_SOCKET = "torch-shm-dir-*/manager.sock"
LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay")
HOLDERS = "--query-compute-apps=gpu_bus_id,pid,used_memory"


def live_runs() -> set[str]:
    """Runs of which an agent lives here, whoever's."""
    try:
        text = Path("/proc/net/unix").read_text(errors="replace")
    except OSError:
        return set()
    return {found["run"] for found in AGENT.finditer(text)}


def own(path: Path) -> bool:
    """Whether it is this user's, and no symbolic link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)


def is_open(path: Path) -> bool:
    """Whether any process, of any container, has the file open or mapped."""
    try:
        descriptor = os.open(str(path), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def is_in_use(folder: Path) -> bool:
    """Whether a process of this user has it for its temporary folder, or works or reads in it."""
    name = str(folder)
    for pid in all_processes():
        if environment(pid).get("TMPDIR") == name:
            return True
        links = [Path(f"/proc/{pid}/cwd")]
        with contextlib.suppress(OSError):
            links += Path(f"/proc/{pid}/fd").iterdir()
        for link in links:
            with contextlib.suppress(OSError):
                target = os.readlink(str(link))  # noqa: PTH115  # Path.readlink is of 3.9
                if f"{target}/".startswith(f"{name}/"):
                    return True
    return False


def is_local(path: Path) -> bool:
    """Whether it lies on a file system of this machine alone, where nobody else can have it."""
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
        _, where, name = line.split()[:3]
        if len(where) >= len(best) and (str(path) + "/").startswith(where.rstrip("/") + "/"):
            best, kind = where, name
    return kind in LOCAL_FILE_SYSTEMS


def listens(path: Path) -> bool:
    """Whether somebody takes connections on a unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            pass
        return True


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    if not path.is_dir():
        return path.lstat().st_size
    total = 0
    for folder, _, files in os.walk(str(path)):
        for name in files:
            with contextlib.suppress(OSError):
                total += Path(folder, name).lstat().st_size
    return total


def scratch_folders(run: str | None, host: str) -> list[Path]:
    """Temporary folders of agents of ours that do not live."""
    alive = live_runs()
    prefix = "hvd-"
    if run is not None:
        prefix = f"hvd-{hashlib.sha256(f'{run}/{host}'.encode()).hexdigest()[:12]}-"
    # Of a folder only the hash of its run is known: any live agent may be its owner.
    if alive if run is None else run in alive:
        return []
    folders = Path(tempfile.gettempdir()).glob(f"{prefix}*")
    return [each for each in folders if SCRATCH.fullmatch(each.name) and own(each)]


def shared_memory() -> list[Path]:
    """Shared memory of training programs that no process has."""
    folder = Path("/dev/shm")  # noqa: S108  # where POSIX shared memory lies
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        named = SHARED_MEMORY.fullmatch(path.name)
        if named and own(path) and not is_open(path):
            if not (named["pid"] and Path("/proc", named["pid"]).exists()):
                found.append(path)
    return found


def find(run: str | None, host: str) -> list[tuple[Path, str]]:
    """What nobody uses any more, and its kind."""
    cache, temporary = Path("~/.cache").expanduser(), Path(tempfile.gettempdir())
    folders = [path for path in scratch_folders(run, host) if not is_in_use(path)]
    locks = [path for pattern in BUILD_LOCKS for path in cache.glob(pattern) if own(path)]
    sockets = [path for path in temporary.glob(MANAGER_SOCKET) if own(path) and own(path.parent)]
    return [
        *((path, "temporary folder") for path in folders),
        *((path, "shared memory") for path in shared_memory()),
        *((path, "lock") for path in locks if is_local(path) and not is_open(path)),
        *((path.parent, "socket") for path in sockets if not listens(path)),
    ]


def remove(path: Path) -> str:
    """Why it could not be removed, or ""."""
    try:
        if path.is_dir():
            shutil.rmtree(str(path))
        else:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def held_gpus() -> list[str]:
    """A line for each process that holds GPU memory."""
    answer = ask_nvidia_smi(HOLDERS)
    if answer is None or answer.status is None:
        return [] if answer is None else [f"nvidia-smi: {answer.error}"]
    rows = [[word.strip() for word in line.split(",")] for line in answer.lines]
    return [
        f"GPU {row[0]}: process {row[1]} {who(int(row[1]))}{row[2]} MB"
        for row in rows
        if len(row) == 3 and row[1].isdigit()
    ]


def who(pid: int) -> str:
    """The user and the command of a process that can be seen from here."""
    with contextlib.suppress(OSError):
        name = read(pid, "comm").decode("utf-8", "replace").strip()
        return f"({name} of user {Path(f'/proc/{pid}').stat().st_uid}) "
    return "(not seen from here) "


def main() -> None:
    """Reads what to look for, removes it, tells what it was."""
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    removed = []
    for path, kind in find(request["run"], request["host"]):
        entry = {"path": str(path), "kind": kind, "bytes": size_of(path), "problem": ""}
        if not request["dry_run"]:
            entry["problem"] = remove(path)
        removed.append(entry)
    sys.stdout.write(json.dumps({"removed": removed, "gpus": held_gpus()}))
