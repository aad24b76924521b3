"""Look at, prepare, replace and remove the Python environment of this package on a host.

Input (JSON on stdin): {"do": a function of ``ACTIONS``, …: its arguments}. Output: what it returns.

An environment is copied to a folder beside its place (``new_name``), and gets its name when it is
complete and checked. Hosts may share the folder: one of them renames it, under a name of its own.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hvd_elastic.programs.clear_left import is_in_use, own, size_of
from hvd_elastic.programs.clear_left import remove as remove_path
from hvd_elastic.programs.processes import all_processes, environment, own_ancestors, read

NEW, OLD = ".hvd_elastic-new", ".hvd_elastic-old"
# File in an environment that was installed by a copy; its content names the copy.
STAMP = ".hvd_elastic-installed"
PYTHON_S = 20.0
# How long another host that shares the folder may take to rename the environment.
WAIT_S = 120.0
PAUSE_S = 0.1
MOST_NAMED = 3
# What this package makes in HVD_ELASTIC_HOME, a folder that may hold the user's own files too.
OF_HOME = (
    *("runs", "spool", "clusters", "keepers", "searches", "virtual", "ray", "clouds"),
    *("cloud_owner", "hostfiles", "known_hosts"),
)


def new_name(prefix: str) -> str:
    """Return the path at which the environment is complete before it gets its name."""
    return prefix + NEW


def identity(prefix: str) -> list[int]:
    """Return numbers that a copy of the environment does not have; [] if there is none."""
    try:
        found = os.lstat(os.path.join(prefix, "bin", "python"))  # noqa: PTH118
    except OSError:
        return []
    return [found.st_ino, found.st_ctime_ns]


def describe_environment(prefix: str, base: str | None, own_identity: list[int]) -> dict[str, Any]:
    """Return what decides whether the environment can be brought here.

    Args:
        prefix: folder of the environment.
        base: the Python that it was made by; None if the environment has it itself.
        own_identity: :func:`identity` of the environment that is copied.
    """
    folder, exists = Path(prefix), os.path.lexists(prefix)
    return {
        "machine": platform.machine(),
        "libc": libc(),
        "base": None if base is None else version_of_python(base),
        "exists": exists,
        "shared": identity(prefix) == own_identity,
        "kept": f"{prefix} is another user's, or a link" if exists and not own(folder) else "",
        "in_use": in_use(prefix),
    }


def libc() -> str:
    """Return name and version of the C library, such as "glibc 2.36"; "" if it does not tell."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


def version_of_python(python: str) -> str:
    """Return the version of an interpreter; "" if it does not run."""
    command = [python, "-c", "import platform; print(platform.python_version())"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        output = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=PYTHON_S)
        return output.decode().strip()
    return ""


def users_of(prefix: str) -> list[str]:
    """Return the runs whose processes use the environment, or else the processes.

    A process in a container or chroot counts if it sees this folder at that path.
    """
    try:
        here = Path(prefix).stat()
    except OSError:
        return []
    found = set()
    ours = own_ancestors()
    inside = os.fsencode(os.path.join(prefix, ""))  # noqa: PTH118
    for pid in all_processes():
        if pid in ours or not (
            read(pid, "cmdline").startswith(inside) or b" " + inside in read(pid, "maps")
        ):
            continue
        try:
            seen = Path(f"/proc/{pid}/root{prefix}").stat()
        except PermissionError:  # another user's
            seen = here
        except OSError:
            continue
        if os.path.samestat(seen, here):
            run = environment(pid).get("HVD_ELASTIC_RUN_ID")
            found.add(f"run {run}" if run else f"process {pid}")
    runs = {each for each in found if each.startswith("run ")}
    return sorted(runs or found)


def in_use(prefix: str) -> str:
    """Return an error if processes use the environment, else ""."""
    users = users_of(prefix)
    if not users:
        return ""
    more = f" and {len(users) - MOST_NAMED} more" if len(users) > MOST_NAMED else ""
    return f"{prefix} is in use there by {', '.join(users[:MOST_NAMED])}{more}"


def seed(prefix: str) -> None:
    """Begin the new environment with the files of the present one, as hard links.

    A copy does not write into files, it replaces them. Where links cannot be made, all is copied.
    What a killed switch has left is taken up again.
    """
    new = new_name(prefix)
    for claimed in claims(prefix):
        if not os.path.isdir(new):  # noqa: PTH112
            with contextlib.suppress(OSError):
                claimed.rename(new)
    if os.path.isdir(prefix) and not os.path.isdir(new):  # noqa: PTH112
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(prefix, new, symlinks=True, copy_function=os.link)


def claims(prefix: str) -> list[Path]:
    """Return new environments that a host is renaming, or was when it was killed."""
    return sorted(map(Path, glob.glob(glob.escape(new_name(prefix)) + "-*")))  # noqa: PTH207


def switch(prefix: str, stamp: str) -> str:
    """Give the new environment its name, and remove the old one; return why not, or ""."""
    new, old = Path(new_name(prefix)), Path(prefix + OLD)
    if not new.is_dir():
        return wait_for_stamp(prefix, stamp)
    why = in_use(prefix)
    if why:
        return why
    claimed = Path(f"{new}-{secrets.token_hex(4)}")
    # Of hosts that have the same folder, the rename succeeds on one.
    with contextlib.suppress(FileNotFoundError):
        new.rename(claimed)
    if not claimed.is_dir():
        return wait_for_stamp(prefix, stamp)
    try:
        with contextlib.suppress(FileNotFoundError):
            (claimed / STAMP).unlink()  # a hard link to that of the old one
        (claimed / STAMP).write_text(stamp)
        if os.path.isdir(prefix):  # noqa: PTH112
            shutil.rmtree(str(old), ignore_errors=True)
            os.rename(prefix, str(old))  # noqa: PTH104
        try:
            claimed.rename(prefix)
        except OSError:
            if old.is_dir():
                old.rename(prefix)
            raise
    except OSError:
        with contextlib.suppress(OSError):
            claimed.rename(new)
        raise
    shutil.rmtree(str(old), ignore_errors=True)
    return ""


def wait_for_stamp(prefix: str, stamp: str) -> str:
    """Wait until another host has given this copy its name; return why it has not, or ""."""
    deadline = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(OSError):
            if Path(prefix, STAMP).read_text() == stamp:
                return ""
        if time.monotonic() > deadline:
            return f"{new_name(prefix)} is gone; call again"
        time.sleep(PAUSE_S)


def left(prefix: str, home: str = "") -> list[dict[str, Any]]:
    """Return what this package has on this host: name, path, size, and why it must stay, or "".

    An environment that was made on this host is not named "environment". Of the folder of runs
    only what this package has made counts; "others" names what else is there, and stays.

    Args:
        prefix: folder of the environment; "" if there is none.
        home: the leader's HVD_ELASTIC_HOME, which holds for its hosts as well; "" if not set.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "hvd_elastic")
    runs = Path.home() / (home or os.environ.get("HVD_ELASTIC_HOME") or ".hvd_elastic")
    places = []
    if prefix:
        paths = [Path(prefix), Path(new_name(prefix)), *claims(prefix), Path(prefix + OLD)]
        places = [("environment", path) for path in paths]
    places += [("cache", cache), ("runs", runs)]
    found = []
    for name, path in places:
        if not path.is_dir():
            continue
        parts = [path / part for part in OF_HOME] if name == "runs" else [path]
        why = ""
        if name == "environment" and str(path) == prefix and not (path / STAMP).exists():
            name, why = "own environment", "`hvd-elastic install` has not brought it"
        elif not own(path):
            if not os.path.lexists(str(path)):  # another host of this disk has just removed it
                continue
            why = "it is another user's, or a link"
        elif name == "environment":
            why = in_use(str(path))
        elif any(
            # What a process has open has a real path; its TMPDIR may lead through a link.
            is_in_use(each)
            for part in parts
            if part.exists()
            for each in {part, part.resolve()}
        ):
            why = "a process has it in use"
        sizes = map(size_of, parts)
        others = others_in(path) if name == "runs" else ""
        found.append(
            {"name": name, "path": str(path), "bytes": sum(sizes), "stays": why, "others": others}
        )
    return found


def others_in(home: Path) -> str:
    """Name what a folder of runs holds that this package has not made; "" if nothing."""
    with contextlib.suppress(OSError):
        found = {each.name for each in home.iterdir()}.difference(OF_HOME)
        links = (str(home / part) for part in OF_HOME if (home / part).is_symlink())
        found.update(os.readlink(link) for link in links)  # noqa: PTH115  # Python 3.6 has no other
        names = sorted(found)
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return f"{', '.join(names[:MOST_NAMED])}{more}"
    return ""


def remove_from_home(home: Path) -> str:
    """Remove what this package has made in a folder of runs; return why that failed, or ""."""
    for part in OF_HOME:
        why = remove_path(home / part)
        if why:
            return f"{part}: {why}"
    with contextlib.suppress(OSError):  # there is something else in it, which stays
        home.rmdir()
    return ""


def remove(prefix: str, names: list[str], home: str = "") -> list[dict[str, Any]]:
    """Remove what :func:`left` lists under these names; return the list, with what failed."""
    found = left(prefix, home)
    for each in found:
        each["removed"] = False
        if each["name"] in names and not each["stays"]:
            take = remove_from_home if each["name"] == "runs" else remove_path
            each["stays"] = take(Path(each["path"]))
            each["removed"] = not each["stays"]
    return found


ACTIONS = {
    "look": describe_environment,
    "seed": seed,
    "switch": switch,
    "remove": remove,
}


def main() -> None:
    """Read the request, carry it out and write the answer."""
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    action: Any = ACTIONS[request.pop("do")]
    try:
        answer = {"value": action(**request)}
    except OSError as error:
        answer = {"error": f"{error.filename}: {error.strerror}"}
    sys.stdout.write(json.dumps(answer))
