"""Look at, prepare, replace and remove the Python environment of this package on a host.

Input (JSON on stdin): {"do": a function of ``ACTIONS``, …: its arguments}. Output: what it returns.

An environment is copied to a folder beside its place (``new_name``), and gets its name when it is
complete and checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hvd_elastic.programs.clear_left import is_in_use, own, size_of
from hvd_elastic.programs.clear_left import remove as remove_path
from hvd_elastic.programs.processes import all_processes, environment, own_ancestors, read

NEW, OLD = ".hvd_elastic-new", ".hvd_elastic-old"
# File in an environment that was installed by a copy; its content names the copy.
STAMP = ".hvd_elastic-installed"
PYTHON_S = 20.0
MOST_NAMED = 3


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
    """
    new = new_name(prefix)
    if os.path.isdir(prefix) and not os.path.isdir(new):  # noqa: PTH112
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(prefix, new, symlinks=True, copy_function=os.link)


def switch(prefix: str, stamp: str) -> str:
    """Give the new environment its name, and remove the old one; return why not, or ""."""
    new, old = Path(new_name(prefix)), Path(prefix + OLD)
    if not new.is_dir():
        # Another host that has the same folder was faster.
        with contextlib.suppress(OSError):
            if Path(prefix, STAMP).read_text() == stamp:
                return ""
        return f"{new} is gone; call again"
    why = in_use(prefix)
    if why:
        return why
    (new / STAMP).write_text(stamp)
    if os.path.isdir(prefix):  # noqa: PTH112
        shutil.rmtree(str(old), ignore_errors=True)
        os.rename(prefix, str(old))  # noqa: PTH104
    try:
        new.rename(prefix)
    except OSError:
        if old.is_dir():
            old.rename(prefix)
        raise
    shutil.rmtree(str(old), ignore_errors=True)
    return ""


def left(prefix: str, home: str = "") -> list[dict[str, Any]]:
    """Return what this package has on this host: name, path, size, and why it must stay, or "".

    An environment that was made on this host is not named "environment".

    Args:
        prefix: folder of the environment; "" if there is none.
        home: the leader's HVD_ELASTIC_HOME, which holds for its hosts as well; "" if not set.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "hvd_elastic")
    runs = Path.home() / (home or os.environ.get("HVD_ELASTIC_HOME") or ".hvd_elastic")
    places = [("environment", Path(prefix + end)) for end in ("", NEW, OLD) if prefix]
    places += [("cache", cache), ("runs", runs)]
    found = []
    for name, path in places:
        if not path.is_dir():
            continue
        why = ""
        if name == "environment" and str(path) == prefix and not (path / STAMP).exists():
            name, why = "own environment", "`hvd-elastic install` has not brought it"
        elif not own(path):
            why = "it is another user's, or a link"
        elif name == "environment":
            why = in_use(str(path))
        elif is_in_use(path):
            why = "a process has it in use"
        found.append({"name": name, "path": str(path), "bytes": size_of(path), "stays": why})
    return found


def remove(prefix: str, names: list[str], home: str = "") -> list[dict[str, Any]]:
    """Remove what :func:`left` lists under these names; return the list, with what failed."""
    found = left(prefix, home)
    for each in found:
        each["removed"] = False
        if each["name"] in names and not each["stays"]:
            each["stays"] = remove_path(Path(each["path"]))
            each["removed"] = not each["stays"]
    return found


ACTIONS = {
    "look": describe_environment,
    "seed": seed,
    "switch": switch,
    "left": left,
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
