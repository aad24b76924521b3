"""Files and folders of this user that no other user may read or change.

Their modes do not depend on the umask of whoever starts a program. A folder that another user has
made in our place, and a file of configuration that others can write, are refused.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import stat
import tempfile
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

    A group that has this user alone counts as the user. Of folders above the home folder its owner
    decides.
    """
    home_folder = Path(os.path.realpath(os.path.expanduser("~")))  # noqa: PTH111  # may have none
    for each in (folder, *folder.parents):
        link = each.lstat().st_uid
        if link not in (os.geteuid(), _ROOT):
            return f"{each} belongs to {user_words(link)}"
        found = each.stat()
        if found.st_uid != os.geteuid() and (each == folder or found.st_uid != 0):
            return f"{each} belongs to {user_words(found.st_uid)}"
        is_sticky = each != folder and found.st_mode & stat.S_ISVTX
        whose = f"{each}, which belongs to {user_words(found.st_uid)}; its owner ends that with"
        if found.st_mode & stat.S_IWOTH and not is_sticky:
            return f"all users may write in {whose}: chmod o-w {shlex.quote(str(each))}"
        if found.st_mode & stat.S_IWGRP and not is_sticky and not _is_own_group(found.st_gid):
            told = f"users of group {found.st_gid} may write in {whose}"
            return f"{told}: chmod g-w {shlex.quote(str(each))}"
        if each == home_folder:
            break
    return ""


def private_folder(path: Path) -> Path:
    """Return a folder that only this user can enter; it and missing parents are made.

    An existing folder of this user that others can enter is closed to them.

    Raises:
        StrangerError: it, or a link in its place, belongs to another user, or others can write it.
        OSError: it cannot be made.
    """
    make_private(path)
    check_owner(path)
    found = path.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & ~_PRIVATE:
        path.chmod(_PRIVATE)
    _check_mode(path, path.stat())
    return path


def check_owner(path: Path) -> None:
    """Check that a file or folder, or a link in its place, is this user's own or root's.

    Raises:
        StrangerError: it belongs to another user.
        OSError: there is no such file.
    """
    for found in (path.lstat(), path.stat()):
        _check_owner(path, found)


def check_configuration(path: Path, *, may_group: bool = False) -> None:
    """Check that other users cannot write a file of configuration, or the folder given.

    Args:
        path: the file or folder. What is neither, such as a pipe, is not checked.
        may_group: whether its group may.

    Raises:
        StrangerError: they can.
        OSError: there is no such file.
    """
    found = path.stat()
    if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
        _check_mode(path, found, may_group=may_group)


def _check_mode(path: Path, found: os.stat_result, *, may_group: bool = False) -> None:
    mode = stat.S_IMODE(found.st_mode)
    is_shared = mode & stat.S_IWGRP and not may_group and not _is_own_group(found.st_gid)
    is_sticky = stat.S_ISDIR(found.st_mode) and mode & stat.S_ISVTX
    if (mode & stat.S_IWOTH or is_shared) and not is_sticky:
        whose = f"group {found.st_gid}" if is_shared else "all users"
        raise StrangerError(
            f"{path} can be written by {whose} (mode {mode:03o}), and decides where and what this "
            f"user runs. Its owner ends that with: chmod go-w {path}   If its file system keeps no "
            "modes, as some mounts of another system's disk, put it elsewhere (HVD_ELASTIC_HOME "
            "names the folder of runs)"
        )


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), _ROOT) and found.st_uid != _owner_of_new_file(path):
        raise StrangerError(
            f"{path} belongs to {user_words(found.st_uid)} and not to "
            f"{user_words(os.geteuid())}. Use another place, such as by HVD_ELASTIC_HOME, or "
            f"have it removed; if what it holds is yours: chown -R {os.geteuid()} {path}"
        )


def _owner_of_new_file(path: Path) -> int | None:
    """Return the user id of a file that this user makes; servers of files may give root another."""
    folder = path if path.is_dir() else path.parent
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid
    return None


def _is_own_group(gid: int) -> bool:
    """Return whether a group has this user alone, as most systems make one for each user."""
    import grp

    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
        return user.pw_gid == gid and group.gr_name == user.pw_name and not group.gr_mem
    return False


@contextlib.contextmanager
def socket_in(folder: Path, name: str, *, of_anybody: bool = False) -> Iterator[str]:
    """Yield an address of a unix socket in a private folder that is short enough for the kernel.

    A unix socket's address has at most 107 bytes, and folders may have longer paths.

    Args:
        of_anybody: whether the folder may be another user's, whom the caller trusts.

    Raises:
        StrangerError: the folder belongs to another user, or others can write it.
        OSError: there is no such folder.
    """
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(number)
        if not of_anybody:
            _check_owner(folder, found)
        _check_mode(folder, found)
        yield f"/proc/self/fd/{number}/{name}"
    finally:
        os.close(number)
