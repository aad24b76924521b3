"""Keeps shards that lie behind a URL on this host's disk, up to a size.

All processes of a host share the folder: ranks, their loader processes, and other runs. Locks on
its files coordinate them, which the kernel releases when a process ends:

- exclusive on ``.NAME.lock``: a process fetches this shard into ``.NAME.part``, which gets the name
  of the shard when it is whole and its SHA-256 is right;
- shared on a shard: a process reads it, so it is not removed;
- exclusive on ``.lock``: a process makes room.

A process waits only for exclusive locks, whose holders wait for nothing but the network and the
disk. It never waits for the readers of a shard: a rank keeps shards open while it waits in a
collective for ranks that may wait here. Processes that are forked close the exclusive locks, so
they end with the process that took them.

The time of a shard's last change is the time of its last use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from http.client import IncompleteRead
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from hvd_elastic.checkpoint.whole_files import remove_leftovers
from hvd_elastic.data.files import open_part
from hvd_elastic.data.index import Index, Shard, load_table, table_path
from hvd_elastic.data.remote import RemoteFolder, refuse_web_page
from hvd_elastic.errors import DataError, StrangerError
from hvd_elastic.own_files import check_owner, user_words
from hvd_elastic.replaced_files import write_whole

_CONNECTIONS = 4
"""Shards that a rank fetches ahead at the same time: one connection seldom fills a fast link. As
many threads more make the next ones ready and bring those before to the disk meanwhile."""
_MOST_AHEAD = 256
"""Shards that are looked at for each call of ``prefetch``, which has to be quick."""
_OWN = re.compile(r"(?P<part>\.?)[0-9a-f]{16}-.+")
_LOCK = ".lock"


class ShardCache:
    """Shards of a remote folder on the local disk.

    Args:
        source: where they come from.
        folder: of the cache; made if it is not there.
        tables: folder of their tables; None: they lie beside the shards.
        limit_bytes: size of all shards in the folder; None: no limit. It is exceeded only by shards
            that are being read and by tables.

    Raises:
        DataError: the folder cannot be written to, or is another user's.
    """

    def __init__(
        self,
        source: RemoteFolder,
        folder: Path,
        index: Index,
        tables: Path | None,
        limit_bytes: int | None,
    ) -> None:
        self._source, self._folder, self._limit = source, folder, limit_bytes
        self._index, self._tables = index, tables
        self._coming: deque[Shard] = deque()
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
            _require_trusted(folder)
            if not os.access(folder, os.W_OK):
                is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
                number = errno.EROFS if is_read_only else errno.EACCES
                raise OSError(number, os.strerror(number), str(folder))
        remove_leftovers(folder)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_coming": deque()}

    def path(self, shard: Shard) -> Path:
        """Return where a shard lies while it is in the cache; its table lies beside it.

        The same shard has another table where it was indexed otherwise.
        """
        kind = f"{shard.sha256} {self._index.version} {self._index.columns(shard)}"
        name = hashlib.sha256(kind.encode()).hexdigest()[:16]
        return self._folder / f"{name}-{Path(shard.name).name}"

    def open(self, shard: Shard) -> int:
        """Return a descriptor of a shard, which stays in the cache until it is closed.

        Raises:
            DataError: it cannot be fetched or kept.
        """
        path = self.path(shard)
        while True:
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                self._fetch(shard)
                continue
            fcntl.flock(file, fcntl.LOCK_SH)
            now = os.fstat(file)
            if now.st_nlink and now.st_size == shard.bytes and table_path(path).exists():
                now_ns = time.time_ns()  # the kernel's own clock for files moves by milliseconds
                try:
                    os.utime(file, ns=(now_ns, now_ns))
                except PermissionError:  # another user's, who may let us write it
                    with contextlib.suppress(PermissionError):
                        os.utime(file)
                return file
            os.close(file)
            if now.st_nlink:  # else it was removed meanwhile
                path.unlink(missing_ok=True)

    def prefetch(self, shards: Sequence[Shard]) -> None:
        """Fetch shards that will be read, in this order, as many as fit; replaces earlier calls.

        Threads do it, and end with it. What cannot be fetched is left to :meth:`open`.
        """
        self._coming.clear()
        now_ns, room = time.time_ns(), self._limit
        wanted: list[Shard] = []
        for shard in islice((each for each in shards if each.examples), _MOST_AHEAD):
            if room is not None and (room := room - shard.bytes) < 0:
                break
            wanted.append(shard)
        # What is needed last counts as least recently used.
        for place, shard in enumerate(reversed(wanted)):
            with contextlib.suppress(OSError):
                os.utime(self.path(shard), ns=(now_ns + place, now_ns + place))
        coming = self._coming = deque(each for each in wanted if not self.path(each).exists())
        work = (coming, now_ns, threading.Semaphore(_CONNECTIONS))
        for _ in range(min(2 * _CONNECTIONS, len(coming))):
            threading.Thread(target=self._fetch_ahead, args=work, daemon=True).start()

    def _fetch_ahead(
        self, coming: deque[Shard], used_before_ns: int, connection: threading.Semaphore
    ) -> None:
        with contextlib.suppress(IndexError, DataError):
            while True:
                self._fetch(coming.popleft(), connection, used_before_ns=used_before_ns)

    def _fetch(
        self,
        shard: Shard,
        connection: threading.Semaphore | None = None,
        *,
        used_before_ns: int | None = None,
    ) -> None:
        """Fetch a shard unless it is there.

        Args:
            connection: taken while the shard is received; None: at once.
            used_before_ns: remove only shards that were used before this time to make room, and
                fetch nothing if that is not enough or another process is fetching the shard; None:
                the shard is needed now.
        """
        path = self.path(shard)
        ahead = used_before_ns is not None
        with (
            self._explained(),
            _locked(path.with_name(f".{path.name}{_LOCK}"), wait=not ahead) as locked,
        ):
            if not locked or path.exists():
                return
            with open_part(path) as file:
                part = Path(file.name)
                try:
                    if self._reserve(file.fileno(), shard.bytes, used_before_ns):
                        self._fetch_table(shard)
                        with connection or contextlib.nullcontext():
                            self._source.receive(shard.name, partial(self._write, file, shard))
                        os.fsync(file.fileno())
                        part.replace(path)
                finally:
                    part.unlink(missing_ok=True)

    def _fetch_table(self, shard: Shard) -> None:
        path, name = self.path(shard), f"{shard.name}.npy"
        folder: RemoteFolder | Path = self._source
        if self._tables is None:
            table = self._source.read(name)
        else:
            folder = self._tables
            try:
                table = (folder / name).read_bytes()
            except OSError as error:
                raise DataError(f"{folder / name} cannot be read: {error.strerror}") from error
        # As a new file: another process may have mapped the old one.
        write_whole(table_path(path), table, synced=True)
        try:
            load_table(path, len(self._index.columns(shard)), shard.examples)
        except DataError:
            raise DataError(
                f"{folder}/{name} is not the table that belongs to the index there; upload "
                "shards, tables and index again"
            ) from None

    def _write(self, file: BinaryIO, shard: Shard, pieces: Iterator[bytes]) -> None:
        """Write a shard from its pieces.

        Raises:
            IncompleteRead: it ends early.
            DataError: it is another one than that of the index, or cannot be written.
        """
        digest, size = hashlib.sha256(), 0
        file.seek(0)
        for piece in pieces:
            if not size:
                refuse_web_page(piece, f"{self._source}/{shard.name}")
            digest.update(piece)
            with self._explained():
                file.write(piece)
                file.flush()
            size += len(piece)
        if size < shard.bytes:
            raise IncompleteRead(b"", shard.bytes - size)
        if digest.hexdigest() != shard.sha256:
            raise DataError(
                f"{self._source}/{shard.name} is not the file that the index there describes "
                "(SHA-256); upload the shards and their index again"
            )

    def _reserve(self, file: int, size: int, used_before_ns: int | None) -> bool:
        """Make room for a file of this size, and let it have the size; return whether it may."""
        with _locked(self._folder / _LOCK, wait=True):
            if self._limit is not None:
                excess = self._make_room(self._limit - size, used_before_ns)
                if excess > 0 and used_before_ns is not None:
                    return False
            os.posix_fallocate(file, 0, size)
            return True

    def _make_room(self, most: int, used_before_ns: int | None) -> int:
        """Remove shards, least recently used first, until all have ``most`` bytes together.

        Returns:
            How much they have in excess of it [bytes]; below 0: less.
        """
        found = []
        for entry in os.scandir(self._folder):
            named = _OWN.fullmatch(entry.name)
            if named and not entry.name.endswith((".npy", _LOCK)):
                with contextlib.suppress(FileNotFoundError):
                    now = entry.stat()
                    found.append((now.st_mtime_ns, now.st_size, Path(entry.path), named["part"]))
        excess = sum(size for _, size, _, _ in found) - most
        for used_ns, size, path, is_part in sorted(found):
            if excess <= 0:
                break
            late = used_before_ns is not None and used_ns >= used_before_ns and not is_part
            if not late and _remove_unused(path):
                excess -= size
        return excess

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"the cache {error.filename or self._folder} cannot be written: {error.strerror}; "
                "name another folder by cache=, or a limit that fits on its disk by cache_bytes="
            ) from error


def _require_trusted(folder: Path) -> None:
    """Raise DataError for a folder of another user: what lies there is not compared again.

    One in which not all users may write is trusted if its owner shares it with a group of this
    user. Root, which containers run as, decides itself whose folder it takes.
    """
    found = folder.stat()
    in_group = found.st_gid in (os.getegid(), *os.getgroups())
    shared = os.geteuid() == 0 or (in_group and found.st_mode & stat.S_IWGRP)
    if shared and not found.st_mode & stat.S_IWOTH:
        return
    try:
        check_owner(folder)
    except StrangerError:
        raise DataError(
            f"the cache {folder} belongs to {user_words(found.st_uid)}, who could put other data "
            "there; name another folder by cache=, or have it shared with a group: chmod g+w,o-w"
        ) from None


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a file, which is there only meanwhile; yield False if another process has locked it."""
    while True:
        with _open_here(path, os.O_RDONLY | os.O_CREAT) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            if _has_name(file, path):
                try:
                    yield True
                finally:
                    path.unlink(missing_ok=True)
                return


def _has_name(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _remove_unused(path: Path) -> bool:
    """Remove a shard or the rest of a broken fetch unless a process uses it; return whether."""
    if path.name.startswith("."):
        with _locked(path.with_suffix(_LOCK), wait=False) as locked:
            if locked:
                path.unlink(missing_ok=True)
            return locked
    try:
        with _open_here(path, os.O_RDONLY) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            table_path(path).unlink(missing_ok=True)
            return True
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False


_opening = threading.Lock()
_open: set[int] = set()


@contextlib.contextmanager
def _open_here(path: Path, flags: int) -> Iterator[int]:
    """Open a file that processes which are forked meanwhile close: a lock on it stays here."""
    with _opening:
        file = os.open(path, flags | os.O_CLOEXEC, 0o666)
        _open.add(file)
    try:
        yield file
    finally:
        with _opening:
            _open.discard(file)
            os.close(file)


def _close_after_fork() -> None:
    for file in _open:
        os.close(file)
    _open.clear()
    _opening.release()


os.register_at_fork(
    before=_opening.acquire,
    after_in_parent=_opening.release,
    after_in_child=_close_after_fork,
)
