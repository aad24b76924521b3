"""Examples in TFRecord files, each a ``tf.train.Example``; read and written without TensorFlow.

An image has the features that TensorFlow's scripts for ImageNet give it: ``image/encoded``,
``image/class/label``, which counts from 1 there, and ``image/filename``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvd_elastic.data.example import Example
from hvd_elastic.data.files import file_size
from hvd_elastic.errors import DataError

_KEY, _LABEL, _IMAGE = "image/filename", "image/class/label", "image/encoded"
_IMAGE_FIELDS = ("jpg", "png")
_HEAD, _TAIL = 12, 4  # length and its checksum; checksum of the data
_BYTES, _INTEGERS = 1, 3  # fields of tf.train.Feature


class TFRecord:
    """The layout; see :class:`hvd_elastic.data.index.Layout`."""

    suffix = ".tfrecord"
    end = b""

    def encode(
        self, key: str, fields: Sequence[str], values: Sequence[bytes]
    ) -> tuple[bytes, Example]:
        """Return the record of an example, and where in it each value lies.

        Raises:
            DataError: the fields are not in the order in which they are read back.
        """
        if list(fields) != sorted(fields, key=_place):
            raise DataError(
                f"TFRecord shards need the fields {', '.join(fields)} in the order "
                f"{', '.join(sorted(fields, key=_place))}: picture, others by name, cls"
            )
        label = -1
        body = _feature(_KEY, _BYTES, key.encode())
        ends, sizes = [], []
        for field, value in zip(fields, values, strict=True):
            name, kind = (_IMAGE if field in _IMAGE_FIELDS else field), _BYTES
            if field == "cls":
                label = int(value)
                name, kind, value = _LABEL, _INTEGERS, _varint(label + 1)
            body += _feature(name, kind, value)
            ends.append(len(body))
            sizes.append(len(value))
        data = _delimited(1, body)
        head = struct.pack("<Q", len(data))
        record = b"".join((head, _masked_crc(head), data, _masked_crc(data)))
        before = _HEAD + len(data) - len(body)
        offsets = tuple(before + end - size for end, size in zip(ends, sizes, strict=True))
        return record, Example(key, 0, len(record), tuple(fields), offsets, tuple(sizes), label)

    def require_key(self, record: bytes, key: str, fields: Sequence[str]) -> None:
        """Raise ValueError unless the record begins with its length and that one's checksum."""
        head = struct.pack("<Q", len(record) - _HEAD - _TAIL)
        if record[:_HEAD] != head + _masked_crc(head):
            raise ValueError("there is no record of its length in its place")

    def scan(self, path: Path) -> Iterator[Example]:
        """Yield the examples of a shard.

        Raises:
            OSError: it cannot be read.
            DataError: it is empty, cut off or damaged, or a record is no ``tf.train.Example``.
        """
        size = file_size(path)
        if size == 0:
            raise DataError(f"{path} is empty (0 bytes); copy or make it again")
        start = number = 0
        with path.open("rb") as file:
            while start < size:
                head = file.read(_HEAD)
                if len(head) < _HEAD or _masked_crc(head[:8]) != head[8:]:
                    what = (
                        "it is no TFRecord file"
                        if not start
                        else f"record {number} does not begin at byte {start}"
                    )
                    raise DataError(f"{path} is damaged: {what}; copy it again")
                (length,) = struct.unpack("<Q", head[:8])
                if start + _HEAD + length + _TAIL > size:
                    raise DataError(f"{path} is cut off in record {number}; copy it again")
                data, checksum = file.read(length), file.read(_TAIL)
                if _masked_crc(data) != checksum:
                    raise DataError(f"{path}: record {number} is damaged (checksum); copy it again")
                try:
                    yield _example(data, start, number)
                except (ValueError, IndexError) as error:
                    raise DataError(
                        f"{path}: record {number} is no tf.train.Example ({error}); shards of "
                        "other messages cannot be indexed"
                    ) from error
                start += _HEAD + length + _TAIL
                number += 1


def _example(data: bytes, start: int, number: int) -> Example:
    key, label = f"{number:08d}", -1
    found: list[tuple[str, int, int]] = []
    for name, kind, begin, end in _features(data):
        value = data[begin:end]
        if name == _KEY:
            key = value.decode(errors="replace")
            continue
        if name == _LABEL and kind == _INTEGERS:
            label = _read_varint(data, begin)[0] - 1
            name = "cls"
        elif kind != _BYTES:
            continue
        elif name == _IMAGE:
            name = "png" if value.startswith(b"\x89PNG") else "jpg"
        found.append((name, _HEAD + begin, end - begin))
    # TensorFlow writes the features of each record in another order.
    found.sort(key=lambda value: _place(value[0]))
    fields, offsets, sizes = zip(*found, strict=True) if found else ((), (), ())
    return Example(key, start, _HEAD + len(data) + _TAIL, fields, offsets, sizes, label)


def _place(field: str) -> tuple[bool, bool, str]:
    return field not in _IMAGE_FIELDS, field == "cls", field


def _features(data: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, kind, begin and end of each feature that has one value, in the order stored."""
    for _, begin, end in _messages(data, 0, len(data)):  # Example.features
        for _, entry, entry_end in _messages(data, begin, end):  # entries of Features.feature
            parts = {field: (at, to) for field, at, to in _messages(data, entry, entry_end)}
            name = data[slice(*parts[1])].decode()
            for kind, at, to in _messages(data, *parts[2]):  # Feature: one list
                if kind in (_BYTES, _INTEGERS):
                    values = list(_messages(data, at, to))
                    if len(values) == 1:
                        yield name, kind, values[0][1], values[0][2]


def _messages(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield field number, begin and end of each value of a protobuf message."""
    while at < end:
        tag, at = _read_varint(data, at)
        begin, kind = at, tag & 7
        if kind == 0:
            _, at = _read_varint(data, at)
        elif kind == 2:
            size, begin = _read_varint(data, at)
            at = begin + size
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at > end:
            raise ValueError("a value is longer than its message")
        yield tag >> 3, begin, at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends; negative ones are those of int64."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value - (1 << 64) * (value >> 63), at


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _delimited(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _feature(name: str, kind: int, value: bytes) -> bytes:
    """Return an entry of ``Features.feature`` with one value."""
    feature = _delimited(kind, _delimited(1, value))
    return _delimited(1, _delimited(1, name.encode()) + _delimited(2, feature))


def _masked_crc(data: bytes) -> bytes:
    try:
        import google_crc32c
    except ModuleNotFoundError:
        raise DataError(
            "TFRecord files need google-crc32c for their checksums: pip install google-crc32c"
        ) from None
    crc = int(google_crc32c.value(data))
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
