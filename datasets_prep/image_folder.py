#!/usr/bin/env python3
"""Write any folder of pictures as shards.

    python datasets_prep/image_folder.py --source ~/birds --out /data/birds --resize 256

A folder for each class gives labels, in the order of the folders' names or of --classes; a folder
of pictures alone gives none. With train/ and val/ in the source, both are written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets_prep import frame, pictures
from hvd_elastic.errors import DataError

SPLITS = ("train", "val", "test")


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the shards of each split."""
    source: Path = given.source
    if not source.is_dir():
        raise DataError(f"there is no folder {source}")
    if source.resolve() in (given.out.resolve(), *given.out.resolve().parents):
        raise DataError(
            f"--out {given.out} is in the source, {source}; name a folder outside of it"
        )
    settings = frame.settings_of(given, ("jpg",), pictures.ToJpeg(given.resize, given.quality))
    splits = [name for name in SPLITS if (source / name).is_dir()] or [""]
    if given.classes is not None:
        classes = pictures.read_classes(given.classes)
    else:
        classes = pictures.classes_in(source / splits[0])
    listed = {name: pictures.list_folder(source / name, classes) for name in splits}
    for name, sources in listed.items():
        stray = pictures.files_in(source / name) if classes else []
        if stray:
            print(
                f"{source / name}: {len(stray)} pictures are left out, since they lie in no folder "
                f"of a class: {', '.join(stray[:5])}",
                file=sys.stderr,
            )
        if not sources:
            raise DataError(
                f"{source / name} holds no pictures ({', '.join(pictures.SUFFIXES)}); name a "
                "folder of pictures, or one with a folder for each class"
            )
    return [
        frame.prepare(given.out / name, sources, classes, settings)
        for name, sources in listed.items()
    ]


def main() -> int:
    """Command line."""
    parser = frame.options(__doc__ or "")
    parser.add_argument("--source", type=Path, required=True, help="folder of pictures")
    parser.add_argument("--classes", type=Path, help="file with a class in each line")
    frame.picture_options(parser)
    return frame.main(parser, run)


if __name__ == "__main__":
    sys.exit(main())
