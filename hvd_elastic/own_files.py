"""Files and folders of this user that no other user may read or change.

Their modes do not depend on the umask of whoever starts a program. A folder that another user has
made in our place, and a file of configuration that others can write, are refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from hvd_elastic.errors import StrangerError

_PRIVATE = 0o700
_ROOT = 0


def user_words(uid: int) -> str:
    """Return words for a user id, with the name if it has one.

    >>> user_words(0)
    'user root (uid 0)'
    """
    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"a user without a name (uid {uid})"


def private_folder(path: Path) -> Path:
    """Return a folder that only this user can enter; it and missing parents are made.

    An existing folder of this user that others can enter is closed to them.

    Raises:
        StrangerError: it, or a link in its place, belongs to another user, or others can write it.
        OSError: it cannot be made.
    """
    missing = [path]
    while not missing[-1].exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing[:-1]):
        folder.mkdir(mode=_PRIVATE, exist_ok=True)
    for found in (path.lstat(), path.stat()):
        _check_owner(path, found, "folder")
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & ~_PRIVATE:
        path.chmod(_PRIVATE)
    check_unwritable(path, path.stat(), "folder")
    return path


def check_unwritable(path: Path, found: os.stat_result, what: str) -> None:
    """Check that no other user can change a file or folder, except for root.

    Args:
        path: its path, for the message.
        found: its status.
        what: what it is, for the message.

    Raises:
        StrangerError: it belongs to another user, or others can write it.
    """
    _check_owner(path, found, what)
    shared = stat.S_IWOTH | (0 if _is_own_group(found.st_gid) else stat.S_IWGRP)
    if found.st_mode & shared:
        raise StrangerError(
            f"the {what} {path} can be written by others (mode {stat.S_IMODE(found.st_mode):03o}), "
            f"who could make this user run what they choose. Take that away: chmod go-w {path}"
        )


def _check_owner(path: Path, found: os.stat_result, what: str) -> None:
    if found.st_uid not in (os.geteuid(), _ROOT):
        raise StrangerError(
            f"the {what} {path} belongs to {user_words(found.st_uid)} and not to "
            f"{user_words(os.geteuid())}. Use another place, such as by HVD_ELASTIC_HOME, or "
            "have it removed"
        )


def _is_own_group(gid: int) -> bool:
    """Return whether a group has this user alone, as most systems make one for each user."""
    import grp

    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
        return user.pw_gid == gid and group.gr_name == user.pw_name and not group.gr_mem
    return False


@contextlib.contextmanager
def socket_in(folder: Path, name: str) -> Iterator[str]:
    """Yield an address of a unix socket in a private folder that is short enough for the kernel.

    A unix socket's address has at most 107 bytes, and folders may have longer paths.

    Raises:
        StrangerError: the folder belongs to another user, or others can write it.
        OSError: there is no such folder.
    """
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        check_unwritable(folder, os.fstat(number), "folder")
        yield f"/proc/self/fd/{number}/{name}"
    finally:
        os.close(number)
