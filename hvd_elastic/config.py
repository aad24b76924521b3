"""Locate the folders in which the package keeps its files, and keep other users out of them."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path


def home() -> Path:
    """Return the package's folder of this user: ``$HVD_ELASTIC_HOME``, else ``~/.hvd_elastic``."""
    configured = os.environ.get("HVD_ELASTIC_HOME")
    return Path(configured) if configured else Path.home() / ".hvd_elastic"


def runs_folder() -> Path:
    """Return the folder that holds one folder for each run."""
    return home() / "runs"


def make_private(folder: Path) -> Path:
    """Create a folder, and those above it, for this user alone; return it with links resolved.

    A folder that exists stays as it is: see :func:`who_else_writes`.

    Raises:
        OSError: it cannot be created.
    """
    folder = Path(os.path.realpath(folder))
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)
    return folder


def who_else_writes(folder: Path) -> str:
    """Return, in words, who else than this user and root could put files into a folder, or its like
    in its place; "" if nobody can.

    The group of the user counts as the user. Of folders above the home folder its owner decides.
    """
    home_folder = Path(os.path.realpath(os.path.expanduser("~")))  # noqa: PTH111  # may have none
    for each in (folder, *folder.parents):
        found = each.stat()
        if found.st_uid != os.geteuid() and (each == folder or found.st_uid != 0):
            return f"{each} belongs to {_user_name(found.st_uid)}"
        is_sticky = each != folder and found.st_mode & stat.S_ISVTX
        if found.st_mode & stat.S_IWOTH and not is_sticky:
            return f"all users may write in {each}"
        if found.st_mode & stat.S_IWGRP and not is_sticky and found.st_gid != os.getegid():
            return f"users of group {found.st_gid} may write in {each}"
        if each == home_folder:
            break
    return ""


def _user_name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user id {uid}"
