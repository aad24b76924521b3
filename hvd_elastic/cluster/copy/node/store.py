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

from hvd_elastic.cluster.copy.node.frames import DATA, FRAME_BYTES, WHOLE, LinkError, make_frame
from hvd_elastic.cluster.copy.node.names import SYNC_BYTES, Names, sync_disk
from hvd_elastic.cluster.copy.node.tree import (
    ANY,
    OURS,
    PARTS,
    File,
    Folders,
    Tree,
    decode,
    encode,
    is_excluded,
    list_names,
    remove_entry,
    shown,
)

RECENT_BYTES = 8 << 20
HEADROOM_BYTES = 16 << 20
READ_BYTES = 1 << 20
# A smaller rest of an interrupted copy is not worth its place.
KEPT_PART_BYTES = 1 << 20
MOST_DAMAGED = 3
OWNER = b"owner"
# A lock without this copy's name in it is another copy's only after this long: the name in it may
# be that of a killed copy, or be missing since its holder has just begun or is just ending.
OWNER_S = 2.0
OWNER_PAUSE_S = 0.02


class StoreError(Exception):
    """A destination that cannot take the copy, and why."""


class SharedError(Exception):
    """A destination that another node of the same copy is filling: the hosts share it."""


class Gone(Exception):  # noqa: N818  # it is no defect of this program
    """A file that will not come, and why."""


def hash_of(number: int, end: int | None = None) -> Any:
    """A sha256 object that has been given an open file from its beginning, up to ``end``."""
    digest = hashlib.sha256()
    offset = 0
    while end is None or offset < end:
        size = READ_BYTES if end is None else min(READ_BYTES, end - offset)
        data = os.pread(number, size, offset)
        if not data:
            break
        digest.update(data)
        offset += len(data)
    return digest


def check_free(place: bytes, size: int, files: int) -> None:
    """Nothing if so many bytes and new files fit there.

    Raises:
        StoreError: they do not.
    """
    there = place
    while not os.path.isdir(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    disk = os.statvfs(there)
    free = disk.f_bavail * disk.f_frsize
    where = shown(os.fsdecode(place))
    # Of a file system that has no blocks at all (/proc), writing tells what is wrong.
    if disk.f_blocks and size > 0 and size + HEADROOM_BYTES > free:
        raise StoreError(
            f"{where} needs {size / 1e6:.0f} MB and {HEADROOM_BYTES / 1e6:.0f} MB to spare, "
            f"{free / 1e6:.0f} MB are free there. Make room, or choose another destination"
        )
    if disk.f_files and files > disk.f_favail:
        raise StoreError(
            f"{where} needs {files} new files, the file system there has room for "
            f"{disk.f_favail}. Remove some, or choose another destination"
        )


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


class Target(Store):
    """A destination.

    First :meth:`compare`, then :meth:`settle_doubts` with the digests of the doubtful files,
    :meth:`check_room`, :meth:`prepare`, and then files arrive, until :meth:`finish`.

    Args:
        place: the destination's path.
        tree: what shall be there.
        copy: the copy's own name.
        patterns: what is left alone there.
        deletes: whether what the source has not is removed.
        checksum: whether contents are compared where size and time agree.
        trusts: whether a host's own file of the right size and time counts as the source's.

    Attributes:
        needed: files that are sent.
        doubtful: files of the right size whose time says nothing.
        touched: files of which only the time or the mode is set.
        extra: entries that are removed.
        received: bytes that have arrived [bytes].
        left: bytes that are to come [bytes].
        unproved: files that came from another host's own copy.
    """

    def __init__(
        self,
        place: bytes,
        tree: Tree,
        copy: str,
        patterns: list[str],
        deletes: bool,
        checksum: bool,
        trusts: bool = False,
    ) -> None:
        self.place = os.path.realpath(place)
        self._copy = copy
        self._patterns = patterns
        self._deletes = deletes
        self._checksum = checksum
        self._trusts = trusts
        root = self.place
        if not tree.is_folder:
            # As a tree of one entry: everything below works with a folder and names in it.
            root, name = os.path.split(self.place)
            tree = tree._replace(files=[tree.files[0]._replace(path=decode(name))])
        super().__init__(tree)
        self.root = root
        self._folders = Folders(root)
        self.needed: list[int] = []
        self.doubtful: list[int] = []
        self.touched: list[int] = []
        self.extra: list[str] = []
        self.unproved: list[int] = []
        self.received = 0
        self.left = 0
        self.finished = False
        self._replaced_bytes = 0
        self._missing: set[int] = set()
        self._sent_here: frozenset[int] = frozenset()
        self._have: dict[int, int] = {}
        self._open: dict[int, tuple[int, Any]] = {}
        self._damaged: dict[int, int] = {}
        self._recent: OrderedDict[tuple[int, int], tuple[bytes, int]] = OrderedDict()
        self._recent_bytes = 0
        self._coming = -1
        self._made: set[str] = set()
        self._parts = -1
        self._names: Names | None = None

    # ---- before anything is changed

    def compare(self) -> None:
        """Finds out what differs from the tree.

        Raises:
            StoreError: what is there is of another kind.
        """
        self._check_kind()
        there = os.path.isdir(self.root)
        for index, file in enumerate(self.tree.files):
            status = self._folders.status(file.path) if there else None
            if status is None or not stat.S_ISREG(status.st_mode):
                if status is not None and stat.S_ISDIR(status.st_mode) and not self._deletes:
                    raise StoreError(
                        f"{self._full(file.path)} is a folder there and a file in the source; "
                        "remove it, or give --delete"
                    )
                self.needed.append(index)
            elif status.st_size != file.size:
                self._replaced_bytes += status.st_blocks * 512
                self.needed.append(index)
            elif self._checksum or status.st_mtime_ns != file.mtime_ns:
                self.doubtful.append(index)
            elif stat.S_IMODE(status.st_mode) != file.mode:
                self.touched.append(index)
        if self._deletes and there and self.tree.is_folder:
            self._find_extra()

    def _check_kind(self) -> None:
        try:
            mode = os.stat(self.place).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        if self.tree.is_folder and not stat.S_ISDIR(mode):
            raise StoreError(f"{self._full('')} is no folder there, and the source is one")
        if not self.tree.is_folder and stat.S_ISDIR(mode):
            raise StoreError(
                f"{os.fsdecode(self.place)} is a folder there; end the destination with / to "
                "copy into it"
            )

    def _find_extra(self) -> None:
        expected: dict[str, set[str]] = {path: set() for path, _, _ in self.tree.folders}
        paths = [file.path for file in self.tree.files] + [path for path, _, _ in self.tree.links]
        for path in paths + [path for path, _, _ in self.tree.folders if path]:
            folder, _, name = path.rpartition("/")
            expected[folder].add(name)
        for folder, names in expected.items():
            try:
                found = list_names(self._folders.folder(folder))
            except OSError:
                continue
            for name in found:
                path = f"{folder}/{name}" if folder else name
                if name not in names and path not in OURS and not self._is_spared(path):
                    self.extra.append(path)

    def _is_spared(self, path: str) -> bool:
        return bool(self._patterns) and is_excluded(path, self._patterns)

    def take_share(self, number: int, shares: int) -> None:
        """Leaves all but one part of the files to other hosts: every ``shares``-th from a number.

        Files of other parts that are there stay as they are.
        """
        self.needed = [index for index in self.needed if index % shares == number]
        self.doubtful = [index for index in self.doubtful if index % shares == number]
        self.touched = [index for index in self.touched if index % shares == number]

    def settle_doubts(self, digests: dict[int, bytes]) -> None:
        """Compares the doubtful files with the digests of the source's."""
        for index in self.doubtful:
            try:
                number = self._folders.open_file(self.tree.files[index].path)
                try:
                    same = index in digests and hash_of(number).digest() == digests[index]
                finally:
                    os.close(number)
            except OSError:
                same = False
            if same:
                self.touched.append(index)
                self.digests[index] = digests[index]
            else:
                self._replaced_bytes += self.tree.files[index].size
                self.needed.append(index)
        self.doubtful = []
        self.needed.sort()
        self._missing = set(self.needed)
        self._sent_here = frozenset(self.needed)
        self.left = sum(self.tree.files[index].size for index in self.needed)

    def check_room(self) -> None:
        """Nothing if the copy fits.

        Raises:
            StoreError: it does not.
        """
        # Old files go as new ones get their names: at worst the largest, and what has none yet,
        # have no room.
        largest = max((self.tree.files[index].size for index in self.needed), default=0)
        wanted = max(self.left - self._replaced_bytes, min(self.left, largest + SYNC_BYTES))
        check_free(self.root, wanted - self._kept_bytes(), len(self.needed))

    def _kept_bytes(self) -> int:
        kept = 0
        folder = os.path.join(self.root, encode(PARTS))
        for index in self.needed:
            with contextlib.suppress(OSError):
                kept += os.lstat(os.path.join(folder, self._part(index))).st_blocks * 512
        return kept

    # ---- receiving

    def prepare(self) -> None:
        """Makes the folders, and takes up what an interrupted copy left.

        Raises:
            StoreError: another copy goes to the same place, or it cannot be written.
        """
        try:
            os.makedirs(self.root, 0o755, exist_ok=True)
            self._parts = lock_folder(self._folders, PARTS, self._copy)
            for path, _, _ in self.tree.folders:
                if path:
                    self._make_folder(path)
                else:
                    self._make_writable(self._folders.folder(""))
            for index in self.needed:
                path = self.tree.files[index].path
                status = self._folders.status(path)
                if status is not None and stat.S_ISDIR(status.st_mode):
                    self._folders.remove(path)
            self._take_up_parts()
            self._names = Names(self._parts, self._give_name)
        except OSError as error:
            raise StoreError(self._says(error)) from error

    def close(self) -> None:
        """Gives back its descriptors; nothing on the disk changes."""
        if self._names is not None:
            self._names.end()
        self._folders.close()

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
            self._make_writable(self._folders.folder(path))

    def _make_writable(self, folder: int) -> None:
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        if mode & 0o300 != 0o300:
            os.fchmod(folder, mode | 0o300)

    def _take_up_parts(self) -> None:
        large = [i for i in self.needed if self.tree.files[i].size > FRAME_BYTES]
        wanted = {self._part(index): index for index in large}
        for text in list_names(self._parts):
            name = encode(text)
            index = wanted.get(name)
            if index is None:
                if name == OWNER:
                    continue
                remove_entry(self._parts, name)
                continue
            number = self._open_part(name)
            size = os.fstat(number).st_size
            if size > self.tree.files[index].size:
                os.ftruncate(number, 0)
                size = 0
            self._open[index] = (number, hash_of(number, size))
            os.lseek(number, size, os.SEEK_SET)
            self._have[index] = size
            self.left -= size

    def _open_part(self, name: bytes) -> int:
        # One that had all come may be read-only already; a link in its place is not followed.
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._parts)
        try:
            os.chmod(f"/proc/self/fd/{found}", 0o600)
        finally:
            os.close(found)
        return os.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=self._parts)

    def _part(self, index: int) -> bytes:
        file = self.tree.files[index]
        text = f"{file.size} {file.mtime_ns} ".encode() + encode(file.path)
        return hashlib.sha256(text).hexdigest()[:32].encode()

    def wants(self) -> list[tuple[int, int]]:
        """(index, offset) of what is still to come, in the order of the tree."""
        self._coming = -1  # another link may begin with another file
        return [
            (index, self._have.get(index, 0)) for index in self.needed if index in self._missing
        ]

    def lacks(self, index: int) -> bool:
        """Whether the file is still to come."""
        return index in self._missing

    @property
    def arrived(self) -> bool:
        """Whether nothing is to come any more."""
        return not self._missing

    @property
    def complete(self) -> bool:
        """Whether everything has its name too."""
        return self.arrived and not self._names

    def write(self, index: int, offset: int, data: bytes, frame: bytes) -> None:
        """Takes a piece of a file; ``frame`` is what it came in."""
        if index not in self._missing or offset != self._have.get(index, 0):
            raise LinkError("a piece came that nobody asked for")
        if index not in self._open:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            number = os.open(self._part(index), flags, 0o600, dir_fd=self._parts)
            self._open[index] = (number, hashlib.sha256())
        number, digest = self._open[index]
        _write_all(number, data)
        digest.update(data)
        with self.changed:
            self._have[index] = offset + len(data)
            if index != self._coming:
                self._coming = index
                self.begun.append(index)
            self._remember(index, offset, frame, len(data))
            self._count(len(data))
            self.changed.notify_all()

    def end(self, index: int, digest: bytes, origin: int) -> None:
        """A file has all arrived; it gets its name if it is what was sent.

        Raises:
            LinkError: it is not; it must be sent again.
            StoreError: it never is.
        """
        file = self.tree.files[index]
        if index not in self._open or self._have.get(index) != file.size:
            raise LinkError("a file ended that had not all come")
        number, own = self._open.pop(index)
        if own.digest() != digest:
            os.ftruncate(number, 0)
            os.close(number)
            with self.changed:
                self._have[index] = 0
                self.left += file.size
            self._complain(index)
        os.fchmod(number, file.mode)
        os.utime(number, ns=(file.mtime_ns, file.mtime_ns))
        os.close(number)
        self._take(index, digest, origin)

    def whole(self, index: int, digest: bytes, origin: int, data: bytes, frame: bytes) -> None:
        """A small file has arrived in one piece; raises as :meth:`end`."""
        file = self.tree.files[index]
        if index not in self._missing or len(data) != file.size:
            raise LinkError("a file came that nobody asked for")
        if hashlib.sha256(data).digest() != digest:
            self._complain(index)
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
            self._remember(index, 0, frame, len(data))
            self._count(len(data))
        self._take(index, digest, origin)

    def give_up(self, index: int, reason: str) -> None:
        """Lets go of what had come of a file that will not come."""
        if index in self._open:
            os.close(self._open.pop(index)[0])
            with contextlib.suppress(OSError):
                os.unlink(self._part(index), dir_fd=self._parts)
        with self.changed:
            if index in self._missing:
                self._missing.discard(index)
                self.left -= self.tree.files[index].size - self._have.get(index, 0)
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
            offset = self._have.get(index, 0)
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
        assert self._names is not None, "it was prepared"
        if self._names:
            self._names.settle()
        self._names.end()
        problems: list[str] = []

        def attempt(path: str, action: Any, *arguments: Any) -> None:
            try:
                action(*arguments)
            except OSError as error:
                problems.append(f"{self._full(path)}: {error.strerror}")

        for index in self.touched:
            file = self.tree.files[index]
            attempt(file.path, self._touch, file)
        for path, to, mtime_ns in self.tree.links:
            attempt(path, self._link, path, to, mtime_ns)
        for path in self.extra:
            attempt(path, self._folders.remove, path)
        self._drop_parts(keep=bool(self._missing))
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
                if stat.S_ISDIR(status.st_mode) and not self._deletes:
                    raise OSError(errno.EISDIR, "a folder in the place of a link; give --delete")
                self._folders.remove(path)
                parent, name = self._folders.of(path)
            os.symlink(encode(to), name, dir_fd=parent)
        os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=parent, follow_symlinks=False)

    def abandon(self, keep: bool) -> None:
        """Ends an unfinished copy; of large files, what has come stays if ``keep``."""
        if not self.finished and self._parts >= 0:
            if self._names is not None:
                with contextlib.suppress(OSError):
                    self._names.settle()
                self._names.end()
            self._drop_parts(keep)

    def _drop_parts(self, keep: bool) -> None:
        for number, _ in self._open.values():
            os.close(number)
        self._open = {}
        with contextlib.suppress(OSError):
            for text in list_names(self._parts):
                name = encode(text)
                size = os.stat(name, dir_fd=self._parts).st_size
                if not keep or name == OWNER or size < KEPT_PART_BYTES:
                    os.unlink(name, dir_fd=self._parts)
            os.rmdir(encode(PARTS), dir_fd=self._folders.folder(""))
        os.close(self._parts)
        self._parts = -1

    def _count(self, size: int) -> None:
        self.received += size
        self.left -= size
        if self._names is not None:
            self._names.count(size)

    def _remember(self, index: int, offset: int, frame: bytes, size: int) -> None:
        self._recent[index, offset] = (frame, size)
        self._recent_bytes += len(frame)
        while self._recent_bytes > RECENT_BYTES:
            _, (old, _) = self._recent.popitem(last=False)
            self._recent_bytes -= len(old)

    def _complain(self, index: int) -> None:
        self._damaged[index] = self._damaged.get(index, 0) + 1
        path = self._full(self.tree.files[index].path)
        if self._damaged[index] >= MOST_DAMAGED:
            raise StoreError(
                f"{path} arrived damaged {MOST_DAMAGED} times. Is the memory or the network "
                "between the hosts faulty?"
            )
        raise LinkError(f"{path} arrived damaged")

    def _take(self, index: int, digest: bytes, origin: int) -> None:
        """A file is what was sent: others can have it, and it gets its name when it is on disk."""
        assert self._names is not None, "it was prepared"
        with self.changed:
            self._names.add(index, self._part(index))
            self.digests[index] = digest
            if origin:
                self.unproved.append(index)
            self._have[index] = self.tree.files[index].size
            self._missing.discard(index)
            self.begun.append(index)
            self.changed.notify_all()

    def _give_name(self, index: int, part: bytes) -> None:
        parent, name = self._folders.of(self.tree.files[index].path)
        os.rename(part, name, src_dir_fd=self._parts, dst_dir_fd=parent)

    # ---- feeding others

    def has_begun(self, index: int) -> bool:
        return index not in self._missing or index == self._coming

    def is_own(self, index: int) -> bool:
        return index not in self._sent_here

    def origin(self, index: int) -> int:
        if self._trusts:
            return 0
        return int(index in self.unproved or (self.is_own(index) and index not in self.digests))

    def ready(self, index: int, offset: int, timeout: float) -> int:
        size = self.tree.files[index].size

        def far() -> int:
            if index in self.gone:
                return -2
            if index not in self._missing:
                return size
            have = self._have.get(index, 0)
            return have if have > max(offset, 0) else -1

        with self.changed:
            self.changed.wait_for(lambda: far() != -1, timeout)
            if far() == -2:
                raise Gone(self.gone[index])
            return far()

    def recent(self, index: int, offset: int) -> tuple[bytes, int] | None:
        with self.changed:
            return self._recent.get((index, offset))

    def open(self, index: int) -> int:
        path = self.tree.files[index].path
        full = os.path.join(self.root, encode(path))
        if index in self._missing or (self._names is not None and index in self._names):
            full = os.path.join(self.root, encode(PARTS), self._part(index))
        try:
            return os.open(full, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            # It got its name in this moment.
            return os.open(os.path.join(self.root, encode(path)), os.O_RDONLY | os.O_NOFOLLOW)

    def problem(self, index: int, number: int) -> str:
        return "" if index in self.digests else super().problem(index, number)

    # ---- words

    def _full(self, path: str) -> str:
        return shown(os.fsdecode(self.root) + (f"/{path}" if path else ""))

    def _says(self, error: OSError) -> str:
        path = error.filename
        text = shown(os.fsdecode(path)) if path is not None else ""
        where = text if text.startswith("/") else self._full(text)
        return f"{where}: {error.strerror}"

    def explain(self, error: OSError) -> str:
        """An error of writing, for people."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"{self._full('')}: {error.strerror}. Make room there and call again; what is "
                "complete is kept"
            )
        return self._says(error)


def _write_all(number: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(number, view) :]
