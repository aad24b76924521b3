"""Accounts of a virtual cluster: users of this machine, each with a key of its own for the hosts.

They are found by their comment in /etc/passwd, which names the cluster's folder, so that they can
be removed whatever became of the cluster. All have the cluster's name as a further group.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_elastic.errors import UsageError, VirtualClusterError
from hvd_elastic.programs.processes import Process, all_processes
from hvd_elastic.virtual.processes import find_tool, kill_all, plain_environment, run_tool

KEY = ".ssh/id_ed25519"
"""Path of the key in the home folder of an account."""
_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_SHELL = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"


def check_names(users: Sequence[str], group: str) -> None:
    """Check that accounts of these names, and their common group, can be made.

    Raises:
        UsageError: a name is not valid.
        VirtualClusterError: a user or group of that name exists.
    """
    for user in users:
        if not _NAME.fullmatch(user) or users.count(user) > 1:
            raise UsageError(
                f"--users: {user!r} is not valid; write different names such as ada,grace, each of "
                "at most 31 lower-case letters, digits, _ and -, with a letter first"
            )
    if not _NAME.fullmatch(group):
        raise UsageError(
            f"--name {group!r} would be the group of the accounts, and is not valid as one; choose "
            "one of lower-case letters, digits, _ and -"
        )
    for name in (*users, group):
        for kind, look in (("user", pwd.getpwnam), ("group", grp.getgrnam)):
            with contextlib.suppress(KeyError):
                look(name)
                raise VirtualClusterError(
                    f"this machine has a {kind} {name} already, and virtclust makes accounts of "
                    "its own, which it removes at the end; choose another name"
                )


def make(folder: Path, users: Sequence[str]) -> None:
    """Make accounts, each with a home folder and a key.

    Args:
        folder: folder of the cluster.
    """
    for user in users:
        run_tool(
            [
                *("useradd", "--create-home", "--user-group", "--shell", _SHELL),
                *("--password", "*", "--comment", _mark(folder), user),  # for logins by key alone
            ]
        )
        Path(pwd.getpwnam(user).pw_dir).chmod(0o700)
        _run_as(
            user, f"umask 077; mkdir -p .ssh; {find_tool('ssh-keygen')} -qt ed25519 -N '' -f {KEY}"
        )
    run_tool(["groupadd", folder.name])
    run_tool(["gpasswd", "--members", ",".join(users), folder.name])


def public_key(user: str) -> str:
    """Return the public key of an account, as a line of authorized_keys."""
    return _run_as(user, f"cat {KEY}.pub")


def write_files(user: str, files: Mapping[str, str]) -> None:
    """Write files into the home folder of an account, as that user: it may have links there.

    Args:
        files: text of each, by its path in the home folder.
    """
    for path, text in files.items():
        _run_as(user, f"umask 077; cat > {path}.new && mv {path}.new {path}", text)


def as_user(user: str) -> dict[str, Any]:
    """Return arguments of ``subprocess`` functions that run a program as an account."""
    entry = pwd.getpwnam(user)
    names = {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user, "SHELL": entry.pw_shell}
    return {
        "user": entry.pw_uid,
        "group": entry.pw_gid,
        "extra_groups": os.getgrouplist(user, entry.pw_gid),
        "cwd": entry.pw_dir,
        "env": plain_environment(names),
    }


def remove(folder: Path) -> None:
    """End all processes of a cluster's accounts on this machine, and remove the accounts."""
    found = [entry for entry in pwd.getpwall() if entry.pw_gecos == _mark(folder)]
    if not found:
        return
    with contextlib.suppress(KeyError):
        members = set(grp.getgrnam(folder.name).gr_mem)
        if members <= {entry.pw_name for entry in found}:
            run_tool(["groupdel", folder.name])
    kill_all(lambda: _processes_of({entry.pw_uid for entry in found}), f"accounts of {folder.name}")
    for entry in found:
        run_tool(["userdel", "--remove", "--force", entry.pw_name])


def _mark(folder: Path) -> str:
    return f"virtclust {folder}".replace(":", "_")  # which separates the fields of /etc/passwd


def _processes_of(uids: set[int]) -> list[Process]:
    found = []
    for pid, process in all_processes().items():
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}").stat().st_uid in uids:
                found.append(process)
    return found


def _run_as(user: str, line: str, text_in: str = "") -> str:
    done = subprocess.run(
        ["/bin/sh", "-c", line], input=text_in, capture_output=True, text=True, **as_user(user)
    )
    if done.returncode != 0:
        raise VirtualClusterError(f"user {user} cannot do '{line}': {done.stderr.strip()}")
    return done.stdout
