"""A tree of files, and access to its folders that no symbolic link can lead outside.

Names are bytes on every host; they are sent as text with surrogates for what is not UTF-8.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fnmatch
import os
import pwd
import stat
from collections import OrderedDict
from typing import Any, NamedTuple

# Folder of partial files; inside the destination, so that they can be renamed into place.
PARTS = ".hvd_elastic-part"
# Folder into which the user's own command fetches files.
FETCHED = ".hvd_elastic-pull"
# Never copied or removed.
OURS = (PARTS, FETCHED)
# Begins a pattern of what is taken, whatever other patterns match.
TAKES = "+ "
# As a folder's mode or time: leave it unchanged.
ANY = -1
# Maximum number of descriptors kept open, well below the usual limit of 1024.
OPEN_FOLDERS = 200


class File(NamedTuple):
    """A file of the source; its path is relative to the tree, "" if the source is a single file."""

    path: str
    size: int
    mtime_ns: int
    mode: int


class Tree(NamedTuple):
    """Contents of the source.

    Attributes:
        is_folder: whether the source is a folder; otherwise it is the single file.
        folders: (path, mode, mtime in ns) of each folder, parents first.
        links: (path, target, mtime in ns) of each symbolic link.
        same: (path, path of a file) of each further name of a file (hard link); empty unless asked
            for.
        stored: (index, bytes that are no holes) of each file with holes; the same.
        attributes: (path, name → value in base64) of each file and folder; the same.
    """

    is_folder: bool
    files: list[File]
    folders: list[tuple[str, int, int]]
    links: list[tuple[str, str, int]]
    same: list[tuple[str, str]]
    stored: list[tuple[int, int]]
    attributes: list[tuple[str, dict[str, str]]]

    @property
    def paths(self) -> list[str]:
        """Paths of all files, further names and symbolic links."""
        found = [file.path for file in self.files]
        return found + [path for path, _, _ in self.links] + [path for path, _ in self.same]


class Keeps(NamedTuple):
    """What of the source a copy is to keep beside contents, modes and times.

    Attributes:
        hard_links: that a file has several names.
        sparse: that zeros take no space.
        attributes: extended attributes: those of users, and all but those of the system for root.
    """

    hard_links: bool = False
    sparse: bool = False
    attributes: bool = False


PLAIN = Keeps()


def encode(path: str) -> bytes:
    """Return a path as the bytes that the kernel takes."""
    return path.encode("utf-8", "surrogateescape")


def decode(path: bytes) -> str:
    """Return a path as text from which :func:`encode` makes the same bytes."""
    return path.decode("utf-8", "surrogateescape")


def shown(path: str) -> str:
    """Return a path as printable text."""
    return encode(path).decode("utf-8", "backslashreplace")


def is_foreign(status: os.stat_result) -> bool:
    """Return whether a file belongs to another user, who can change it at any time; not to root."""
    return status.st_uid not in (0, os.geteuid())


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return inode and change time of a file, of which another one in its place shares not both.

    A new file may have the inode of one that was just removed.
    """
    return status.st_ino, status.st_ctime_ns


def copied_mode(status: os.stat_result) -> int:
    """Return the mode of a file's copy: the set-uid bit would give it the rights of the copier."""
    mode = stat.S_IMODE(status.st_mode)
    return mode if status.st_uid == os.geteuid() else mode & ~0o6000


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def make_folders(path: bytes) -> None:
    """Create a folder and those above it, into which others do not write.

    ``os.makedirs`` gives its mode only to the last one, and this process has the umask 0.
    """
    if not os.path.isdir(path):
        make_folders(os.path.dirname(path))
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            if not os.path.isdir(path):  # otherwise another host was faster
                raise


def is_excluded(path: str, patterns: list[str]) -> bool:
    """Return whether a pattern matches the path, its name, or a folder above it.

    A pattern with a / must match the path from the top, one without may match any name in it. One
    that begins with :data:`TAKES` says what is not left out, whatever others match.
    """
    if _matches(path, [each for each in patterns if not each.startswith(TAKES)]):
        return not _matches(path, [each[len(TAKES) :] for each in patterns if takes(each)])
    return False


def takes(pattern: str) -> bool:
    """Return whether a pattern says what is not left out."""
    return pattern.startswith(TAKES)


def _matches(path: str, patterns: list[str]) -> bool:
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


def walk(root: bytes, patterns: list[str], keeps: Keeps = PLAIN) -> tuple[Tree, list[str]]:
    """Return the tree below a folder (or of one file) and the paths of no supported kind.

    Raises:
        OSError: something cannot be read.
    """
    status = os.stat(root)
    if not stat.S_ISDIR(status.st_mode):
        tree = Tree(False, [], [], [], [], [], [])
        _add_file(tree, "", root, status, keeps, {})
        _add_attributes(tree, root, keeps)
        return tree, []
    above = ("", stat.S_IMODE(status.st_mode), status.st_mtime_ns)
    tree = Tree(True, [], [above], [], [], [], [])
    names: dict[tuple[int, int], str] = {}
    skipped: list[str] = []
    looks_into_all = any(map(takes, patterns))
    left_out: dict[str, tuple[str, int, int]] = {}
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(os.path.join(root, encode(folder))) as entries:  # bytes
            found = sorted(entries, key=lambda entry: entry.name)
        below = []
        for entry in found:
            name = decode(entry.name)
            path = f"{folder}/{name}" if folder else name
            if name in OURS:
                continue
            if patterns and is_excluded(path, patterns):
                if looks_into_all and entry.is_dir(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    left_out[path] = path, stat.S_IMODE(status.st_mode), status.st_mtime_ns
                    below.append(path)
                continue
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                _add_file(tree, path, entry.path, status, keeps, names)
            elif stat.S_ISDIR(status.st_mode):
                tree.folders.append((path, stat.S_IMODE(status.st_mode), status.st_mtime_ns))
                below.append(path)
            elif stat.S_ISLNK(status.st_mode):
                tree.links.append((path, decode(os.readlink(entry.path)), status.st_mtime_ns))
            else:
                skipped.append(path)
        waiting += reversed(below)
    if left_out:
        for path in tree.paths + [path for path, _, _ in tree.folders]:
            parts = path.split("/")
            for depth in range(1, len(parts)):
                folder = "/".join(parts[:depth])
                if folder in left_out:
                    tree.folders.append(left_out.pop(folder))
        tree.folders.sort()
    _add_attributes(tree, root, keeps)
    return tree, skipped


def _add_file(
    tree: Tree,
    path: str,
    full: bytes,
    status: os.stat_result,
    keeps: Keeps,
    names: dict[tuple[int, int], str],
) -> None:
    """Add a file; ``names``: the first path of each file with several names, which is extended."""
    if keeps.hard_links and status.st_nlink > 1:
        first = names.setdefault((status.st_dev, status.st_ino), path)
        if first != path:
            tree.same.append((path, first))
            return
    if keeps.sparse and status.st_blocks * 512 < status.st_size:
        stored = _data_bytes(full, status.st_size)
        if stored < status.st_size:  # else the file system compresses it
            tree.stored.append((len(tree.files), stored))
    tree.files.append(File(path, status.st_size, status.st_mtime_ns, copied_mode(status)))


def _data_bytes(full: bytes, size: int) -> int:
    """Return the number of bytes of a file that are no holes; all of them where that is unknown."""
    found = at = 0
    try:
        number = os.open(full, os.O_RDONLY)
    except OSError:  # it is reported when it is sent
        return size
    try:
        while at < size:
            begin = os.lseek(number, at, os.SEEK_DATA)
            at = os.lseek(number, begin, os.SEEK_HOLE)
            found += at - begin
    except OSError as error:
        return found if error.errno == errno.ENXIO else size  # nothing but a hole is left
    finally:
        os.close(number)
    return found


def _add_attributes(tree: Tree, root: bytes, keeps: Keeps) -> None:
    if not keeps.attributes:
        return
    for path in [file.path for file in tree.files] + [path for path, _, _ in tree.folders]:
        full = os.path.join(root, encode(path)) if path else root  # bytes
        try:
            number = os.open(full, os.O_RDONLY)
        except OSError:  # it is reported when it is sent
            continue
        try:
            found = attributes_of(number)
        finally:
            os.close(number)
        told = {name: base64.b64encode(value).decode() for name, value in found.items()}
        tree.attributes.append((path, told))


def attributes_of(number: int) -> dict[str, bytes]:
    """Return the extended attributes of an open file or folder that are copied; of none, {}.

    They are those of users; for root also all others but those of the system, such as ACLs.
    """
    try:
        names = os.listxattr(number)
    except (AttributeError, OSError):  # of another system, or of a file system without
        return {}
    kinds = ("user.", "trusted.", "security.") if os.geteuid() == 0 else ("user.",)
    return {name: os.getxattr(number, name) for name in names if name.startswith(kinds)}


def read_tree(value: Any) -> Tree:
    """Return the tree that another host sent.

    Raises:
        ValueError: a path in it would lead out of the destination.
    """
    is_folder, files, folders, links, same, stored, attributes = value
    tree = Tree(
        bool(is_folder),
        [File(*entry) for entry in files],
        [(path, mode, mtime_ns) for path, mode, mtime_ns in folders],
        [(path, to, mtime_ns) for path, to, mtime_ns in links],
        [(path, first) for path, first in same],
        [(index, size) for index, size in stored],
        [(path, dict(found)) for path, found in attributes],
    )
    if is_folder:
        for path in tree.paths + [first for _, first in tree.same]:
            check_inside(path)
        for path, _ in tree.attributes:
            if path:
                check_inside(path)
        for path, _, _ in tree.folders:
            if path:
                check_inside(path)
    elif len(files) != 1 or folders or links or same or files[0][0]:
        raise ValueError("the source is neither a file nor a folder")
    return tree


def check_inside(path: str) -> None:
    """Check that a relative path stays below the folder that it starts in.

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
    """Open folders below a destination, reached without following symbolic links.

    Args:
        root: path of the destination itself, in which symbolic links are allowed.
    """

    def __init__(self, root: bytes) -> None:
        self.root = root
        self._open: OrderedDict[str, int] = OrderedDict()

    def of(self, path: str) -> tuple[int, bytes]:
        """Return the descriptor of the folder of an entry, and the entry's name in it.

        The descriptor is valid until the next call.

        Raises:
            OSError: there is no such folder, or it is a symbolic link.
        """
        folder, _, name = path.rpartition("/")
        return self.folder(folder), encode(name)

    def folder(self, path: str) -> int:
        """Return a folder's descriptor, valid until the next call."""
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

    def others_write(self, path: str) -> bool:
        """Return whether other users can replace an entry, or a folder above it.

        What other users own in a folder where they cannot was put there by us, or by our command.
        """
        while path:
            path = path.rpartition("/")[0]
            status = os.fstat(self.folder(path))
            if status.st_mode & 0o022 or is_foreign(status):
                return True
        return False

    def status(self, path: str) -> os.stat_result | None:
        """Return an entry's status without following links; None if it does not exist."""
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
        """Open a file for reading; return its descriptor. A symbolic link is refused."""
        parent, name = self.of(path)
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=parent)

    def remove(self, path: str) -> int:
        """Remove an entry and everything below it; return the number of entries removed."""
        self.forget(path)
        parent, name = self.of(path)
        return remove_entry(parent, name)

    def forget(self, path: str) -> None:
        """Close a folder and those below it, before they are removed or replaced."""
        for known in [each for each in self._open if each == path or each.startswith(path + "/")]:
            os.close(self._open.pop(known))

    def shown(self, path: str = "") -> str:
        """Return the full path of an entry as printable text."""
        return shown(os.fsdecode(self.root) + (f"/{path}" if path else ""))

    def says(self, error: OSError) -> str:
        """Return the text of an error, with the path that it concerns."""
        text = "" if error.filename is None else shown(os.fsdecode(error.filename))
        return f"{text if text.startswith('/') else self.shown(text)}: {error.strerror}"

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def remove_entry(parent: int, name: bytes) -> int:
    """Remove a file, link or folder and everything below it; return the number of entries."""
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
    """Return the names in an open folder."""
    return [decode(os.fsencode(name)) for name in os.listdir(folder)]  # a descriptor
