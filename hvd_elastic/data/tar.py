"""Examples in tar files, in WebDataset's layout: members ``KEY.FIELD``, those of a key together."""

from __future__ import annotations

import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from hvd_elastic.data.example import Example, as_bytes, readable
from hvd_elastic.data.files import compression, file_size
from hvd_elastic.errors import DataError

_BLOCK = tarfile.BLOCKSIZE
_REST_BYTES = 1 << 20
_NAME_BYTES = 100  # of a header's first field; the whole name, where it is this short


_TEMPLATE = tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT)
_SIZE, _CHECKSUM = slice(124, 135), slice(148, 156)  # of a header
_PREFIX = slice(345, 500)  # folders of a long name

T = TypeVar("T")


class Tar:
    """The layout; see :class:`hvd_elastic.data.index.Layout`."""

    suffix = ".tar"
    end = bytes(2 * _BLOCK)

    def encode(
        self, key: str, fields: Sequence[str], values: Sequence[bytes]
    ) -> tuple[bytes, Example]:
        """Return the members of an example, and where in them each value lies.

        >>> record, example = Tar().encode("a", ["txt"], [b"hello"])
        >>> len(record), record[:5], record[example.offsets[0]:][:5]
        (1024, b'a.txt', b'hello')
        """
        pieces: list[bytes] = []
        offsets = []
        at = 0
        for field, value in zip(fields, values, strict=True):
            header = _header(f"{key}.{field}", len(value))
            offsets.append(at + len(header))
            pieces += header, value, bytes(-len(value) % _BLOCK)
            at = offsets[-1] + len(value) + len(pieces[-1])
        sizes = tuple(map(len, values))
        label = int(values[fields.index("cls")]) if "cls" in fields else -1
        length = offsets[-1] + sizes[-1]
        place = Example(key, 0, length, tuple(fields), tuple(offsets), sizes, label)
        return b"".join(pieces), place

    def scan(
        self, path: Path, left_out: Counter[str] | None = None, *, label: bool = True
    ) -> Iterator[Example]:
        """Yield the examples of a shard.

        Args:
            path: of the shard.
            left_out: counts members that are part of no example, by name.
            label: for TFRecord.

        Raises:
            OSError: it cannot be read.
            DataError: it is no tar file, compressed, cut off, or not in the layout; names where.
        """
        size = file_size(path)
        if size == 0:
            raise DataError(f"{path} is empty (0 bytes); copy or make it again")
        others = Counter[str]() if left_out is None else left_out
        try:
            with (
                path.open("rb") as raw,
                tarfile.open(fileobj=raw, mode="r:", encoding="utf-8") as file,
            ):
                before: set[str] = set()
                for key, members in groupby(_files(file, path, size, others), key=_key):
                    if key in before:
                        raise DataError(
                            f"{path}: the members of {key!r} do not lie together, or two examples "
                            "have this name; each example needs a name of its own"
                        )
                    before.add(key)
                    yield _example(raw, path, key, list(members))
                require_end(raw, file.offset, path, "a shard")
        except tarfile.ReadError as error:
            if how := compression(path):
                raise DataError(f"{path} {how}") from error
            raise DataError(
                f"{path} is not a whole tar file ({error}); copy or make it again"
            ) from error


def require_key(record: bytes, key: bytes, field: str, offset: int, size: int) -> None:
    """Raise ValueError unless a record has the header of its first member before the data.

    Args:
        record: of the example.
        key: of the example.
        field: that the record stores first.
        offset, size: of its value in the record.
    """
    begin, name = offset - _BLOCK, b"%b.%b" % (key, field.encode(errors="surrogateescape"))
    if record[begin : begin + len(name) + 1] != name + b"\0":
        _require_name(record[:offset], name)
    if record[begin:offset][_SIZE] != b"%011o" % size and size < 1 << 33:
        if int(record[begin:offset][_SIZE].strip(b"\0 ") or b"0", 8) != size:
            shown = name.decode(errors="replace")
            raise ValueError(f"{shown} has another size in its place")


def _require_name(headers: bytes, name: bytes) -> None:
    """Raise ValueError unless the headers of a member, the last block being its own, name it.

    Fields are lower case. A long name is in a header of its own before (PAX, GNU), or its folders
    are apart.
    """
    own, name = headers[-_BLOCK:].lower(), name.lower()
    stored, folder = (part.partition(b"\0")[0] for part in (own[:_NAME_BYTES], own[_PREFIX]))
    if name in (stored, folder + b"/" + stored):
        return
    if len(headers) == _BLOCK or name not in headers.lower():
        raise ValueError(f"there is {stored[:40].decode(errors='replace')!r} in its place")


def _header(name: str, size: int) -> bytes:
    """Return the header of a member; tarfile needs five times as long for a short name."""
    short = as_bytes(name)
    if len(short) > _NAME_BYTES or size >= 1 << 33:
        member = tarfile.TarInfo(name)
        member.size = size
        return member.tobuf(tarfile.PAX_FORMAT)
    header = bytearray(_TEMPLATE)
    header[: len(short)] = short
    header[_SIZE] = b"%011o" % size
    header[_CHECKSUM] = b" " * 8
    header[_CHECKSUM] = b"%06o\0 " % sum(header)
    return bytes(header)


def _key(member: tarfile.TarInfo) -> str:
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.partition(".")[0]


def linked(member: tarfile.TarInfo, before: Mapping[str, T], where: object, what: str) -> T:
    """Return the file that a hard link leads to.

    Args:
        member: the hard link.
        before: the files before it in the archive, by name.
        where: path or name of the archive, for messages.
        what: what the archive is called there.

    Raises:
        DataError: the link leads nowhere.
    """
    target = before.get(member.linkname)
    if target is None:
        raise DataError(
            f"{where}: {member.name} is a hard link to {member.linkname}, which is no file "
            f"before it; make the {what} again"
        )
    return target


def _files(
    file: tarfile.TarFile, path: Path, size: int, left_out: Counter[str]
) -> Iterator[tarfile.TarInfo]:
    before: dict[str, tarfile.TarInfo] = {}
    for member in file:
        if member.issym():
            left_out[f"{readable(member.name)} (symbolic link)"] += 1
        if not member.isfile() and not member.islnk():
            continue
        name = member.name.rpartition("/")[2]
        if name.startswith(".") or "." not in name:
            # Those of macOS, one for each member, count together.
            left_out["._*" if name.startswith("._") else readable(name)] += 1
            continue
        if member.islnk():
            target = linked(member, before, path, "shard")
            member.offset_data, member.size = target.offset_data, target.size
        if member.sparse is not None:
            raise DataError(f"{path}: {member.name} is a sparse file; make the shard again")
        if member.offset_data + member.size > size:
            raise DataError(
                f"{path} is cut off in {member.name}: it has {size} bytes and needs "
                f"{member.offset_data + member.size}; copy it again"
            )
        before[member.name] = member
        yield member


def require_end(file: Any, offset: int, where: object, what: str) -> None:
    """Raise DataError unless a tar file ends where tarfile has read no further member.

    Args:
        file: the tar file, open.
        offset: where the next member would begin.
        where: path or name of it, for messages.
        what: what it is called there.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(offset)
    if file.read(len(Tar.end)) != Tar.end or size % _BLOCK:
        raise DataError(
            f"{where} is cut off: it does not end with two empty blocks of {_BLOCK} bytes, as a "
            f"tar file does, or it is damaged at byte {offset}; copy it again"
        )
    while rest := file.read(_REST_BYTES):
        if rest.count(0) < len(rest):
            raise DataError(
                f"{where} has data after its end, as archives have that were joined by cat; "
                f"keep each as {what} of its own, or join them by tar --concatenate"
            )


def _example(raw: BinaryIO, path: Path, key: str, members: Sequence[tarfile.TarInfo]) -> Example:
    fields = tuple(member.name[len(key) + 1 :].lower() for member in members)
    if not all(fields) or len(set(fields)) < len(fields):
        raise DataError(
            f"{path}: the members of {key!r} are {', '.join(m.name for m in members)}; each needs "
            "an ending of its own, such as .jpg and .cls"
        )
    start = members[0].offset
    # A hard link has no bytes of its own; those that it leads to may lie in another example.
    end = max(m.offset + _BLOCK if m.islnk() else m.offset_data + m.size for m in members)
    label = -1
    if "cls" in fields:
        stored = members[fields.index("cls")]
        raw.seek(stored.offset_data)
        text = raw.read(stored.size)
        try:
            label = int(text)
            np.int64(label)
        except (ValueError, OverflowError):
            raise DataError(
                f"{path}: {key}.cls holds {text[:20]!r} instead of the number of a class"
            ) from None
    return Example(
        key,
        start,
        end - start,
        fields,
        tuple(member.offset_data - start for member in members),
        tuple(member.size for member in members),
        label,
    )
