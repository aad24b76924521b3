"""Folders of shards for tests."""

from __future__ import annotations

from collections.abc import Sequence
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
