"""Folders of shards for tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from hvd_elastic.data import ShardWriter, build_index


def npy(array: np.ndarray) -> bytes:
    out = BytesIO()
    np.save(out, array)
    return out.getvalue()


def write_numbers(folder: Path, sizes: list[int], layout: str = "tar", width: int = 1) -> Path:
    """Example i is an array of i in each place, of class i % 3."""
    folder.mkdir(exist_ok=True)
    number = 0
    for place, size in enumerate(sizes):
        name = f"s-{place:02d}.tar" if layout == "tar" else f"s.tfrecord-{place:02d}-of-99"
        with ShardWriter(folder / name, layout, ("npy", "cls")) as writer:
            for _ in range(size):
                value = npy(np.full(width, number, np.float32))
                writer.add(f"k{number:04d}", (value, b"%d" % (number % 3)))
                number += 1
            writer.finish()
    build_index(folder, ["a", "b", "c"])
    return folder


def damage(folder: Path, numbers: Sequence[int]) -> None:
    """Overwrite the first bytes of examples that :func:`write_numbers` wrote; sizes stay."""
    for path in folder.glob("s-*.tar"):
        content = path.read_bytes()
        for number in numbers:
            at = content.find(b"k%04d.npy" % number)
            if at >= 0:
                begin = content.index(b"\x93NUMPY", at)
                content = content[:begin] + b"broken" + content[begin + 6 :]
        path.write_bytes(content)


def tar(path: Path, members: Sequence[tuple[str, bytes]], kind: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar file, and return its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1.5  # PAX stores a fraction in a header of its own
            file.addfile(info, io.BytesIO(data))
    return path.parent


def texts(count: int, first: int = 0) -> list[tuple[str, bytes]]:
    return [(f"k{number}.txt", b"%d" % number) for number in range(first, first + count)]


def features(
    folder: Path, *records: Mapping[str, int | list[int] | bytes], name: str = "a.tfrecord"
) -> Path:
    """Write a TFRecord file of ``tf.train.Example``, and return its folder."""
    from hvd_elastic.data import tfrecord

    folder.mkdir(exist_ok=True)
    with (folder / name).open("wb") as file:
        for record in records:
            body = b""
            for feature, value in record.items():
                numbers = [value] if isinstance(value, int) else value
                if isinstance(numbers, bytes):
                    body += tfrecord._feature(feature, 1, numbers)
                else:
                    packed = b"".join(map(tfrecord._varint, numbers))
                    body += tfrecord._feature(feature, 3, packed)
            data = tfrecord._delimited(1, body)
            head = len(data).to_bytes(8, "little")
            parts = (head, tfrecord._masked_crc(head), data, tfrecord._masked_crc(data))
            file.write(b"".join(parts))
    return folder
