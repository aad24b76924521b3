"""Remove files that dead processes of this user left behind, and list who holds GPU memory.

Input (JSON on stdin): {"run": run id or null for any, "host": the host's name in the hostfile,
"tmpdir": the caller's TMPDIR or "", in which agents make their folders too, "dry_run": bool}.
Output: {"removed": [{"path", "kind", "bytes", "problem"}], "gpus": [text]}.

Only files that are certainly unused are removed: temporary folders of our agents that have ended
(one that lives has locked its folder), and shared memory and lock files that no process of any
container has open (the kernel grants a write lease only on such files).
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
from collections.abc import Iterator
from pathlib import Path

from hvd_elastic.programs.nvidia import ask_nvidia_smi
from hvd_elastic.programs.processes import all_processes, environment, read

# Name of the socket that an agent listens on, as shown in /proc/net/unix.
AGENT = re.compile(r"@hvd_elastic/(?P<run>[^/\s]+)/")
# Temporary folder of an agent, with 12 digits of the SHA-256 of run and host.
SCRATCH = re.compile(r"hvd-[0-9a-f]{12}-.+")
# Names used by PyTorch's data loaders (with the process id), NCCL and Open MPI, which remove these
# files themselves when they end normally.
SHARED_MEMORY = re.compile(r"torch_(?P<pid>\d+)_.+|nccl-.+|vader_segment\..+|sm_segment\..+")
# Lock files of PyTorch's extension builds, below the user's cache folder.
BUILD_LOCKS = ("torch_extensions/*/*/lock", "torch_extensions/*/lock")
# Socket of PyTorch's shared memory manager, in the temporary folder.
MANAGER_SOCKET = "torch-shm-dir-*/manager.sock"
# File systems on which a lock cannot be held by another machine.
LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay")
# The kind of what agents lock.
FOLDER = "temporary folder"
HOLDERS = "--query-compute-apps=gpu_bus_id,pid,used_memory"


def live_runs() -> set[str]:
    """Return the runs, of any user, that have a living agent on this host."""
    try:
        text = Path("/proc/net/unix").read_text(errors="replace")
    except OSError:
        return set()
    return {found["run"] for found in AGENT.finditer(text)}


def own(path: Path) -> bool:
    """Return whether a path belongs to this user and is not a symbolic link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)


def is_open(path: Path) -> bool:
    """Return whether any process, in any container, has the file open or mapped."""
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
    """Return whether a process of this user has it as TMPDIR or has something open in it."""
    name = str(folder)
    for pid in all_processes():
        if environment(pid).get("TMPDIR") == name:
            return True
        links = [Path(f"/proc/{pid}/cwd")]
        with contextlib.suppress(OSError):
            links += Path(f"/proc/{pid}/fd").iterdir()
        for link in links:
            with contextlib.suppress(OSError):
                target = os.readlink(str(link))  # noqa: PTH115  # Path.readlink needs Python 3.9
                if f"{target}/".startswith(f"{name}/"):
                    return True
    return False


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Lock an agent's temporary folder; yield whether no agent of any container has it locked."""
    try:
        descriptor = os.open(str(folder), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # removed meanwhile, or of another user
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def is_local(path: Path) -> bool:
    """Return whether a path is on a file system of this machine that no other machine can use."""
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
        _, where, name = line.split()[:3]
        if len(where) >= len(best) and (str(path) + "/").startswith(where.rstrip("/") + "/"):
            best, kind = where, name
    return kind in LOCAL_FILE_SYSTEMS


def listens(path: Path) -> bool:
    """Return whether a process accepts connections on a unix socket."""
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
    """Return the size of a file, or of all files in a folder [bytes]."""
    files = [path]
    if path.is_dir() and not path.is_symlink():
        files = [Path(folder, name) for folder, _, names in os.walk(str(path)) for name in names]
    total = 0
    for file in files:
        with contextlib.suppress(OSError):  # removed meanwhile
            total += file.lstat().st_size
    return total


def found_in(folder: Path, pattern: str) -> list[Path]:
    """Return the paths below a folder that match; [] if this user cannot look into it."""
    with contextlib.suppress(OSError):
        return list(folder.glob(pattern))
    return []


def scratch_prefix(run: str, host: str) -> str:
    """Return how the names of the temporary folders begin that agents of a run make on a host."""
    # A hash is short, since a socket's path may have at most 107 characters and names can be long.
    return f"hvd-{hashlib.sha256(f'{run}/{host}'.encode()).hexdigest()[:12]}-"


def scratch_folders(run: str | None, host: str, tmpdir: str = "") -> list[Path]:
    """Return the temporary folders of our agents that no process seen from here uses."""
    alive = live_runs()
    prefix = "hvd-" if run is None else scratch_prefix(run, host)
    # A folder's name has only a hash of its run, so any living agent could be its owner.
    if alive if run is None else run in alive:
        return []
    places = {Path(place) for place in (tempfile.gettempdir(), tmpdir) if place}
    return [
        each
        for place in sorted(places)
        for each in found_in(place, f"{prefix}*")
        if SCRATCH.fullmatch(each.name) and own(each) and not is_in_use(each)
    ]


def shared_memory() -> list[Path]:
    """Return shared memory files of training programs that no process has open."""
    folder = Path("/dev/shm")  # noqa: S108  # the folder of POSIX shared memory
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        named = SHARED_MEMORY.fullmatch(path.name)
        if named and own(path) and not is_open(path):
            if not (named["pid"] and Path("/proc", named["pid"]).exists()):
                found.append(path)
    return found


def find(run: str | None, host: str, tmpdir: str = "") -> list[tuple[Path, str]]:
    """Return the unused files and folders with their kind; a folder may be locked."""
    cache, temporary = Path("~/.cache").expanduser(), Path(tempfile.gettempdir())
    folders = scratch_folders(run, host, tmpdir)
    locks = [path for pattern in BUILD_LOCKS for path in found_in(cache, pattern) if own(path)]
    sockets = [
        path for path in found_in(temporary, MANAGER_SOCKET) if own(path) and own(path.parent)
    ]
    return [
        *((path, FOLDER) for path in folders),
        *((path, "shared memory") for path in shared_memory()),
        *((path, "lock") for path in locks if is_local(path) and not is_open(path)),
        *((path.parent, "socket") for path in sockets if not listens(path)),
    ]


def remove(path: Path) -> str:
    """Remove a file or folder, which others may remove too; return why that failed, or ""."""
    while os.path.lexists(str(path)):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(str(path))
            else:
                path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            why = error.strerror or str(error)
            return why if error.filename in (None, str(path)) else f"{error.filename}: {why}"
    return ""


def clear(
    run: str | None, host: str, tmpdir: str = "", *, dry_run: bool
) -> list[dict[str, object]]:
    """Remove what :func:`find` returns, unless it is a dry run; return what that is."""
    removed = []
    for path, kind in find(run, host, tmpdir):
        # Locked until it is gone: an agent that has just made its folder makes another one then.
        with alone_in(path) if kind == FOLDER else contextlib.nullcontext(True) as is_unused:
            if is_unused:
                size = size_of(path)
                problem = "" if dry_run else remove(path)
                removed.append({"path": str(path), "kind": kind, "bytes": size, "problem": problem})
    return removed


def held_gpus() -> list[str]:
    """Return a line of text for each process that holds GPU memory."""
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
    """Return the command and user id of a process, as far as it is visible from here."""
    with contextlib.suppress(OSError):
        name = read(pid, "comm").decode("utf-8", "replace").strip()
        return f"({name} of user {Path(f'/proc/{pid}').stat().st_uid}) "
    return "(not seen from here) "


def main() -> None:
    """Read the request, remove what it asks for, and write the answer."""
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    removed = clear(request["run"], request["host"], request["tmpdir"], dry_run=request["dry_run"])
    sys.stdout.write(json.dumps({"removed": removed, "gpus": held_gpus()}))
