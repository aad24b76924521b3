#!/usr/bin/env python3
"""Write ImageNet (ILSVRC 2012) as shards, straight from its archives or from folders.

    python datasets_prep/imagenet.py --source /data/ILSVRC2012 --out /data/imagenet --resize 256

The source holds ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and
ILSVRC2012_devkit_t12.tar.gz (its labels need SciPy), which are not unpacked; or train/CLASS/*.JPEG
and val/CLASS/*.JPEG. Labels follow the order of the classes' names, as in torchvision.
"""

from __future__ import annotations

import argparse
import io
import sys
import tarfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets_prep import command_line, frame, image_folder, pictures
from datasets_prep.archives import Member, opened_gzip, require_md5, tar_files
from datasets_prep.frame import Source
from datasets_prep.packed import BROKEN
from hvd_elastic.data.files import file_size
from hvd_elastic.errors import DataError

TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
PUBLISHED_MD5 = {
    TRAIN: "1d675b47d978889d74fa0da5fadfb00e",
    VAL: "29b22e2961454d5413ddabcf34fc5622",
    DEVKIT: "fa75699e90414af021442c21a62c3abf",
}


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the shards of both splits."""
    source: Path = given.source
    archives = [source / name for name in PUBLISHED_MD5]
    there = [path for path in archives if path.exists()]
    if not there:
        if not (source / "train").is_dir():
            raise DataError(
                f"{source} holds neither {TRAIN}, {VAL} and {DEVKIT} nor a folder train/ with one "
                "for each class"
            )
        given.classes = None
        return image_folder.run(given)
    if lacking := [path.name for path in archives if path not in there]:
        raise DataError(f"{source} lacks {', '.join(lacking)}")
    if given.checksum:
        for path in archives:
            require_md5(path, PUBLISHED_MD5[path.name])
    settings = command_line.settings_of(
        given, ("jpg",), pictures.ToJpeg(given.resize, given.quality)
    )
    train, classes = list_train(source / TRAIN)
    val = list_val(source / VAL, source / DEVKIT, classes)
    return [
        frame.prepare(given.out / name, sources, classes, settings)
        for name, sources in (("train", train), ("val", val))
    ]


def list_train(archive: Path) -> tuple[list[Source], list[str]]:
    """Return the pictures of an archive with an archive of each class in it, and the classes."""
    sources: list[Source] = []
    with _opened(archive) as outer:
        inside = sorted(
            (m for m in _members(outer, archive) if m.name.endswith(".tar")),
            key=lambda member: member.name,
        )
        classes = [Path(member.name).stem for member in inside]
        for label, member in enumerate(inside):
            try:
                with tarfile.open(fileobj=outer.extractfile(member.name), mode="r:") as inner:
                    sources += [
                        Source(
                            str(archive),
                            f"{classes[label]}/{Path(picture.name).name}",
                            label,
                            member.offset + picture.offset,
                            picture.size,
                        )
                        for picture in tar_files(inner, f"{archive}/{member.name}")
                    ]
            except tarfile.TarError as error:
                raise DataError(f"{archive}: {member.name} is damaged ({error})") from None
    if not sources:
        raise DataError(f"{archive} holds no archives of classes, n01440764.tar and so on")
    return sources, classes


def list_val(archive: Path, devkit: Path, classes: list[str]) -> list[Source]:
    """Return the pictures of the validation archive with the labels that the devkit gives them."""
    truth, names = read_devkit(devkit)
    with _opened(archive) as file:
        members = sorted(
            (m for m in _members(file, archive) if m.name.endswith(".JPEG")),
            key=lambda member: member.name,
        )
    if len(members) != len(truth):
        raise DataError(
            f"{archive} holds {len(members)} pictures, and {devkit.name} has the classes of "
            f"{len(truth)}"
        )
    label_of = {name: label for label, name in enumerate(classes)}
    if unknown := sorted({names.get(number, str(number)) for number in truth} - set(label_of)):
        raise DataError(f"{devkit}: class {unknown[0]} is not in {TRAIN}")
    return [
        Source(str(archive), member.name, label_of[names[number]], member.offset, member.size)
        for member, number in zip(members, truth, strict=True)
    ]


def read_devkit(archive: Path) -> tuple[list[int], dict[int, str]]:
    """Return the number of the class of each validation picture, and the names of the numbers.

    Raises:
        DataError: SciPy is missing, or the archive has other files than the published one.
    """
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError:
        raise DataError("the labels of ImageNet's archives need SciPy: pip install scipy") from None
    folder = archive.name.removesuffix(".tar.gz") + "/data/"
    try:
        with opened_gzip(archive) as file:
            texts = [
                (file.extractfile(folder + name) or io.BytesIO()).read()
                for name in ("ILSVRC2012_validation_ground_truth.txt", "meta.mat")
            ]
        truth = [int(line) for line in texts[0].split()]
        synsets = loadmat(io.BytesIO(texts[1]), squeeze_me=True)["synsets"]
        # Numbers from 1001 on are of groups of classes, which have children.
        names = {
            int(each["ILSVRC2012_ID"]): str(each["WNID"])
            for each in synsets
            if int(each["num_children"]) == 0
        }
    except (tarfile.TarError, *BROKEN, KeyError, ValueError) as error:
        raise DataError(
            f"{archive} is damaged, or is not the published archive ({error})"
        ) from None
    return truth, names


def _opened(archive: Path) -> tarfile.TarFile:
    file_size(archive)
    try:
        return tarfile.open(archive, "r:")
    except tarfile.TarError as error:
        raise DataError(f"{archive} is no tar archive ({error}); copy it again") from None


def _members(file: tarfile.TarFile, archive: Path) -> list[Member]:
    try:
        members = [*tar_files(file, str(archive))]
    except tarfile.TarError as error:
        raise DataError(f"{archive} is cut off or damaged ({error}); copy it again") from None
    size = archive.stat().st_size
    if members and members[-1].offset + members[-1].size > size:
        raise DataError(f"{archive} is cut off in {members[-1].name}; copy it again")
    return members


def main() -> int:
    """Command line."""
    parser = command_line.options(__doc__ or "")
    parser.add_argument("--source", type=Path, required=True, help="folder of archives or classes")
    parser.add_argument(
        "--checksum", action="store_true", help="compare the archives with the published MD5 first"
    )
    command_line.picture_options(parser)
    return command_line.main(parser, run)


if __name__ == "__main__":
    sys.exit(main())
