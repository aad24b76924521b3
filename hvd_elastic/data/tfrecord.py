"""Examples in TFRecord files, each a ``tf.train.Example``; read and written without TensorFlow.

Images have the features that TensorFlow's scripts for ImageNet give them, ``image/encoded``,
``image/class/label``, which counts from 1 there, and ``image/filename``; or those of TensorFlow
Datasets, ``image`` and ``label``, which counts from 0. Other features keep their names. Those of a
``tf.train.SequenceExample`` are read too.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_elastic.data.example import Example
from hvd_elastic.data.files import compression, file_size
from hvd_elastic.errors import DataError

_KEY, _LABEL, _IMAGE = "image/filename", "image/class/label", "image/encoded"
LABEL, _OTHER_IMAGE = "label", "image"
_CLASS, _OTHER_KEY = "cls", "__key__"  # as WebDataset calls them
_LABELS = (_LABEL, LABEL, _CLASS)
_IMAGE_FIELDS = ("jpg", "png")
_PICTURES = {b"\xff\xd8": "jpg", b"\x89PNG": "png"}
_DECIMAL = re.compile(rb"\s*-?\d{1,18}\s*")
CHECKSUM_BYTES = 4
_HEAD, _TAIL = 8 + CHECKSUM_BYTES, CHECKSUM_BYTES  # length and its checksum; that of the data
_BYTES, _FLOATS, _INTEGERS = 1, 2, 3  # fields of tf.train.Feature

KINDS = {_BYTES: "bytes", _FLOATS: "float", _INTEGERS: "int64"}
"""Kinds of values. One with ``_list`` has several in some examples; ``sequence`` is a feature list
of a ``SequenceExample``, ``label`` a label that counts from 0."""
LIST, SEQUENCE, FROM_0 = "_list", "sequence", "label"
SEVERAL = -2
"""Size of a value that is a list of bytes: this less its bytes. A value that has one is stored as
the bytes alone; numbers are always stored as the list."""


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
        if list(fields) != sorted(fields, key=place):
            raise DataError(
                f"TFRecord shards need the fields {', '.join(fields)} in the order "
                f"{', '.join(sorted(fields, key=place))}: picture, others by name, cls"
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
        checksum = _masked_crc(data)
        record = b"".join((head, _masked_crc(head), data, checksum))
        before = _HEAD + len(data) - len(body)
        offsets = tuple(before + end - size for end, size in zip(ends, sizes, strict=True))
        example = Example(key, 0, len(record), tuple(fields), offsets, tuple(sizes), label)
        return record, example._replace(checksum=_number(checksum))

    def scan(
        self, path: Path, left_out: Counter[str] | None = None, *, label: bool = True
    ) -> Iterator[Example]:
        """Yield the examples of a shard; see :class:`hvd_elastic.data.index.Layout`.

        Raises:
            OSError: it cannot be read.
            DataError: it is empty, cut off or damaged, or a record is no ``tf.train.Example``.
        """
        size = file_size(path)
        if size == 0:
            raise DataError(f"{path} is empty (0 bytes); copy or make it again")
        labels = _LABELS if label else (_LABEL, _CLASS)
        start = number = 0
        with path.open("rb") as file:
            while start < size:
                head = file.read(_HEAD)
                if len(head) < _HEAD or _masked_crc(head[:8]) != head[8:]:
                    if not start and (how := compression(path)):
                        raise DataError(f"{path} {how}")
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
                    yield _example(data, start, number, _number(checksum), labels)
                except DataError as error:
                    raise DataError(f"{path}: record {number}: {error}") from None
                except (ValueError, IndexError, KeyError) as error:
                    raise DataError(
                        f"{path}: record {number} is no tf.train.Example ({error}); shards of "
                        "other messages cannot be indexed"
                    ) from error
                start += _HEAD + length + _TAIL
                number += 1


def decode_value(kind: str, value: bytes, *, several: bool = False) -> Any:
    """Return a value of a kind of ``KINDS``.

    Args:
        kind: a name; with ``_list`` the result is an array, or a list of bytes.
        value: as stored.
        several: whether it is a list, of bytes.
    """
    if kind == SEQUENCE:
        return _sequence(value)
    base = kind.removesuffix(LIST)
    if base == "bytes":
        found = [value[at:to] for _, at, to in _messages(value, 0, len(value))] if several else None
        return value if found is None and base == kind else found or [value]
    array = _numbers(base, value)
    return array if kind.endswith(LIST) else array[0].item()


def _numbers(kind: str, data: bytes) -> np.ndarray:
    """Return the numbers of a ``FloatList`` or ``Int64List``, packed or not."""
    packed = _packed(data)
    if kind == "float":
        return np.frombuffer(packed, "<f4").astype(np.float32)
    septets = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(septets < 0x80)
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    found = np.zeros(len(ends), np.uint64)
    for place in range(int((ends - starts).max(initial=-1)) + 1):
        here = starts + place <= ends
        part = septets[starts[here] + place] & 0x7F
        found[here] |= part.astype(np.uint64) << np.uint64(7 * place)
    return found.view(np.int64)


def _packed(data: bytes) -> bytes:
    return b"".join(data[at:to] for _, at, to in _messages(data, 0, len(data)))


def _sequence(data: bytes) -> Any:
    """Return the steps of a ``FeatureList``: an array if all are numbers and equally many."""
    steps = []
    for _, at, to in _messages(data, 0, len(data)):
        kind, begin, end, count = _feature_at(data, at, to)
        if count == 1 and kind == "bytes":
            (_, begin, end) = next(_messages(data, begin, end))
            steps.append(data[begin:end])
        else:
            steps.append(decode_value(kind + LIST, data[begin:end], several=True))
    if any(not isinstance(step, np.ndarray) for step in steps) or len({*map(len, steps)}) != 1:
        return steps
    return np.stack(steps)


def _example(
    data: bytes,
    start: int,
    number: int,
    checksum: int = 0,
    labels: Sequence[str] = _LABELS,
) -> Example:
    key, label = f"{number:08d}", -1
    found: list[tuple[str, int, int, str]] = []
    features = dict(_features(data))
    image = _IMAGE if _IMAGE in features else _OTHER_IMAGE
    key_name = _OTHER_KEY if _OTHER_KEY in features else _KEY
    label_name = next((each for each in labels if each in features), None)
    for name, (kind, begin, end, count) in features.items():
        list_bytes = end - begin
        if count == 1 and (kind == "bytes" or (kind == "int64" and name == label_name)):
            (_, begin, end) = next(_messages(data, begin, end))
        size = end - begin
        if kind == "bytes" and count == 1:
            if name == key_name:
                key = data[begin:end].decode(errors="surrogateescape")
                continue
            if name == image:
                name = _image_field(name, data[begin:end], features)
        elif kind == "bytes":
            size = SEVERAL - list_bytes
        if count == 1 and name == label_name:
            class_number = _class_number(name, kind, data[begin:end])
            if class_number is not None:
                label = class_number - 1
                name, kind = _CLASS, kind if name == _LABEL else FROM_0
        if count != 1 and kind != SEQUENCE:
            kind += LIST
        if name == _OTHER_KEY or (name == _CLASS and features.get(_CLASS) and kind != FROM_0):
            what = "a text" if name == _OTHER_KEY else "the only label, one number"
            raise DataError(f"the feature {name} must be {what}; give it another name")
        found.append((name, _HEAD + begin, size, kind))
    # TensorFlow writes the features of each record in another order.
    found.sort(key=lambda value: place(value[0]))
    fields, offsets, sizes, kinds = zip(*found, strict=True) if found else ((), (), (), ())
    length = _HEAD + len(data) + _TAIL
    return Example(key, start, length, fields, offsets, sizes, label, kinds, checksum)


def _image_field(name: str, value: bytes, features: Container[str]) -> str:
    """Return the field of the image's feature: its format, unless another feature is called so."""
    known = (each for magic, each in _PICTURES.items() if value.startswith(magic))
    field = next(known, "jpg" if name == _IMAGE else name)
    return field if field not in features else name


def _class_number(name: str, kind: str, value: bytes) -> int | None:
    """Return the number that a label's feature stores; None: it stores something else."""
    if kind == "int64":
        number = _read_varint(value, 0)[0]
        if number == -(1 << 63):
            raise DataError(f"{name} is {number}, which is no class, but NaN made an integer")
        return number
    is_number = kind == "bytes" and name == _CLASS and _DECIMAL.fullmatch(value)
    return int(value) if is_number else None


def place(field: str) -> tuple[bool, bool, str]:
    """Return what fields are sorted by: the image, others by name, the label."""
    return field not in _IMAGE_FIELDS, field == "cls", field


def _features(data: bytes) -> Iterator[tuple[str, tuple[str, int, int, int]]]:
    """Yield name and, as :func:`_feature_at`, place of each feature in the order stored."""
    for part, begin, end in _messages(data, 0, len(data)):  # features, or context; feature lists
        for _, entry, entry_end in _messages(data, begin, end):  # entries of a map
            parts = {field: (at, to) for field, at, to in _messages(data, entry, entry_end)}
            name = data[slice(*parts[1])].decode()
            at, to = parts.get(2, (0, 0))
            if part == 1:
                kind, at, to, count = _feature_at(data, at, to)
                if count:  # one without a value is as if it were not there
                    yield name, (kind, at, to, count)
            elif part == 2:
                yield name, (SEQUENCE, at, to, 1)


def _feature_at(data: bytes, at: int, end: int) -> tuple[str, int, int, int]:
    """Return kind, begin, end and number of the values of a feature: of its one list."""
    for part, begin, stop in _messages(data, at, end):
        kind = KINDS[part]
        if kind == "bytes":
            return kind, begin, stop, sum(1 for _ in _messages(data, begin, stop))
        packed = _packed(data[begin:stop])
        if kind == "float":
            return kind, begin, stop, len(packed) // 4
        return kind, begin, stop, int((np.frombuffer(packed, np.uint8) < 0x80).sum())
    return "bytes", end, end, 0


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


def _number(checksum: bytes) -> int:
    return int.from_bytes(checksum, "little")


def _masked_crc(data: bytes) -> bytes:
    try:
        import google_crc32c
    except ModuleNotFoundError:
        raise DataError(
            "TFRecord files need google-crc32c for their checksums: pip install google-crc32c"
        ) from None
    crc = int(google_crc32c.value(data))
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
