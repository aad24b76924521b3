"""Reads the documents of text files in pieces of about equal size, each of which stands alone."""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from datasets_prep.common import is_of_storage, unlisted
from datasets_prep.packed import BROKEN, CHUNK_BYTES, PACKED, opened, unpacked_size
from hvd_elastic.data.files import file_size, files_below, leads_to_folder
from hvd_elastic.errors import DataError
from hvd_elastic.json_text import parse_json

TEXTS, LINES = (".txt", ".md", ".text"), (".jsonl", ".ndjson")
_PACKED_PIECE_BYTES, _PACKED_PIECES = 16 << 20, 64
"""A packed file is unpacked from its start for each piece, so there are few of them."""
_BLOCK = 1 << 16  # within which a line should end
_SHOWN_LINES, _SHOWN_LETTERS = 3, 40
_DAMAGED = -1  # in place of a size
_CHANGED = "it has changed since it was listed"
_MOST_DAMAGED = 0.3  # share of the characters of a text
_ENCODINGS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_BOM = b"\xef\xbb\xbf"
_REPLACED = "\N{REPLACEMENT CHARACTER}"


class Document(NamedTuple):
    """A document, or a part of one.

    Attributes:
        text: of it; empty: it could not be read.
        ends: whether it ends here.
        damage: what could not be read of it.
    """

    text: str
    ends: bool = True
    damage: str = ""


class Part(NamedTuple):
    """The lines of a file that begin in a range of its bytes, once unpacked.

    Attributes:
        path: of the file.
        name: for messages.
        start, end: of the range.
        size: of the file.
        field: of JSON lines that holds the text; "": it is text.
    """

    path: str
    name: str
    start: int
    end: int
    size: int
    field: str


class Piece(NamedTuple):
    """Parts of files, in order; see :class:`datasets_prep.frame.Source`."""

    parts: tuple[Part, ...]
    label: int = -1
    file_bytes: int = -1

    @property
    def name(self) -> str:
        return f"{self.parts[0].name}:{self.parts[0].start}"

    @property
    def size(self) -> int:
        """Bytes of its text."""
        return sum(max(0, part.end - part.start) for part in self.parts)

    @property
    def identity(self) -> str:
        """Names and ranges of its parts."""
        return "".join("\0".join(map(str, part[1:])) + "\n" for part in self.parts)

    def read(self) -> Iterator[Document]:
        """Yield its documents."""
        for part in self.parts:
            try:
                yield from read_part(part)
            except (DataError, OSError) as error:
                if isinstance(error, OSError) and not error.filename:
                    error.filename = part.path
                if is_of_storage(error, was_there=part.size != _DAMAGED):
                    raise
                why = getattr(error, "strerror", None) or error
                yield Document("", damage=f"{part.name}: {why}")

    def damage(self) -> list[str]:
        """Return what of it cannot be read."""
        return [document.damage for document in self.read() if document.damage]


class Pieces(Sequence[Piece]):
    """Pieces of all texts of a folder, in order; a file takes some 50 bytes.

    Args:
        source: folder, or file.
        field: of JSON lines that holds the text; "": they are left out.
        piece_bytes: size of a piece, about.

    Attributes:
        newest: when the newest file was written [s since 1970].
        left_out: number of other files, by ending.
    """

    def __init__(self, source: Path, field: str, piece_bytes: int) -> None:
        self.newest = 0.0
        self._field = field
        self.left_out = Counter[str]()
        self._root = str(source if source.is_dir() else source.parent)
        self._names, self._ends, self._sizes = bytearray(), array("q"), array("q")
        self._are_lines = array("b")
        # Number of the file and place in it where each piece begins, and the last one ends.
        self._starts = array("q", (0, 0))
        self._room = piece_bytes
        self._piece_bytes = piece_bytes
        for path in self._listed(source):
            self._add(path)
            self._are_lines.append(bool(field) and (path == source or _ending(path) in LINES))
        self._begin(len(self._sizes), 0)

    def _listed(self, source: Path) -> Iterator[Path]:
        if not source.is_dir():
            file_size(source)
            if not self._field and _ending(source) in LINES:
                raise DataError(
                    f"{source} has JSON lines; name the field that holds the text: --field text"
                )
            yield source
            return
        endings = TEXTS + (LINES if self._field else ())

        def why_left_out(entry: os.DirEntry[str]) -> str:
            path = Path(entry.name)
            is_folder = entry.is_dir(follow_symlinks=False) or leads_to_folder(entry)
            if is_folder or _ending(path) in endings:
                return ""
            return path.suffix.lower() or "without ending"

        for name, _ in files_below(source, why_left_out, self.left_out):
            yield source / name

    def _add(self, path: Path) -> None:
        """Append a file to the piece that has room, or cut it."""
        step, packed = self._piece_bytes, path.suffix.lower() in PACKED
        size = _DAMAGED
        try:
            size = file_size(path)
            self.newest = max(self.newest, path.stat().st_mtime)
            if packed:
                size = _DAMAGED
                size = unpacked_size(str(path))
        except (DataError, OSError) as error:  # it is named when it is read
            if is_of_storage(error):
                raise unlisted(path, error) from error
        if packed:
            step = max(step, _PACKED_PIECE_BYTES, size // _PACKED_PIECES)
        number = len(self._sizes)
        self._names += os.fsencode(os.path.relpath(path, self._root))
        self._ends.append(len(self._names))
        self._sizes.append(size)
        start = 0
        if size > self._room and (packed or self._room < self._piece_bytes // 2):
            self._begin(number, 0)
            self._room = step
        while size - start > self._room:
            start += self._room
            self._begin(number, start)
            self._room = step
        self._room = min(self._room - (max(0, size) - start), self._piece_bytes)
        if not self._room:
            self._begin(number + 1, 0)

    def _begin(self, number: int, start: int) -> None:
        """Begin a piece there."""
        if (number, start) != (self._starts[-2], self._starts[-1]):
            self._starts.extend((number, start))
        self._room = self._piece_bytes

    def __len__(self) -> int:
        return len(self._starts) // 2 - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if index >= len(self):
            raise IndexError(index)
        first, start, last, end = self._starts[2 * index : 2 * index + 4]
        parts = []
        for number in range(first, last + (end > 0)):
            size = self._sizes[number]
            until = end if number == last else size
            began = self._ends[number - 1] if number else 0
            name = os.fsdecode(bytes(self._names[began : self._ends[number]]))
            if start < until or size <= 0:
                field = self._field if self._are_lines[number] else ""
                parts.append(Part(f"{self._root}/{name}", name, start, until, size, field))
            start = 0
        return Piece(tuple(parts))


def _ending(path: Path) -> str:
    """Return the ending of a text's name, before that of its packing."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in PACKED else suffix


# -- bytes -----------------------------------------------------------------------------------------


def read_part(part: Part) -> Iterator[Document]:
    """Yield the documents of a part.

    Raises:
        DataError: it is no text in UTF-8, packed in an unknown way, or has changed.
        OSError: it cannot be read.
    """
    if part.size == _DAMAGED:
        file_size(Path(part.path))  # raises, or the next one
        unpacked_size(part.path)
    if part.size <= 0:
        raise DataError("it is empty (0 bytes)" if not part.size else _CHANGED)
    try:
        with opened(part.path) as stream:
            place, data = _read_lines(stream, part, cut=not part.field)
    except BROKEN:
        raise DataError(_CHANGED) from None
    if place == 0:
        data = data.removeprefix(_BOM)
    if part.field:
        yield from _json_lines(data, place, part.name, part.field)
        return
    text, damage = _decoded(data, place)
    # An empty last part ends the document of the piece before it.
    if text or place:
        said = f"{part.name}: {damage}" if damage else ""
        yield Document(text, part.end == part.size, said)


def _read_lines(stream: IO[bytes], part: Part, *, cut: bool) -> tuple[int, bytes]:
    """Return the place of the first line that begins in a part, and all such lines.

    Args:
        stream: of the file.
        part: of it.
        cut: whether a line that is very long may be cut.
    """
    head = stream.read(4)
    for mark, name in _ENCODINGS.items():
        if head.startswith(mark):
            raise DataError(f"it is {name} text; convert it: iconv -f {name} -t UTF-8")
    base = max(0, part.start - 1)  # a line begins after the newline that may be there
    _skip(stream, base - len(head))
    until = part.end - 1 + _BLOCK if part.end < part.size else part.size
    data = head[base:] + stream.read(max(0, until - base - len(head[base:])))
    if len(data) < min(until, part.size) - base:
        raise DataError(_CHANGED)
    begin, end = 0, len(data)
    if part.start:
        data, begin = _line_after(stream, data, 0, cut=cut)
    if part.end < part.size:
        data, end = _line_after(stream, data, part.end - 1 - base, cut=cut)
    return base + begin, data[begin:end]


def _line_after(stream: IO[bytes], data: bytes, at: int, *, cut: bool) -> tuple[bytes, int]:
    """Return the data, longer if need be, and where in them the next line begins."""
    found = data.find(b"\n", at, at + _BLOCK if cut else len(data))
    while found < 0 and not cut:
        more, at = stream.read(_BLOCK), len(data)
        if not more:
            return data, at
        data += more
        found = data.find(b"\n", at)
    if found >= 0:
        return data, found + 1
    at += 1
    while at < len(data) and data[at] & 0xC0 == 0x80:  # within a character of UTF-8
        at += 1
    return data, at


def _skip(stream: IO[bytes], count: int) -> None:
    if count > 0 and stream.seekable():
        stream.seek(count, os.SEEK_CUR)
        return
    while count > 0:
        count -= len(stream.read(min(count, CHUNK_BYTES))) or count


def _decoded(data: bytes, place: int) -> tuple[str, str]:
    """Return a text, and what is damaged in it; ``place``: where it begins in its file.

    Raises:
        DataError: so much that it is no UTF-8.
    """
    convert = "convert it: iconv -f ENCODING -t UTF-8"
    if 10 * data.count(0) > len(data):
        raise DataError(f"it has bytes 0, as UTF-16 or a binary file; {convert}")
    try:
        return data.decode(), ""
    except UnicodeDecodeError as error:
        text = data.decode(errors="replace")
        lost = text.count(_REPLACED) - data.count(_REPLACED.encode())
        what = f"{error.reason} at byte {place + error.start}"
        if lost > _MOST_DAMAGED * len(text):
            raise DataError(f"it is no UTF-8 text ({what}); {convert}") from None
    return text, (
        f"{lost} characters that are no UTF-8 ({what}), each of which is U+FFFD now; if it has "
        f"another encoding, {convert}"
    )


def _json_lines(data: bytes, place: int, name: str, field: str) -> Iterator[Document]:
    """Yield a document for each line of JSON; the first lines without one are named."""
    lacking = 0
    for line in data.split(b"\n"):
        damage = ""
        try:
            if line.strip():
                text, damage = _text_of(line, place, field)
                yield Document(text, damage=f"{name}: {damage}" if damage else "")
        except DataError as error:
            lacking += 1
            if lacking <= _SHOWN_LINES:
                yield Document("", damage=f"{name}: the line at byte {place} {error}")
        place += len(line) + 1
    if lacking > _SHOWN_LINES:
        yield Document(
            "", damage=f"{name}: {lacking - _SHOWN_LINES} more such lines before byte {place}"
        )


def _text_of(line: bytes, place: int, field: str) -> tuple[str, str]:
    source, damage = _decoded(line, place)
    try:
        found = parse_json(source)
    except ValueError:
        raise DataError("is no JSON") from None
    if isinstance(found, dict) and not isinstance(found.get(field, ""), str):
        raise DataError(
            f"has no text in {field!r}, but {json.dumps(found[field])[:_SHOWN_LETTERS]}"
        )
    if not isinstance(found, dict) or field not in found:
        fields = ", ".join(map(str, found)) if isinstance(found, dict) else "none"
        raise DataError(f"has no text {field!r}; its fields are {fields}")
    text: str = found[field]
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair of \\u escapes
        text, damage = text.encode(errors="replace").decode(), "half a character at the line of "
        damage += f"byte {place} is ? now"
    return text, damage
