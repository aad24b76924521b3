#!/usr/bin/env python3
"""Write CIFAR-10 as shards of PNG files, from its binary archive.

python datasets_prep/cifar10.py --archive cifar-10-binary.tar.gz --download --out /data/cifar10
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image

from datasets_prep import command_line, frame
from datasets_prep.archives import download, opened_gzip, require_md5
from datasets_prep.frame import Source
from datasets_prep.packed import BROKEN
from hvd_elastic.errors import DataError

PUBLISHED = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
PUBLISHED_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
INSIDE = "cifar-10-batches-bin"
SPLITS = {
    "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
    "val": ["test_batch.bin"],
}
NAMES = "batches.meta.txt"
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE  # the class, then the red, green and blue planes


@dataclass(frozen=True)
class ToPng:
    """Encodes the planes of a picture as PNG."""

    def __call__(self, data: bytes) -> list[tuple[bytes]]:
        planes = np.frombuffer(data, np.uint8, offset=1).reshape(3, SIDE, SIDE)
        out = BytesIO()
        Image.fromarray(planes.transpose(1, 2, 0)).save(out, "PNG")
        return [(out.getvalue(),)]


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the shards of both splits."""
    if given.download:
        download(given.download, given.archive, PUBLISHED_MD5)
    if given.checksum:
        require_md5(given.archive, PUBLISHED_MD5)
    found = []
    # Not in --out, where a call that was killed would leave it.
    with tempfile.TemporaryDirectory(prefix="cifar10-") as folder:
        raw = Path(folder)
        classes = unpack(given.archive, raw)
        for name, files in SPLITS.items():
            sources = [source for file in files for source in list_batch(raw / file, len(classes))]
            settings = command_line.settings_of(given, ("png",), ToPng())
            found.append(frame.prepare(given.out / name, sources, classes, settings))
    return found


def unpack(archive: Path, folder: Path) -> list[str]:
    """Write the files of the archive to a folder; return the names of the classes."""
    wanted = [NAMES, *(name for files in SPLITS.values() for name in files)]
    try:
        with opened_gzip(archive) as file:
            for name in wanted:
                inside = file.extractfile(f"{INSIDE}/{name}")
                assert inside is not None
                _write(folder / name, inside.read())
    except (tarfile.TarError, *BROKEN, KeyError) as error:
        raise DataError(
            f"{archive} is damaged, or is not CIFAR-10's binary archive ({error}); get "
            "cifar-10-binary.tar.gz: the other editions are Python pickles and MATLAB files"
        ) from None
    return (folder / NAMES).read_text(encoding="utf-8").split()


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}; the archive is unpacked there meanwhile "
            "(180 MB): TMPDIR names another folder"
        ) from error


def list_batch(path: Path, classes: int) -> list[Source]:
    """Return the pictures of a batch."""
    data = np.fromfile(path, np.uint8)
    if len(data) % RECORD or not len(data):
        raise DataError(f"{path.name} has {len(data)} bytes, which is no multiple of {RECORD}")
    labels = data[::RECORD].tolist()
    if max(labels) >= classes:
        raise DataError(f"{path.name} has class {max(labels)}, and {NAMES} names {classes}")
    return [
        Source(str(path), f"{path.stem}_{number}", label, number * RECORD, RECORD)
        for number, label in enumerate(labels)
    ]


def main() -> int:
    """Command line."""
    parser = command_line.options(__doc__ or "")
    parser.add_argument("--archive", type=Path, required=True, help="cifar-10-binary.tar.gz")
    parser.add_argument(
        "--download",
        nargs="?",
        const=PUBLISHED,
        metavar="URL",
        help="get the archive first, unless it is there, and compare it with the published MD5; "
        f"without URL: {PUBLISHED}",
    )
    parser.add_argument(
        "--checksum", action="store_true", help="compare the archive with the published MD5 first"
    )
    return command_line.main(parser, run)


if __name__ == "__main__":
    sys.exit(main())
