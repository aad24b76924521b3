"""A tree of files: what is in it, and places in it that cannot be left through a link.

Names are bytes on every host, and travel as text with surrogates for what is not UTF-8.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import stat
from collections import OrderedDict
from typing import Any, NamedTuple

# Where files grow until they are complete: in the destination, so that a rename is enough.
PARTS = ".hvd_elastic-part"
# Where the user's own command puts what it fetches until it is complete.
FETCHED = ".hvd_elastic-pull"
OURS = (PARTS, FETCHED)
# In the place of a folder's mode or time: as it is.
ANY = -1
OPEN_FOLDERS = 200


class File(NamedTuple):
    """A file of the source: its path in the tree, "" when the source is a file."""

    path: str
    size: int
    mtime_ns: int
    mode: int


class Tree(NamedTuple):
    """What is copied; ``folders`` are (path, mode, mtime), parents first; ``links`` are
    (path, to, mtime).
    """

    is_folder: bool
    files: list[File]
    folders: list[tuple[str, int, int]]
    links: list[tuple[str, str, int]]


def encode(path: str) -> bytes:
    """A path as the kernel takes it."""
    return path.encode("utf-8", "surrogateescape")


def decode(path: bytes) -> str:
    """A path as text from which :func:`encode` makes the same bytes."""
    return path.decode("utf-8", "surrogateescape")


def shown(path: str) -> str:
    """A path for people."""
    return encode(path).decode("utf-8", "backslashreplace")


def is_excluded(path: str, patterns: list[str]) -> bool:
    """Whether a pattern fits the path, or the name of it or of a folder above it.

    A pattern with a / is held against the path from the top, one without against each name.
    """
    names = path.split("/")
    for pattern in patterns:
        plain = pattern.strip("/")
        if "/" in pattern.rstrip("/"):
            if any(
                fnmatch.fnmatchcase("/".join(names[:n]), plain) for n in range(1, len(names) + 1)
            ):
                return True
        elif any(fnmatch.fnmatchcase(name, plain) for name in names):
            return True
    return False


def walk(root: bytes, patterns: list[str]) -> tuple[Tree, list[str]]:
    """Everything below a folder, or the one file; and what can be neither of the three.

    Raises:
        OSError: something cannot be read.
    """
    status = os.stat(root)
    if not stat.S_ISDIR(status.st_mode):
        return Tree(False, [_file("", status)], [], []), []
    tree = Tree(True, [], [("", stat.S_IMODE(status.st_mode), status.st_mtime_ns)], [])
    skipped: list[str] = []
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(os.path.join(root, encode(folder))) as entries:  # bytes
            found = sorted(entries, key=lambda entry: entry.name)
        below = []
        for entry in found:
            name = decode(entry.name)
            path = f"{folder}/{name}" if folder else name
            if name in OURS or (patterns and is_excluded(path, patterns)):
                continue
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                tree.files.append(_file(path, status))
            elif stat.S_ISDIR(status.st_mode):
                tree.folders.append((path, stat.S_IMODE(status.st_mode), status.st_mtime_ns))
                below.append(path)
            elif stat.S_ISLNK(status.st_mode):
                tree.links.append((path, decode(os.readlink(entry.path)), status.st_mtime_ns))
            else:
                skipped.append(path)
        waiting += reversed(below)
    return tree, skipped


def _file(path: str, status: os.stat_result) -> File:
    return File(path, status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode))


def read_tree(value: Any) -> Tree:
    """A tree as it came from another host.

    Raises:
        ValueError: a path of it would lead out of the destination.
    """
    is_folder, files, folders, links = value
    tree = Tree(
        bool(is_folder),
        [File(*entry) for entry in files],
        [(path, mode, mtime_ns) for path, mode, mtime_ns in folders],
        [(path, to, mtime_ns) for path, to, mtime_ns in links],
    )
    if is_folder:
        for path in [file.path for file in tree.files] + [path for path, _, _ in tree.links]:
            check_inside(path)
        for path, _, _ in tree.folders:
            if path:
                check_inside(path)
    elif len(files) != 1 or folders or links or files[0][0]:
        raise ValueError("the source is neither a file nor a folder")
    return tree


def check_inside(path: str) -> None:
    """Nothing if the path stays below the place it begins at.

    Raises:
        ValueError: it does not.

    >>> check_inside("a/b")
    >>> check_inside("a/../../b")
    Traceback (most recent call last):
        ...
    ValueError: the path 'a/../../b' would leave the destination
    """
    names = path.split("/")
    if "\0" in path or any(name in ("", ".", "..") for name in names) or names[0] in OURS:
        raise ValueError(f"the path {shown(path)!r} would leave the destination")


class Folders:
    """Open folders below a destination, found without following a symbolic link on the way.

    Args:
        root: the destination itself; links that lead to it are the user's own wish.
    """

    def __init__(self, root: bytes) -> None:
        self.root = root
        self._open: OrderedDict[str, int] = OrderedDict()

    def of(self, path: str) -> tuple[int, bytes]:
        """The folder that an entry lies in, as a descriptor to use at once, and its name there.

        Raises:
            OSError: there is no such folder (a link to one is none).
        """
        folder, _, name = path.rpartition("/")
        return self.folder(folder), encode(name)

    def folder(self, path: str) -> int:
        """A folder's descriptor, good until the next call."""
        known = self._open.get(path)
        if known is not None:
            self._open.move_to_end(path)
            return known
        if path == "":
            number = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        else:
            parent, name = self.of(path)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            number = os.open(name, flags, dir_fd=parent)
        self._open[path] = number
        if len(self._open) > OPEN_FOLDERS:
            os.close(self._open.popitem(last=False)[1])
        return number

    def status(self, path: str) -> os.stat_result | None:
        """What an entry is, links not followed; None when there is none."""
        try:
            parent, name = self.of(path)
            return os.stat(name, dir_fd=parent, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link in the place of a folder
                return None
            raise

    def open_file(self, path: str) -> int:
        """A file's descriptor for reading; a link in its place is refused."""
        parent, name = self.of(path)
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=parent)

    def remove(self, path: str) -> int:
        """Removes an entry with all that is below it; returns how many entries that were."""
        self.forget(path)
        parent, name = self.of(path)
        return remove_entry(parent, name)

    def forget(self, path: str) -> None:
        """Closes a folder and those below it, which are about to be something else."""
        for known in [each for each in self._open if each == path or each.startswith(path + "/")]:
            os.close(self._open.pop(known))

    def shown(self, path: str = "") -> str:
        """The full path of an entry, for people."""
        return shown(os.fsdecode(self.root) + (f"/{path}" if path else ""))

    def says(self, error: OSError) -> str:
        """An error, with the path that it is about."""
        text = "" if error.filename is None else shown(os.fsdecode(error.filename))
        return f"{text if text.startswith('/') else self.shown(text)}: {error.strerror}"

    def close(self) -> None:
        """Closes all of them."""
        while self._open:
            os.close(self._open.popitem()[1])


def remove_entry(parent: int, name: bytes) -> int:
    """Removes a file, link or folder with all that is below it; returns how many entries."""
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=parent)
        return 1
    number = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        with contextlib.suppress(OSError):
            os.fchmod(number, 0o700)
        removed = sum(remove_entry(number, encode(each)) for each in list_names(number))
    finally:
        os.close(number)
    os.rmdir(name, dir_fd=parent)
    return removed + 1


def list_names(folder: int) -> list[str]:
    """The names in an open folder."""
    return [decode(os.fsencode(name)) for name in os.listdir(folder)]  # a descriptor
