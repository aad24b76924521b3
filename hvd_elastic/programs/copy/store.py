"""The files of a node of a copy: those that it reads and those that it is receiving.

A feeder requests pieces of files by index and offset and waits until they have arrived. So a node
passes on what it is still receiving, and any node can feed any other from any offset.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import threading
import time
from array import array
from collections import OrderedDict
from itertools import groupby
from typing import Any

from hvd_elastic.programs.copy.comparison import Comparison, StoreError, part_name
from hvd_elastic.programs.copy.frames import DATA, FRAME_BYTES, WHOLE, LinkError, make_frame
from hvd_elastic.programs.copy.renaming import Names, sync_disk
from hvd_elastic.programs.copy.tree import (
    ANY,
    PARTS,
    PLAIN,
    File,
    Folders,
    Keeps,
    Tree,
    attributes_of,
    encode,
    identity,
    is_foreign,
    list_names,
    make_folders,
    remove_entry,
    shown,
    user_name,
)
from hvd_elastic.programs.file_hash import hash_of

# Zeros of this length become a hole, if holes are kept: a block of most file systems.
HOLE_BYTES = 4096
# Size of the frames kept in memory for feeding.
RECENT_BYTES = 8 << 20
# Smaller partial files of an interrupted copy are not kept.
KEPT_PART_BYTES = 1 << 20
# A file that arrives damaged this number of times ends the copy to the host.
MOST_DAMAGED = 3
# File in the lock folder with the identifier of the copy that holds it.
OWNER = b"owner"
# A lock under another name counts as another copy's only after this time: its holder may have just
# begun or be ending, so that the name is missing or that of a killed copy.
OWNER_S = 2.0
OWNER_PAUSE_S = 0.02


class SharedError(Exception):
    """Another node of the same copy is filling this destination: the hosts share the folder."""


class Gone(Exception):  # noqa: N818  # it is an outcome, not an error of the program
    """A file will not arrive; the message says why."""


def open_own_folder(folders: Folders, folder: str) -> int:
    """Create and open one of our own folders in a destination; return its descriptor.

    Raises:
        StoreError: it is another user's, or others can change what is in it.
    """
    name = encode(folder)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    while True:
        parent = folders.folder("")
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        try:
            number = os.open(name, flags, dir_fd=parent)
        except FileNotFoundError:
            continue  # another copy ended and removed it in this moment
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.ELOOP, errno.ENOTDIR):
                raise
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        else:
            status = os.fstat(number)
            is_own = status.st_uid == os.geteuid() or status.st_uid == _uid_of_new_file(number)
            if is_own and not status.st_mode & 0o022:
                return number
            os.close(number)
        raise StoreError(
            f"{folders.shown(folder)} belongs to user {user_name(status.st_uid)} (mode "
            f"{stat.S_IMODE(status.st_mode):o}), so others could change files while they arrive. "
            "Remove it, or choose a destination that others cannot write to"
        )


def _uid_of_new_file(folder: int) -> int:
    """Return who owns the files that we create in a folder: a file server may make another user of
    root; -1 if we cannot create any.
    """
    name = f"new-{os.getpid()}".encode()
    try:
        number = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    except OSError:
        return -1
    try:
        return os.fstat(number).st_uid
    finally:
        os.close(number)
        os.unlink(name, dir_fd=folder)


def lock_folder(folders: Folders, folder: str, copy: str) -> int:
    """Create and lock one of our own folders in a destination; return its descriptor.

    Raises:
        SharedError: another node of the same copy holds the lock.
        StoreError: another copy holds the lock, or the folder is not ours alone.
    """
    deadline = time.monotonic() + OWNER_S
    while True:
        number = open_own_folder(folders, folder)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(number).st_nlink:
                break
        except BlockingIOError:
            if _owner_of(number) == copy:
                os.close(number)
                raise SharedError from None
            # The holder may be about to write its name or to end, so try again for a while.
            if time.monotonic() > deadline:
                os.close(number)
                raise StoreError(
                    f"another copy to {shown(os.fsdecode(folders.root))} is in progress there; "
                    "wait for its end"
                ) from None
            time.sleep(OWNER_PAUSE_S)
        os.close(number)
    owner_file = os.open(OWNER, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=number)
    _write_all(owner_file, copy.encode("ascii"))
    os.close(owner_file)
    return number


def _owner_of(parts: int) -> str:
    """Return the copy whose name is in the lock folder; "" if there is none."""
    try:
        number = os.open(OWNER, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=parts)
    except FileNotFoundError:
        return ""
    try:
        return os.read(number, 100).decode("ascii", "replace")
    finally:
        os.close(number)


class Store:
    """Files of a tree, complete or still arriving, that feeders read.

    Attributes:
        digests: known sha256 of files, by index.
        gone: reasons why files will not arrive, by index.
        begun: files whose data has begun to arrive, in that order; one may appear twice.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.digests: dict[int, bytes] = {}
        self.gone: dict[int, str] = {}
        self.begun: list[int] = []
        self.changed = threading.Condition()

    def has_begun(self, index: int) -> bool:
        """Return whether the file is complete, is arriving, or will never arrive."""
        raise NotImplementedError

    def begun_beyond(self, count: int, timeout: float) -> bool:
        """Return whether ``begun`` has more than ``count`` entries within ``timeout`` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self.begun) > count, timeout)

    def is_own(self, index: int) -> bool:
        """Return whether the file was there before the copy."""
        raise NotImplementedError

    def origin(self, index: int) -> int:
        """Return 0 if the file's bytes are the source's, 1 if they are from a host's own copy."""
        raise NotImplementedError

    def ready(self, index: int, offset: int, timeout: float) -> int:
        """Wait until the file can be read beyond ``offset`` or is complete.

        Returns:
            The offset up to which it can be read; -1 if there is no more after ``timeout`` seconds.

        Raises:
            Gone: it will not arrive.
        """
        raise NotImplementedError

    def recent(self, index: int, offset: int) -> tuple[bytes, int] | None:
        """Return a frame as it arrived and its number of data bytes; None if it is not kept."""
        raise NotImplementedError

    def open(self, index: int) -> int:
        """Open the file for reading; return its descriptor.

        Raises:
            Gone: it does not exist any more.
        """
        raise NotImplementedError

    def problem(self, index: int, number: int) -> str:
        """Return why an open file is not the requested one; "" if it is."""
        file = self.tree.files[index]
        status = os.fstat(number)
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            return "it was changed during the copy"
        return ""

    def give_up(self, index: int, reason: str) -> None:
        """Record that a file will not arrive, and wake the feeders that wait for it."""
        with self.changed:
            self.gone[index] = reason
            self.begun.append(index)
            self.changed.notify_all()


class SourceStore(Store):
    """Files of the source.

    Args:
        root: path of the folder or file.
        tree: its contents.
    """

    def __init__(self, root: bytes, tree: Tree) -> None:
        super().__init__(tree)
        self._root = root

    def has_begun(self, index: int) -> bool:
        return True

    def is_own(self, index: int) -> bool:
        return True

    def origin(self, index: int) -> int:
        return 0

    def ready(self, index: int, offset: int, timeout: float) -> int:
        if index in self.gone:
            raise Gone(self.gone[index])
        return self.tree.files[index].size

    def recent(self, index: int, offset: int) -> tuple[bytes, int] | None:
        return None

    def open(self, index: int) -> int:
        path = self.tree.files[index].path
        full = os.path.join(self._root, encode(path)) if path else self._root  # bytes
        try:
            return os.open(full, os.O_RDONLY)
        except OSError as error:
            raise Gone(f"it cannot be read any more ({error.strerror})") from error

    def digest(self, index: int) -> bytes:
        """Return the sha256 of a file; reads the file if it is not known yet.

        Raises:
            Gone: it cannot be read or was changed.
        """
        if index not in self.digests:
            number = self.open(index)
            try:
                digest = hash_of(number).digest()
                problem = self.problem(index, number)
            finally:
                os.close(number)
            if problem:
                raise Gone(problem)
            self.digests[index] = digest
        return self.digests[index]


class Part:
    """A file that has not arrived completely.

    Attributes:
        have: bytes that have arrived.
        number: descriptor; -1 before any byte has arrived.
        digest: sha256 object of the bytes that have arrived.
        damaged: number of times the file arrived with a wrong digest.
    """

    def __init__(self) -> None:
        self.have = 0
        self.number = -1
        self.digest: Any = None
        self.damaged = 0

    def open(self, number: int, size: int = 0) -> None:
        """Use an open file whose first ``size`` bytes have arrived already."""
        self.number, self.have, self.digest = number, size, hash_of(number, size)
        os.lseek(number, size, os.SEEK_SET)

    def close(self) -> None:
        if self.number >= 0:
            os.close(self.number)
            self.number = -1


class RecentFrames:
    """The latest frames as they arrived, so that feeders need not read them from the disk."""

    def __init__(self) -> None:
        self._frames: OrderedDict[tuple[int, int], tuple[bytes, int]] = OrderedDict()
        self._bytes = 0

    def add_frame(self, index: int, offset: int, frame: bytes, size: int) -> None:
        """Add a frame with ``size`` data bytes; drops the oldest ones beyond the limit."""
        self._frames[index, offset] = (frame, size)
        self._bytes += len(frame)
        while self._bytes > RECENT_BYTES:
            _, (old, _) = self._frames.popitem(last=False)
            self._bytes -= len(old)

    def get(self, index: int, offset: int) -> tuple[bytes, int] | None:
        """Return a frame and its number of data bytes; None if it is not kept."""
        return self._frames.get((index, offset))


class Target(Store):
    """A destination in which files arrive, until :meth:`finish`.

    Args:
        plan: what is needed there.
        copy: identifier of the copy.
        trusts: whether a host's own file of the right size and time counts as the source's.
        keeps: what is kept beside contents, modes and times.

    Attributes:
        received: bytes that have arrived.
        left: bytes that have not arrived yet.
        unproved: files that came from another host's own copy.
        finished: whether :meth:`finish` has returned.

    Raises:
        SharedError: another node of the same copy holds the destination.
        StoreError: another copy goes to the same destination, or it cannot be written.
    """

    def __init__(
        self, plan: Comparison, copy: str, trusts: bool = False, keeps: Keeps = PLAIN
    ) -> None:
        super().__init__(plan.tree)
        self._write = _write_sparse if keeps.sparse else _write_at
        self.digests = dict(plan.digests)
        self.unproved: list[int] = []
        self.received = 0
        self.left = plan.needed_bytes
        self.finished = False
        self._plan = plan
        self._folders = plan.folders
        self._trusts = trusts
        self._coming: dict[int, Part] = {index: Part() for index in plan.needed}
        self._sent_here = frozenset(plan.needed)
        self._recent = RecentFrames()
        self._current = -1
        self._made: set[str] = set()
        self._inodes = array("Q", bytes(8 * len(plan.tree.files)))  # 0: it did not arrive
        try:
            make_folders(self._folders.root)
            self._parts = lock_folder(self._folders, PARTS, copy)
            self._uid = os.fstat(self._parts).st_uid
        except OSError as error:
            raise StoreError(self._folders.says(error)) from error
        try:
            for path, mode, _ in self.tree.folders:
                if path:
                    self._make_folder(path, mode)
                else:
                    _make_writable(self._folders.folder(""))
            for index in plan.needed:
                path = self.tree.files[index].path
                status = self._folders.status(path)
                if status is not None and stat.S_ISDIR(status.st_mode):
                    self._folders.remove(path)
            self._take_up_parts()
        except OSError as error:
            self._drop_parts(keep=True)
            raise StoreError(self._folders.says(error)) from error
        self._names = Names(self._parts, self._give_name)

    def _make_folder(self, path: str, mode: int) -> None:
        status = self._folders.status(path)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            self._folders.remove(path)
            status = None
        if status is None:
            parent, name = self._folders.of(path)
            # Another call cannot know that an interrupted one has made it.
            os.mkdir(name, 0o755 if mode == ANY else 0o700, dir_fd=parent)
            self._made.add(path)
        else:
            _make_writable(self._folders.folder(path))

    def _take_up_parts(self) -> None:
        """Resume the large files that an interrupted copy left."""
        large = [i for i in self._coming if self.tree.files[i].size > FRAME_BYTES]
        wanted = {self._part(index): index for index in large}
        for name in map(encode, list_names(self._parts)):
            index = wanted.get(name)
            if index is not None:
                # A complete one may be read-only already; a symbolic link is refused.
                found = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._parts)
                try:
                    os.chmod(f"/proc/self/fd/{found}", 0o600)
                finally:
                    os.close(found)
                number = os.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=self._parts)
                if os.fstat(number).st_size > self.tree.files[index].size:
                    os.ftruncate(number, 0)
                size = os.fstat(number).st_size
                self._coming[index].open(number, size)
                self.left -= size
            elif name != OWNER:
                remove_entry(self._parts, name)

    def _part(self, index: int) -> bytes:
        return part_name(self.tree.files[index])

    # ---- receiving

    def wants(self) -> list[tuple[int, int]]:
        """Return the (index, offset) of all missing data, in the order of the tree."""
        self._current = -1  # a new link may begin with another file
        return [(index, part.have) for index, part in self._coming.items()]

    def lacks(self, index: int) -> bool:
        """Return whether the file has not arrived completely."""
        return index in self._coming

    @property
    def arrived(self) -> bool:
        """Return whether all files have arrived."""
        return not self._coming

    @property
    def complete(self) -> bool:
        """Return whether all files have arrived and have their names."""
        return self.arrived and not self._names

    def write(self, index: int, offset: int, data: bytes, frame: bytes) -> None:
        """Write a piece of a file that arrived in ``frame``."""
        part = self._coming.get(index)
        if part is None or offset != part.have:
            raise LinkError("a piece came that nobody asked for")
        if part.number < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            part.open(os.open(self._part(index), flags, 0o600, dir_fd=self._parts))
        self._write(part.number, data, offset)
        part.digest.update(data)
        with self.changed:
            part.have = offset + len(data)
            if index != self._current:
                self._current = index
                self.begun.append(index)
            self._count(index, offset, frame, len(data))
            self.changed.notify_all()

    def finish_file(self, index: int, digest: bytes, origin: int) -> None:
        """Check a file that has arrived completely against its digest and accept it.

        Raises:
            LinkError: the digest differs; the file must be sent again.
            StoreError: the digest has differed too often.
        """
        file, part = self.tree.files[index], self._coming.get(index)
        if part is None or part.number < 0 or part.have != file.size:
            raise LinkError("a file ended that had not all come")
        if part.digest.digest() != digest:
            os.ftruncate(part.number, 0)  # not a new file: feeders have this one open
            with self.changed:
                part.open(part.number)
                self.left += file.size
            self._complain(index, part)
        os.fchmod(part.number, file.mode)
        os.utime(part.number, ns=(file.mtime_ns, file.mtime_ns))
        inode = os.fstat(part.number).st_ino
        part.close()
        self._accept_file(index, digest, origin, inode)

    def whole(self, index: int, digest: bytes, origin: int, data: bytes, frame: bytes) -> None:
        """Check, write and accept a small file that arrived in one frame.

        Raises as :meth:`finish_file`.
        """
        file, part = self.tree.files[index], self._coming.get(index)
        if part is None or len(data) != file.size:
            raise LinkError("a file came that nobody asked for")
        if hashlib.sha256(data).digest() != digest:
            self._complain(index, part)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        number = os.open(self._part(index), flags, file.mode | 0o200, dir_fd=self._parts)
        try:
            self._write(number, data, 0)
            if file.mode & ~0o777 or not file.mode & 0o200:
                os.fchmod(number, file.mode)  # mode bits that open() does not set
            os.utime(number, ns=(file.mtime_ns, file.mtime_ns))
            inode = os.fstat(number).st_ino
        finally:
            os.close(number)
        with self.changed:
            self._count(index, 0, frame, len(data))
        self._accept_file(index, digest, origin, inode)

    def give_up(self, index: int, reason: str) -> None:
        """Remove what has arrived of a file that will not be completed."""
        with self.changed:
            part = self._coming.pop(index, None)
            if part is not None:
                self.left -= self.tree.files[index].size - part.have
        if part is not None and part.number >= 0:
            part.close()
            with contextlib.suppress(OSError):
                os.unlink(self._part(index), dir_fd=self._parts)
        super().give_up(index, reason)

    def adopt(self, index: int, number: int) -> None:
        """Accept a file that was fetched here as if the rest of it had been sent; close it.

        No link may be receiving meanwhile. Raises as :meth:`finish_file`.
        """
        file = self.tree.files[index]
        try:
            if os.fstat(number).st_size != file.size:
                self.give_up(index, "it was changed in the store during the copy")
                return
            digest = hash_of(number).digest()
            if file.size <= FRAME_BYTES:
                data = os.pread(number, FRAME_BYTES, 0)
                frame = make_frame(WHOLE, index, 0, digest + b"\0" + data)
                self.whole(index, digest, 0, data, frame)
                return
            offset = self._coming[index].have
            while offset < file.size:
                data = os.pread(number, FRAME_BYTES, offset)
                self.write(index, offset, data, make_frame(DATA, index, offset, data))
                offset += len(data)
            self.finish_file(index, digest, 0)
        finally:
            os.close(number)

    def finish(self) -> list[str]:
        """Set names, links, times and modes, remove extra entries, and sync the disk.

        Called when all files have arrived.

        Returns:
            Descriptions of what could not be done, apart from names.

        Raises:
            OSError: the sync failed, or a file cannot be given its name.
        """
        if self._names:
            self._names.settle()
        self._names.stop_renaming()
        problems: list[str] = []

        def attempt(path: str, action: Any, *arguments: Any) -> None:
            try:
                action(*arguments)
            except OSError as error:
                problems.append(f"{self._folders.shown(path)}: {error.strerror}")

        for index in self._plan.touched:
            file = self.tree.files[index]
            attempt(file.path, self._touch, file)
        for index, _ in self.tree.stored:
            attempt(self.tree.files[index].path, self._check_holes, index)
        folders = {path for path, _, _ in self.tree.folders}
        missing = {self.tree.files[index].path for index in self.gone}
        for path, told in self.tree.attributes:
            if path not in missing:
                attempt(path, self._set_attributes, path, told, path in folders)
        for path, first in self.tree.same:
            if first not in missing:
                attempt(path, self._name_again, path, first)
        for path, to, mtime_ns in self.tree.links:
            attempt(path, self._link, path, to, mtime_ns)
        for path in self._plan.extra:
            for part in self._plan.removable(path):  # there may be more in a folder by now
                attempt(part, self._folders.remove, part)
        exposed = self._exposed()
        self._drop_parts(keep=bool(self._coming))
        for path, mode, mtime_ns in reversed(self.tree.folders):
            attempt(path, self._settle_folder, path, mode, mtime_ns)
        sync_disk(self._folders.folder(""))
        self.finished = True
        return problems + self._replaced(exposed)

    def _exposed(self) -> set[str]:
        """Return the folders in which others may replace what has arrived."""
        exposed: set[str] = set()
        for path, mode, _ in self.tree.folders or [("", ANY, ANY)]:  # parents come first
            try:
                status = os.fstat(self._folders.folder(path))
            except OSError:  # somebody has removed it, or made a link of it
                exposed.add(path)
                continue
            modes = [status.st_mode] if mode == ANY else [status.st_mode, mode]
            is_open = any(mode & 0o022 and not mode & stat.S_ISVTX for mode in modes)
            is_below = bool(path) and path.rpartition("/")[0] in exposed
            if is_below or is_open or status.st_uid not in (0, self._uid):
                exposed.add(path)
        return exposed

    def _replaced(self, exposed: set[str]) -> list[str]:
        """Describe the files in these folders that arrived, and that others have replaced since."""
        root = os.fstat(self._folders.folder(""))
        self._folders.close()  # what has the names now, and not what had them
        if not os.path.samestat(root, os.stat(self._folders.root)):
            return [f"{self._folders.shown()}: it was replaced during the copy"]
        problems = []
        for index, file in enumerate(self.tree.files):
            if self._inodes[index] and file.path.rpartition("/")[0] in exposed:
                problem = self._why_replaced(index, file)
                if problem:
                    problems.append(f"{self._folders.shown(file.path)}: {problem}")
        return problems

    def _why_replaced(self, index: int, file: File) -> str:
        try:
            number = self._folders.open_file(file.path)
        except OSError as error:
            return f"it was replaced during the copy ({error.strerror})"
        try:
            status = os.fstat(number)
            if status.st_uid != self._uid:
                return f"user {user_name(status.st_uid)} has replaced it during the copy"
            is_same = (status.st_ino, status.st_size) == (self._inodes[index], file.size)
            # Not all file systems number their files.
            if not is_same and hash_of(number).digest() != self.digests[index]:
                return "it was replaced during the copy"
        finally:
            os.close(number)
        return ""

    def _settle_folder(self, path: str, mode: int, mtime_ns: int) -> None:
        number = self._folders.folder(path)
        if mode != ANY:
            os.fchmod(number, mode)
        if path in self._made and os.fstat(number).st_uid != self._uid:
            raise OSError(errno.EPERM, "another user has replaced it during the copy")
        if mtime_ns != ANY:
            os.utime(number, ns=(mtime_ns, mtime_ns))

    def _touch(self, file: File) -> None:
        parent, name = self._folders.of(file.path)
        number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=parent)
        trusted = self._plan.trusted
        try:
            is_trusted = trusted.get(file.path) == identity(os.fstat(number))
            os.fchmod(number, file.mode)
            os.utime(number, ns=(file.mtime_ns, file.mtime_ns))
            if is_trusted:
                trusted[file.path] = identity(os.fstat(number))
        finally:
            os.close(number)

    def _check_holes(self, index: int) -> None:
        """Raise OSError if a file that has holes in the source takes all of its space here."""
        file = self.tree.files[index]
        status = self._folders.status(file.path)
        if status is not None and self._inodes[index] and status.st_blocks * 512 >= file.size:
            raise OSError(errno.ENOTSUP, "its holes are not kept: the file system fills them")

    def _set_attributes(self, path: str, told: dict[str, str], is_folder: bool) -> None:
        """Give a file or folder the extended attributes of the source, and only those."""
        wanted = {name: base64.b64decode(value) for name, value in told.items()}
        folders = self._folders
        number = os.dup(folders.folder(path)) if is_folder else folders.open_file(path)
        try:
            there = attributes_of(number)
            if there == wanted:
                return
            mode = stat.S_IMODE(os.fstat(number).st_mode)
            os.fchmod(number, mode | 0o200)  # else its owner may change none
            try:
                for name in there.keys() - wanted.keys():
                    os.removexattr(number, name)
                for name, value in wanted.items():
                    if there.get(name) != value:
                        _set_attribute(number, name, value)
            finally:
                os.fchmod(number, mode)
        finally:
            os.close(number)

    def _name_again(self, path: str, first: str) -> None:
        """Give a file a further name, in place of what has that name."""
        wanted, there = self._folders.status(first), self._folders.status(path)
        if wanted is None:
            raise OSError(errno.ENOENT, f"{self._folders.shown(first)} is missing, its other name")
        if there is not None and os.path.samestat(wanted, there):
            return
        if there is not None and stat.S_ISDIR(there.st_mode):
            if not self._plan.deletes:
                raise OSError(errno.EISDIR, "a folder in the place of a file; give --delete")
            self._make_way(path)
        parent, name = self._folders.of(first)
        temporary = b"name"
        os.link(name, temporary, src_dir_fd=parent, dst_dir_fd=self._parts, follow_symlinks=False)
        parent, name = self._folders.of(path)
        os.rename(temporary, name, src_dir_fd=self._parts, dst_dir_fd=parent)

    def _link(self, path: str, to: str, mtime_ns: int) -> None:
        status = self._folders.status(path)
        parent, name = self._folders.of(path)
        is_link = status is not None and stat.S_ISLNK(status.st_mode)
        if not is_link or os.readlink(name, dir_fd=parent) != encode(to):
            if status is not None:
                if stat.S_ISDIR(status.st_mode) and not self._plan.deletes:
                    raise OSError(errno.EISDIR, "a folder in the place of a link; give --delete")
                self._make_way(path)
                parent, name = self._folders.of(path)
            os.symlink(encode(to), name, dir_fd=parent)
        os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=parent, follow_symlinks=False)

    def _make_way(self, path: str) -> None:
        """Remove what has the name of a file or link, unless a pattern keeps a part of it."""
        if not self._plan.is_removable(path):
            raise OSError(errno.ENOTEMPTY, "a folder with files that --exclude keeps; move them")
        self._folders.remove(path)

    def abandon(self, keep: bool) -> None:
        """End an unfinished copy; ``keep`` leaves large partial files for the next one."""
        if not self.finished:
            with contextlib.suppress(OSError):
                self._names.settle()
            self._names.stop_renaming()
            self._drop_parts(keep)

    def _drop_parts(self, keep: bool) -> None:
        for part in self._coming.values():
            part.close()
        with contextlib.suppress(OSError):
            for name in map(encode, list_names(self._parts)):
                size = os.stat(name, dir_fd=self._parts).st_size
                if not keep or name == OWNER or size < KEPT_PART_BYTES:
                    os.unlink(name, dir_fd=self._parts)
            os.rmdir(encode(PARTS), dir_fd=self._folders.folder(""))
        os.close(self._parts)

    def _count(self, index: int, offset: int, frame: bytes, size: int) -> None:
        self._recent.add_frame(index, offset, frame, size)
        self.received += size
        self.left -= size
        self._names.count(size)

    def _complain(self, index: int, part: Part) -> None:
        part.damaged += 1
        path = self._folders.shown(self.tree.files[index].path)
        if part.damaged >= MOST_DAMAGED:
            raise StoreError(
                f"{path} arrived damaged {MOST_DAMAGED} times. Is the memory or the network "
                "between the hosts faulty?"
            )
        raise LinkError(f"{path} arrived damaged")

    def _accept_file(self, index: int, digest: bytes, origin: int, inode: int) -> None:
        """Accept a verified file: feeders can read it, and it gets its name after the next sync."""
        with self.changed:
            self._inodes[index] = inode
            self._names.add_file(index, self._part(index))
            self.digests[index] = digest
            if origin:
                self.unproved.append(index)
            del self._coming[index]
            self.begun.append(index)
            self.changed.notify_all()

    def _give_name(self, index: int, part: bytes) -> None:
        parent, name = self._folders.of(self.tree.files[index].path)
        os.rename(part, name, src_dir_fd=self._parts, dst_dir_fd=parent)

    # ---- feeding others

    def has_begun(self, index: int) -> bool:
        return index not in self._coming or index == self._current

    def is_own(self, index: int) -> bool:
        return index not in self._sent_here

    def origin(self, index: int) -> int:
        if self._trusts:
            return 0
        return int(index in self.unproved or (self.is_own(index) and index not in self.digests))

    def ready(self, index: int, offset: int, timeout: float) -> int:
        def far() -> int:
            if index in self.gone:
                return -2
            part = self._coming.get(index)
            if part is None:
                return self.tree.files[index].size
            return part.have if part.have > max(offset, 0) else -1

        with self.changed:
            self.changed.wait_for(lambda: far() != -1, timeout)
            if far() == -2:
                raise Gone(self.gone[index])
            return far()

    def recent(self, index: int, offset: int) -> tuple[bytes, int] | None:
        with self.changed:
            return self._recent.get(index, offset)

    def open(self, index: int) -> int:
        if index in self._coming or index in self._names:
            # Else it got its final name in this moment.
            with contextlib.suppress(FileNotFoundError):
                return os.open(self._part(index), os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._parts)
        named = os.path.join(self._folders.root, encode(self.tree.files[index].path))
        return os.open(named, os.O_RDONLY | os.O_NOFOLLOW)

    def problem(self, index: int, number: int) -> str:
        if index in self.digests:
            return ""
        path, status = self.tree.files[index].path, os.fstat(number)
        if is_foreign(status) and self._plan.trusted.get(path) != identity(status):
            folders = Folders(self._folders.root)  # feeders are threads: each needs its own
            try:
                if folders.others_write(path):
                    return "it belongs to another user"
            finally:
                folders.close()
        return super().problem(index, number)

    def explain(self, error: OSError) -> str:
        """Return the text of a write error for the user."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"{self._folders.shown()}: {error.strerror}. Make room there and call again; what "
                "is complete is kept"
            )
        return self._folders.says(error)


def _make_writable(folder: int) -> None:
    mode = stat.S_IMODE(os.fstat(folder).st_mode)
    if mode & 0o300 != 0o300:
        os.fchmod(folder, mode | 0o300)


def _set_attribute(number: int, name: str, value: bytes) -> None:
    try:
        os.setxattr(number, name, value)
    except OSError as error:
        why = f"its attribute {name} is not kept: {error.strerror}"
        raise OSError(error.errno, why) from None
    except AttributeError:
        raise OSError(errno.ENOTSUP, "this system has no extended attributes") from None


def _write_at(number: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(number, view, offset)
        view, offset = view[written:], offset + written


def _write_sparse(number: int, data: bytes, offset: int) -> None:
    """Write what is not zero, and make the file as long as if all was written."""
    starts = range(0, len(data), HOLE_BYTES)
    for is_zero, run in groupby(starts, lambda at: not data[at : at + HOLE_BYTES].strip(b"\0")):
        first, *others = run
        end = (others[-1] if others else first) + HOLE_BYTES
        if not is_zero:
            _write_at(number, data[first:end], offset + first)
    os.ftruncate(number, offset + len(data))


def _write_all(number: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(number, view) :]
