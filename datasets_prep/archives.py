"""Gets and checks archives as they were published."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from hvd_elastic.data.files import disk_errors, file_size, open_part, write_pieces
from hvd_elastic.data.remote import RemoteFolder
from hvd_elastic.data.tar import linked, require_end
from hvd_elastic.errors import DataError

_BLOCK = 1 << 20


def require_md5(path: Path, published: str) -> None:
    """Raise DataError if a file has another MD5 than the published one."""
    file_size(path)
    found = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    if found.hexdigest() != published:
        raise DataError(
            f"{path} has MD5 {found.hexdigest()}, and the published file {published}: it is cut "
            "off, changed or another edition; copy it again"
        )


def download(url: str, path: Path, published: str) -> None:
    """Get an archive unless it is there; it appears under its name when its MD5 is right.

    Raises:
        DataError: it cannot be read or written, or has another MD5, also if it is there.
    """
    if path.exists():
        require_md5(path, published)
        return
    place = urlsplit(url)
    folder, _, name = place.path.rpartition("/")
    source = RemoteFolder(urlunsplit(place._replace(path=folder)))
    with disk_errors(path), open_part(path) as file:
        part = Path(file.name)
        try:
            source.receive(name, partial(write_pieces, file))
            require_md5(part, published)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def opened_gzip(path: Path) -> Iterator[tarfile.TarFile]:
    """Open a tar archive that gzip has packed. At the end the rest is read: a checksum lies there.

    Raises:
        TarError, or one of ``packed.BROKEN``: it is damaged.
    """
    file_size(path)
    with gzip.open(path) as stream:
        with tarfile.open(fileobj=stream, mode="r:") as file:
            yield file
        while stream.read(_BLOCK):
            pass


class Member(NamedTuple):
    """A file in a tar archive: its name, and where its bytes lie."""

    name: str
    offset: int
    size: int


def tar_files(file: tarfile.TarFile, where: str) -> Iterator[Member]:
    """Yield the files of an archive; hard links lead to the file that they name.

    Symbolic links are left out and named, for which ``where`` is the archive's name.

    Raises:
        DataError: a hard link leads nowhere, or the archive is cut off or damaged.
    """
    before: dict[str, Member] = {}
    symbolic = []
    for member in file:
        found = Member(member.name, member.offset_data, member.size)
        if member.islnk():
            found = linked(member, before, where, "archive")._replace(name=member.name)
        elif member.issym():
            symbolic.append(member.name)
            continue
        elif not member.isfile():
            continue
        before[found.name] = found
        yield found
    require_end(file.fileobj, file.offset, where, "an archive")
    if symbolic:
        print(
            f"{where}: {len(symbolic)} symbolic links are left out: {', '.join(symbolic[:5])}",
            file=sys.stderr,
        )
