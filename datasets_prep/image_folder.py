#!/usr/bin/env python3
"""Write any folder of pictures as shards.

    python datasets_prep/image_folder.py --source ~/birds --out /data/birds --resize 256

A folder for each class gives labels, in the order of the folders' names or of --classes; a folder
of pictures alone gives none. With train/, val/ and test/ in the source, all are written, each to a
folder of its name in --out (training/, valid/, validation/ and testing/ are such too).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets_prep import command_line, frame, pictures
from hvd_elastic.errors import DataError

SPLITS = (("train", "training"), ("val", "valid", "validation"), ("test", "testing"))
"""What folders of splits are called, in any case."""


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the shards of each split."""
    source: Path = given.source
    if not source.is_dir():
        raise DataError(f"there is no folder {source}")
    if source.resolve() in (given.out.resolve(), *given.out.resolve().parents):
        raise DataError(
            f"--out {given.out} is in the source, {source}; name a folder outside of it"
        )
    settings = command_line.settings_of(
        given, ("jpg",), pictures.ToJpeg(given.resize, given.quality)
    )
    splits = splits_in(source, given.classes)
    first = source / splits[0]
    if given.classes is not None:
        classes = pictures.read_classes(given.classes, pictures.folders_in(first))
    else:
        classes = pictures.classes_in(first)
    listed = {}
    for name in splits:
        folder = source / name
        here = classes
        if name != splits[0] and classes and not set(classes) & {*pictures.folders_in(folder)}:
            here = []
            print(f"{folder}: has no folders of classes, so no labels", file=sys.stderr)
        sources = pictures.list_folder(folder, here, some=name != splits[0])
        stray = pictures.files_in(folder) if here else []
        if stray:
            print(
                f"{folder}: {len(stray)} pictures are left out, since they lie in no folder of a "
                f"class: {', '.join(stray[:5])}",
                file=sys.stderr,
            )
        if sources:
            listed[name] = here, sources
        elif name == splits[0]:
            raise DataError(
                f"{folder} holds no pictures ({', '.join(pictures.SUFFIXES)}); name a folder of "
                "pictures, or one with a folder for each class"
            )
        else:
            print(f"{folder}: left out, since it holds no pictures", file=sys.stderr)
    return [
        frame.prepare(given.out / name, sources, here, settings)
        for name, (here, sources) in listed.items()
    ]


def splits_in(source: Path, classes: Path | None) -> list[str]:
    """Return the names of the splits of a folder, the one for training first; [""]: it has none.

    Args:
        source: where they lie.
        classes: file that names the classes, which are then no splits.

    Raises:
        DataError: a folder may be a split or a class.
    """
    folders = pictures.folders_in(source)
    splits = [name for names in SPLITS for name in folders if name.lower() in names]
    if not splits or (classes and {*pictures.read_classes(classes, folders)} <= {*folders}):
        return [""]
    others = [n for n in pictures.classes_in(source) if n not in splits]
    if others and not any(pictures.classes_in(source / name) for name in splits):
        raise DataError(
            f"{source} holds {splits[0]}/, which may be a split or a class, beside {others[0]}/; "
            "name the classes with --classes, or the folder of one split with --source"
        )
    if others:
        print(
            f"{source}: left out, since they are no splits (train, val, test): "
            f"{', '.join(others[:5])}",
            file=sys.stderr,
        )
    if stray := pictures.files_in(source):
        print(
            f"{source}: {len(stray)} pictures are left out, since they lie in no split: "
            f"{', '.join(stray[:5])}",
            file=sys.stderr,
        )
    return splits


def main() -> int:
    """Command line."""
    parser = command_line.options(__doc__ or "")
    parser.add_argument("--source", type=Path, required=True, help="folder of pictures")
    parser.add_argument("--classes", type=Path, help="file with a class in each line")
    command_line.picture_options(parser)
    return command_line.main(parser, run)


if __name__ == "__main__":
    sys.exit(main())
