"""Find out what a destination lacks of a tree of files, without changing anything there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Collection

from hvd_elastic.programs.copy.renaming import SYNC_BYTES
from hvd_elastic.programs.copy.tree import (
    OURS,
    PARTS,
    File,
    Folders,
    Tree,
    decode,
    encode,
    identity,
    is_excluded,
    is_foreign,
    list_names,
    shown,
)
from hvd_elastic.programs.file_hash import hash_of

# Space that must stay free on the file system after a copy.
HEADROOM_BYTES = 16 << 20


class StoreError(Exception):
    """The destination cannot take the copy; the message says why."""


def check_free(place: bytes, size: int, files: int) -> None:
    """Check that this number of bytes and of new files fits on the file system.

    Raises:
        StoreError: it does not.
    """
    there = place
    while not os.path.isdir(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    disk = os.statvfs(there)
    free = disk.f_bavail * disk.f_frsize
    where = shown(os.fsdecode(place))
    # Where a file system reports no blocks at all (such as /proc), only writing shows the error.
    if disk.f_blocks and size > 0 and size + HEADROOM_BYTES > free:
        raise StoreError(
            f"{where} needs {_size(size)} and {_size(HEADROOM_BYTES)} to spare, {_size(free)} are "
            "free there. Make room, or choose another destination"
        )
    if disk.f_files and files > disk.f_favail:
        raise StoreError(
            f"{where} needs {files} new files, the file system there has room for "
            f"{disk.f_favail}. Remove some, or choose another destination"
        )


def _size(size):  # type: (float) -> str
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def part_name(file: File) -> bytes:
    """Return the name of a file in the folder of partial files."""
    text = f"{file.size} {file.mtime_ns} ".encode() + encode(file.path)
    return hashlib.sha256(text).hexdigest()[:32].encode()


class Comparison:
    """The changes that make a destination equal to the source's tree.

    First call :meth:`settle_doubts`, then :meth:`check_room`.

    Args:
        place: path of the destination.
        tree: files that the destination shall have.
        patterns: patterns of paths that are not removed there.
        deletes: whether entries that the source does not have are removed.
        checksum: whether contents are compared even where size and time agree.
        passing: those of the patterns that keep nothing below a path that is to be removed.
        trusted: identities of files that are the source's, whoever owns them, by path.

    Attributes:
        tree: the tree; a single file is turned into a folder with one entry.
        folders: open folders of the destination.
        needed: files to be sent, by index.
        doubtful: files whose size is right and whose time or owner differs (or that are to be
            compared).
        touched: files of which only the time or the mode is to be set.
        share: number of files that this host is to have.
        extra: paths to be removed.
        digests: sha256 of doubtful files that proved equal to the source's.

    Raises:
        StoreError: there is a file in place of a folder or the reverse.
    """

    def __init__(
        self,
        place: bytes,
        tree: Tree,
        patterns: list[str],
        deletes: bool,
        checksum: bool,
        passing: Collection[str] = (),
        trusted: dict[str, tuple[int, int] | None] | None = None,
    ) -> None:
        root = place = os.path.realpath(place)
        if not tree.is_folder:
            # Treat it as a tree of one entry: everything below expects a folder with names in it.
            root, name = os.path.split(place)
            path = decode(name)
            attributes = [(path, found) for _, found in tree.attributes]
            tree = tree._replace(files=[tree.files[0]._replace(path=path)], attributes=attributes)
        self.tree = tree
        self.folders = Folders(root)
        self.deletes = deletes
        self.trusted = trusted or {}
        self._patterns = patterns
        self._keeping = [pattern for pattern in patterns if pattern not in passing]
        self.needed: list[int] = []
        self.doubtful: list[int] = []
        self.touched: list[int] = []
        self.share = len(tree.files)
        self.extra: list[str] = []
        self.digests: dict[int, bytes] = {}
        self._replaced_bytes = 0
        self._check_kind(place)
        there = os.path.isdir(root)
        for index, file in enumerate(tree.files):
            status = self.folders.status(file.path) if there else None
            if status is None or not stat.S_ISREG(status.st_mode):
                if status is not None and stat.S_ISDIR(status.st_mode):
                    self._check_may_go(file.path)
                self.needed.append(index)
            elif status.st_size != file.size:
                self._replaced_bytes += status.st_blocks * 512
                self.needed.append(index)
            elif (
                checksum
                or status.st_mtime_ns != file.mtime_ns
                or (
                    is_foreign(status)
                    and self.trusted.get(file.path) != identity(status)
                    and self.folders.others_write(file.path)
                )
            ):
                self.doubtful.append(index)
            elif stat.S_IMODE(status.st_mode) != file.mode:
                self.touched.append(index)
        if deletes and there and tree.is_folder:
            self._find_extra()

    def _check_kind(self, place: bytes) -> None:
        try:
            mode = os.stat(place).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        if self.tree.is_folder and not stat.S_ISDIR(mode):
            raise StoreError(f"{self.folders.shown()} is no folder there, and the source is one")
        if not self.tree.is_folder and stat.S_ISDIR(mode):
            raise StoreError(
                f"{os.fsdecode(place)} is a folder there; end the destination with / to copy "
                "into it"
            )

    def _check_may_go(self, path: str) -> None:
        """Check that the folder in the place of a file of the source may be removed."""
        where = f"{self.folders.shown(path)} is a folder there and a file in the source"
        if not self.deletes:
            raise StoreError(f"{where}; remove it, or give --delete")
        if not self.is_removable(path):
            raise StoreError(f"{where}, and has files that --exclude keeps; move these away")

    def _find_extra(self) -> None:
        expected: dict[str, set[str]] = {path: set() for path, _, _ in self.tree.folders}
        for path in self.tree.paths + [path for path, _, _ in self.tree.folders if path]:
            folder, _, name = path.rpartition("/")
            expected[folder].add(name)
        for folder, names in expected.items():
            try:
                found = list_names(self.folders.folder(folder))
            except OSError:
                continue
            for name in found:
                path = f"{folder}/{name}" if folder else name
                known = name in names or path in OURS
                if not known and not is_excluded(path, self._patterns):
                    self.extra += self.removable(path)

    def removable(self, path: str) -> list[str]:
        """Return what may be removed of an entry: all of it, or the parts of a folder that hold
        nothing that a pattern matches.
        """
        if is_excluded(path, self._keeping):
            return []
        try:
            names = list_names(self.folders.folder(path)) if self._keeping else []
        except OSError:  # no folder; or the error is reported when it is removed
            return [path]
        below = [(f"{path}/{name}", self.removable(f"{path}/{name}")) for name in names]
        if all(parts == [each] for each, parts in below):
            return [path]
        return [part for _, parts in below for part in parts]

    def is_removable(self, path: str) -> bool:
        """Return whether nothing in an entry matches a pattern."""
        return self.removable(path) == [path]

    def take_share(self, number: int, shares: int) -> None:
        """Keep only this host's share of the files: every ``shares``-th, beginning with ``number``.

        Existing files of other shares stay as they are.
        """
        self.share = len(range(number, self.share, shares))
        for files in (self.needed, self.doubtful, self.touched):
            files[:] = [index for index in files if index % shares == number]

    def settle_doubts(self, digests: dict[int, bytes]) -> None:
        """Compare the doubtful files with the digests of the source's files."""
        for index in self.doubtful:
            file = self.tree.files[index]
            try:
                number = self.folders.open_file(file.path)
                try:
                    same = index in digests and hash_of(number).digest() == digests[index]
                    status = os.fstat(number)
                    found = (status.st_mtime_ns, stat.S_IMODE(status.st_mode))
                finally:
                    os.close(number)
            except OSError:
                same, found = False, (0, 0)
            if same:
                if found != (file.mtime_ns, file.mode):
                    self.touched.append(index)
                self.digests[index] = digests[index]
            else:
                self._replaced_bytes += file.size
                self.needed.append(index)
        self.doubtful = []
        self.needed.sort()

    @property
    def needed_bytes(self) -> int:
        """Size of the files to be sent [bytes]."""
        return sum(self.tree.files[index].size for index in self.needed)

    def check_room(self) -> None:
        """Check that the copy fits on the file system.

        Raises:
            StoreError: it does not.
        """
        # An old file is freed when the new one is renamed over it. So at any time the space needed
        # in addition is at most the largest file and the files that wait for the next sync.
        stored = dict(self.tree.stored)
        sizes = [stored.get(index, self.tree.files[index].size) for index in self.needed]
        left, largest = sum(sizes), max(sizes, default=0)
        wanted = max(left - self._replaced_bytes, min(left, largest + SYNC_BYTES))
        check_free(self.folders.root, wanted - self._kept_bytes(), len(self.needed))

    def _kept_bytes(self) -> int:
        kept = 0
        folder = os.path.join(self.folders.root, encode(PARTS))
        for index in self.needed:
            with contextlib.suppress(OSError):
                part = os.path.join(folder, part_name(self.tree.files[index]))
                kept += os.lstat(part).st_blocks * 512
        return kept
