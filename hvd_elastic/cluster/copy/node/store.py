"""The files of a node of a copy: those it reads from, and those that are made there.

A feeder asks a store for pieces of files by index and offset and waits until they are there, so a
node passes on what it is still receiving, and any node can feed any other from any point.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import threading
import time
from collections import OrderedDict
from typing import Any

from hvd_elastic.cluster.copy.node.comparison import Comparison, StoreError, hash_of, part_name
from hvd_elastic.cluster.copy.node.frames import DATA, FRAME_BYTES, WHOLE, LinkError, make_frame
from hvd_elastic.cluster.copy.node.renaming import Names, sync_disk
from hvd_elastic.cluster.copy.node.tree import (
    ANY,
    PARTS,
    File,
    Folders,
    Tree,
    encode,
    list_names,
    remove_entry,
    shown,
)

RECENT_BYTES = 8 << 20
# A smaller rest of an interrupted copy is not worth its place.
KEPT_PART_BYTES = 1 << 20
MOST_DAMAGED = 3
OWNER = b"owner"
# A lock without this copy's name in it is another copy's only after this long: the name in it may
# be that of a killed copy, or be missing since its holder has just begun or is just ending.
OWNER_S = 2.0
OWNER_PAUSE_S = 0.02


class SharedError(Exception):
    """A destination that another node of the same copy is filling: the hosts share it."""


class Gone(Exception):  # noqa: N818  # it is no defect of this program
    """A file that will not come, and why."""


def lock_folder(folders: Folders, folder: str, copy: str) -> int:
    """A folder of ours in a destination, made if need be, for one copy at a time; its descriptor.

    Raises:
        SharedError: another node of the same copy has it.
        StoreError: another copy has it.
    """
    name = encode(folder)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    deadline = time.monotonic() + OWNER_S
    while True:
        parent = folders.folder("")
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        try:
            number = os.open(name, flags, dir_fd=parent)
        except FileNotFoundError:
            continue  # another copy ended in this moment
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(number).st_nlink:
                break
        except BlockingIOError:
            if _owner_of(number) == copy:
                os.close(number)
                raise SharedError from None
            # Who holds it may be about to write its name, or about to end: it is asked again.
            if time.monotonic() > deadline:
                os.close(number)
                raise StoreError(
                    f"another copy to {shown(os.fsdecode(folders.root))} is going on there; wait "
                    "for its end"
                ) from None
            time.sleep(OWNER_PAUSE_S)
        os.close(number)
    owner_file = os.open(OWNER, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=number)
    _write_all(owner_file, copy.encode("ascii"))
    os.close(owner_file)
    return number


def _owner_of(parts: int) -> str:
    """The copy that says that it holds the lock; "" while none does."""
    try:
        number = os.open(OWNER, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=parts)
    except FileNotFoundError:
        return ""
    try:
        return os.read(number, 100).decode("ascii", "replace")
    finally:
        os.close(number)


class Store:
    """What feeders read: files of the tree, complete or growing.

    Attributes:
        tree: the tree.
        digests: sha256 of files, by index, as far as they are known.
        gone: files that will not come, by index, with the reason.
        begun: files that have begun to come, in that order; one may stand there twice.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.digests: dict[int, bytes] = {}
        self.gone: dict[int, str] = {}
        self.begun: list[int] = []
        self.changed = threading.Condition()

    def has_begun(self, index: int) -> bool:
        """Whether the file is there, or coming just now, or known never to come."""
        raise NotImplementedError

    def begun_beyond(self, count: int, timeout: float) -> bool:
        """Whether ``begun`` grows beyond so many within ``timeout`` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self.begun) > count, timeout)

    def is_own(self, index: int) -> bool:
        """Whether the file was there before the copy."""
        raise NotImplementedError

    def origin(self, index: int) -> int:
        """0 when the file's bytes are the source's, 1 when they are those of a host's own copy."""
        raise NotImplementedError

    def ready(self, index: int, offset: int, timeout: float) -> int:
        """How far the file can be read, once that is beyond ``offset`` (or the file is complete).

        Returns:
            -1 when that is not so within ``timeout`` seconds.

        Raises:
            Gone: it will not come.
        """
        raise NotImplementedError

    def recent(self, index: int, offset: int) -> tuple[bytes, int] | None:
        """A frame of the file as it arrived, with the bytes it stands for."""
        raise NotImplementedError

    def open(self, index: int) -> int:
        """The file for reading.

        Raises:
            Gone: it is not there any more.
        """
        raise NotImplementedError

    def problem(self, index: int, number: int) -> str:
        """Why what was read of an open file is not the file that was asked for; "" if it is."""
        file = self.tree.files[index]
        status = os.fstat(number)
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            return "it was changed during the copy"
        return ""

    def give_up(self, index: int, reason: str) -> None:
        """Lets everybody know that a file will not come."""
        with self.changed:
            self.gone[index] = reason
            self.begun.append(index)
            self.changed.notify_all()


class SourceStore(Store):
    """The source itself.

    Args:
        root: the folder or file.
        tree: what is in it.
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
        """The sha256 of a file, read now if it is not known.

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
    """A file that is still to come.

    Attributes:
        have: how much of it has come [bytes].
        number: its descriptor; -1 before any has come.
        digest: sha256 object that was given what has come.
        damaged: how often it has come and was not what was sent.
    """

    def __init__(self) -> None:
        self.have = 0
        self.number = -1
        self.digest: Any = None
        self.damaged = 0

    def open(self, number: int, size: int = 0) -> None:
        """Begins, or goes on with what is there."""
        self.number, self.have, self.digest = number, size, hash_of(number, size)
        os.lseek(number, size, os.SEEK_SET)

    def close(self) -> None:
        """Gives back its descriptor."""
        if self.number >= 0:
            os.close(self.number)
            self.number = -1


class RecentFrames:
    """The last frames as they arrived, so that feeders need not read them from the disk."""

    def __init__(self) -> None:
        self._frames: OrderedDict[tuple[int, int], tuple[bytes, int]] = OrderedDict()
        self._bytes = 0

    def add(self, index: int, offset: int, frame: bytes, size: int) -> None:
        """Keeps a frame, which stands for so many bytes, in the place of the oldest."""
        self._frames[index, offset] = (frame, size)
        self._bytes += len(frame)
        while self._bytes > RECENT_BYTES:
            _, (old, _) = self._frames.popitem(last=False)
            self._bytes -= len(old)

    def get(self, index: int, offset: int) -> tuple[bytes, int] | None:
        """A frame and the bytes it stands for."""
        return self._frames.get((index, offset))


class Target(Store):
    """A destination in which files arrive, until :meth:`finish`.

    Args:
        plan: what is needed there.
        copy: the copy's own name.
        trusts: whether a host's own file of the right size and time counts as the source's.

    Attributes:
        received: bytes that have arrived [bytes].
        left: bytes that are to come [bytes].
        unproved: files that came from another host's own copy.
        finished: whether :meth:`finish` is through.

    Raises:
        SharedError: another node of the same copy has the place.
        StoreError: another copy goes to the same place, or it cannot be written.
    """

    def __init__(self, plan: Comparison, copy: str, trusts: bool = False) -> None:
        super().__init__(plan.tree)
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
        try:
            os.makedirs(self._folders.root, 0o755, exist_ok=True)
            self._parts = lock_folder(self._folders, PARTS, copy)
        except OSError as error:
            raise StoreError(self._folders.says(error)) from error
        try:
            for path, _, _ in self.tree.folders:
                if path:
                    self._make_folder(path)
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

    def _make_folder(self, path: str) -> None:
        status = self._folders.status(path)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            self._folders.remove(path)
            status = None
        if status is None:
            parent, name = self._folders.of(path)
            os.mkdir(name, 0o700, dir_fd=parent)
            self._made.add(path)
        else:
            _make_writable(self._folders.folder(path))

    def _take_up_parts(self) -> None:
        """Goes on with the large files that an interrupted copy left."""
        large = [i for i in self._coming if self.tree.files[i].size > FRAME_BYTES]
        wanted = {self._part(index): index for index in large}
        for name in map(encode, list_names(self._parts)):
            index = wanted.get(name)
            if index is not None:
                # One that had all come may be read-only already; a link is not followed.
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
        """(index, offset) of what is still to come, in the order of the tree."""
        self._current = -1  # another link may begin with another file
        return [(index, part.have) for index, part in self._coming.items()]

    def lacks(self, index: int) -> bool:
        """Whether the file is still to come."""
        return index in self._coming

    @property
    def arrived(self) -> bool:
        """Whether nothing is to come any more."""
        return not self._coming

    @property
    def complete(self) -> bool:
        """Whether everything has its name too."""
        return self.arrived and not self._names

    def write(self, index: int, offset: int, data: bytes, frame: bytes) -> None:
        """Takes a piece of a file; ``frame`` is what it came in."""
        part = self._coming.get(index)
        if part is None or offset != part.have:
            raise LinkError("a piece came that nobody asked for")
        if part.number < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            part.open(os.open(self._part(index), flags, 0o600, dir_fd=self._parts))
        _write_all(part.number, data)
        part.digest.update(data)
        with self.changed:
            part.have = offset + len(data)
            if index != self._current:
                self._current = index
                self.begun.append(index)
            self._count(index, offset, frame, len(data))
            self.changed.notify_all()

    def end(self, index: int, digest: bytes, origin: int) -> None:
        """A file has all arrived; it gets its name if it is what was sent.

        Raises:
            LinkError: it is not; it must be sent again.
            StoreError: it never is.
        """
        file, part = self.tree.files[index], self._coming.get(index)
        if part is None or part.number < 0 or part.have != file.size:
            raise LinkError("a file ended that had not all come")
        if part.digest.digest() != digest:
            os.ftruncate(part.number, 0)
            part.close()
            with self.changed:
                part.have = 0
                self.left += file.size
            self._complain(index, part)
        os.fchmod(part.number, file.mode)
        os.utime(part.number, ns=(file.mtime_ns, file.mtime_ns))
        part.close()
        self._take(index, digest, origin)

    def whole(self, index: int, digest: bytes, origin: int, data: bytes, frame: bytes) -> None:
        """A small file has arrived in one piece; raises as :meth:`end`."""
        file, part = self.tree.files[index], self._coming.get(index)
        if part is None or len(data) != file.size:
            raise LinkError("a file came that nobody asked for")
        if hashlib.sha256(data).digest() != digest:
            self._complain(index, part)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        number = os.open(self._part(index), flags, file.mode | 0o200, dir_fd=self._parts)
        try:
            _write_all(number, data)
            if file.mode & ~0o777 or not file.mode & 0o200:
                os.fchmod(number, file.mode)  # what making it could not set
            os.utime(number, ns=(file.mtime_ns, file.mtime_ns))
        finally:
            os.close(number)
        with self.changed:
            self._count(index, 0, frame, len(data))
        self._take(index, digest, origin)

    def give_up(self, index: int, reason: str) -> None:
        """Lets go of what had come of a file that will not come."""
        with self.changed:
            part = self._coming.pop(index, None)
            if part is not None:
                self.left -= self.tree.files[index].size - part.have
        if part is not None and part.number >= 0:
            part.close()
            with contextlib.suppress(OSError):
                os.unlink(self._part(index), dir_fd=self._parts)
        super().give_up(index, reason)

    def adopt(self, index: int, path: bytes) -> None:
        """Takes a file that was not sent but fetched here, as if it were sent from where it stands.

        Nothing else may arrive meanwhile. Raises as :meth:`end`.
        """
        file = self.tree.files[index]
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
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
            self.end(index, digest, 0)
        finally:
            os.close(number)

    def finish(self) -> list[str]:
        """Names, links, times, modes and removals, when all files are there; then all is on disk.

        Returns:
            What of that could not be done, but for the names.

        Raises:
            OSError: the disk cannot take it, or a name cannot be given.
        """
        if self._names:
            self._names.settle()
        self._names.end()
        problems: list[str] = []

        def attempt(path: str, action: Any, *arguments: Any) -> None:
            try:
                action(*arguments)
            except OSError as error:
                problems.append(f"{self._folders.shown(path)}: {error.strerror}")

        for index in self._plan.touched:
            file = self.tree.files[index]
            attempt(file.path, self._touch, file)
        for path, to, mtime_ns in self.tree.links:
            attempt(path, self._link, path, to, mtime_ns)
        for path in self._plan.extra:
            attempt(path, self._folders.remove, path)
        self._drop_parts(keep=bool(self._coming))
        for path, mode, mtime_ns in reversed(self.tree.folders):
            attempt(path, self._settle_folder, path, mode, mtime_ns)
        sync_disk(self._folders.folder(""))
        self.finished = True
        return problems

    def _settle_folder(self, path: str, mode: int, mtime_ns: int) -> None:
        number = self._folders.folder(path)
        if mode != ANY:
            os.fchmod(number, mode)
        elif path in self._made:
            os.fchmod(number, 0o755)
        if mtime_ns != ANY:
            os.utime(number, ns=(mtime_ns, mtime_ns))

    def _touch(self, file: File) -> None:
        parent, name = self._folders.of(file.path)
        number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            os.fchmod(number, file.mode)
            os.utime(number, ns=(file.mtime_ns, file.mtime_ns))
        finally:
            os.close(number)

    def _link(self, path: str, to: str, mtime_ns: int) -> None:
        status = self._folders.status(path)
        parent, name = self._folders.of(path)
        is_link = status is not None and stat.S_ISLNK(status.st_mode)
        if not is_link or os.readlink(name, dir_fd=parent) != encode(to):
            if status is not None:
                if stat.S_ISDIR(status.st_mode) and not self._plan.deletes:
                    raise OSError(errno.EISDIR, "a folder in the place of a link; give --delete")
                self._folders.remove(path)
                parent, name = self._folders.of(path)
            os.symlink(encode(to), name, dir_fd=parent)
        os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=parent, follow_symlinks=False)

    def abandon(self, keep: bool) -> None:
        """Ends an unfinished copy; of large files, what has come stays if ``keep``."""
        if not self.finished:
            with contextlib.suppress(OSError):
                self._names.settle()
            self._names.end()
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
        self._recent.add(index, offset, frame, size)
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

    def _take(self, index: int, digest: bytes, origin: int) -> None:
        """A file is what was sent: others can have it, and it gets its name when it is on disk."""
        with self.changed:
            self._names.add(index, self._part(index))
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
        named = os.path.join(self._folders.root, encode(self.tree.files[index].path))
        place = named
        if index in self._coming or index in self._names:
            place = os.path.join(self._folders.root, encode(PARTS), self._part(index))
        try:
            return os.open(place, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            # It got its name in this moment.
            return os.open(named, os.O_RDONLY | os.O_NOFOLLOW)

    def problem(self, index: int, number: int) -> str:
        return "" if index in self.digests else super().problem(index, number)

    def explain(self, error: OSError) -> str:
        """An error of writing, for people."""
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


def _write_all(number: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(number, view) :]
