#!/usr/bin/env python3
"""Write JPEG files in the layout of ImageNet, drawn so that a network can learn them; verify such.

    python datasets_prep/imagenet_layout.py --out /data/shapes --classes 10 --per-class 500
    python datasets_prep/imagenet_layout.py --verify /data/imagenet

The result is OUT/train/<wnid>/*.JPEG and OUT/val/<wnid>/*.JPEG, and the names of the classes in
OUT/LOC_synset_mapping.txt. Every picture follows from --seed and its own place alone (shapes.py
here draws it). A call that was interrupted goes on where it stopped when it is given again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

try:
    from PIL import Image, UnidentifiedImageError

    from datasets_prep.common import interrupted, progress_bar, result_of, whole_number
    from datasets_prep.shapes import DRAWING, MOST_CLASSES, draw_picture, look_of
    from hvd_elastic.data.files import file_size, open_part, sole_writer
    from hvd_elastic.data.processes import in_processes
    from hvd_elastic.errors import DataError
    from hvd_elastic.programs.usable import usable_cores
    from hvd_elastic.replaced_files import write_whole
except ModuleNotFoundError as lacking:
    sys.exit(f"error: {lacking.name} is not installed; run: pip install pillow numpy")

SPLITS = ("train", "val")
SUFFIXES = (".jpeg", ".jpg", ".png")
NAMES, SETTINGS = "LOC_synset_mapping.txt", "made_from.json"
VAL_SHARE = 5  # a fifth as many for validation as for training
CHUNK = 32  # pictures that a process takes on at once
SPARE = 1.1  # how much more space than reckoned must be free


# ---- which files there are to be


def wnid(number: int) -> str:
    """Name of a class's folder.

    >>> wnid(7)
    'n00000007'
    """
    return f"n{number:08d}"


@dataclass(frozen=True)
class Settings:
    """What a data set is made from.

    Attributes:
        classes: 2 to ``MOST_CLASSES``.
        per_class, val_per_class: pictures of each class, for training and for validation.
        size: of both sides of a picture [pixels].
        seed: >= 0.
    """

    classes: int
    per_class: int
    val_per_class: int
    size: int
    seed: int

    @property
    def counts(self) -> tuple[int, int]:
        """Pictures of a class in each of ``SPLITS``."""
        return self.per_class, self.val_per_class

    def describe(self) -> str:
        train, val = (self.classes * count for count in self.counts)
        of = f"of {self.classes} classes, {self.size} x {self.size}"
        return f"{train} pictures for training and {val} for validation {of}"


@dataclass(frozen=True)
class Piece:
    """Pictures of one class that one process makes."""

    split: int
    number: int
    indices: tuple[int, ...]


def class_folder(out: Path, split: int, number: int) -> Path:
    """Where the pictures of a class lie."""
    return out / SPLITS[split] / wnid(number)


def file_name(number: int, index: int) -> str:
    """Of the picture with this place in its class."""
    return f"{wnid(number)}_{index}.JPEG"


def whole_files(folder: Path) -> set[str]:
    """Names of the pictures that are there."""
    try:
        with os.scandir(folder) as entries:
            # A crash of the machine can leave a file without what was written to it.
            return {
                entry.name
                for entry in entries
                if entry.name.endswith(".JPEG") and entry.stat().st_size
            }
    except FileNotFoundError:
        return set()


def missing(out: Path, settings: Settings) -> list[Piece]:
    """What is not there yet."""
    found = []
    for split, count in enumerate(settings.counts):
        for number in range(settings.classes):
            there = whole_files(class_folder(out, split, number))
            indices = [index for index in range(count) if file_name(number, index) not in there]
            found += [
                Piece(split, number, tuple(indices[start : start + CHUNK]))
                for start in range(0, len(indices), CHUNK)
            ]
    return found


def count_missing(out: Path, settings: Settings) -> int:
    """How many pictures are not there yet, at any number that is asked for."""
    there = 0
    for split in range(len(SPLITS)):
        for number in range(settings.classes):
            there += len(whole_files(class_folder(out, split, number)))
    return settings.classes * sum(settings.counts) - there


def write_piece(out: Path, settings: Settings, piece: Piece) -> int:
    """Make its pictures; each appears when it is whole. Returns how many."""
    folder = class_folder(out, piece.split, piece.number)
    folder.mkdir(parents=True, exist_ok=True)
    for index in piece.indices:
        name = file_name(piece.number, index)
        drawn = draw_picture(settings.seed, piece.split, piece.number, index, settings.size)
        with open_part(folder / name) as file:
            file.write(drawn)
        Path(file.name).replace(folder / name)
    return len(piece.indices)


def bytes_on_disk(out: Path, settings: Settings, count: int) -> int:
    """About how much space ``count`` pictures will take, from a few that are drawn for it."""
    numbers = range(0, settings.classes, max(1, settings.classes // 8))
    drawn = [draw_picture(settings.seed, 0, number, 0, settings.size) for number in numbers]
    block = os.statvfs(_existing(out)).f_frsize
    return count * sum(-(-len(file) // block) * block for file in drawn) // len(drawn)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


# ---- making them


def require_own_folder(out: Path, settings: Settings) -> None:
    """Refuse a folder that holds something else.

    Raises:
        DataError: says what.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out} is a file; name a folder")
    made_from = out / SETTINGS
    if not made_from.exists():
        if any(not path.name.startswith(".") for path in out.iterdir()):
            raise DataError(
                f"{out} holds other files ({SETTINGS} is not among them); name a new or empty "
                f"folder, or look through this one with --verify {out}"
            )
        return
    wanted = {"drawing": DRAWING, **asdict(settings)}
    try:
        kept = json.loads(made_from.read_text(encoding="utf-8"))
        other = [name for name in wanted if kept[name] != wanted[name]]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{made_from} is damaged; remove {out} and begin anew") from None
    if other:
        was = ", ".join(f"{name.replace('_', '-')} {kept[name]}" for name in other)
        now = ", ".join(f"{wanted[name]}" for name in other)
        raise DataError(
            f"{out} was made with {was} instead of {now}; name another folder, remove this one, "
            "or use its settings"
        )


def prepare(
    out: Path, settings: Settings, *, processes: int = 1, dry_run: bool = False
) -> dict[str, Any]:
    """Write what is missing of a data set.

    Args:
        out: folder; made where it is not there.
        settings: what it is made from.
        processes: that draw.
        dry_run: write nothing.

    Returns:
        What was done, for ``--json``.

    Raises:
        DataError: the folder holds something else, is being written to, or has too little space.
        OSError: it cannot be written to.
    """
    require_own_folder(out, settings)
    count = count_missing(out, settings)
    all_of_them = settings.classes * sum(settings.counts)
    needed = bytes_on_disk(out, settings, count)
    disk = os.statvfs(_existing(out))
    free = shutil.disk_usage(_existing(out)).free
    found = {
        "out": str(out), **asdict(settings), "there": all_of_them - count,
        "written": 0 if dry_run else count, "missing": count if dry_run else 0,
        "bytes": needed, "free_bytes": free,
    }  # fmt: skip
    if needed * SPARE > free:
        raise DataError(
            f"{out}: {count} pictures need about {megabytes(needed * SPARE)} and "
            f"{megabytes(free)} are free; choose fewer or smaller ones, or another disk"
        )
    if disk.f_files and count > disk.f_favail:
        raise DataError(
            f"{out}: {count} files are to be written, and the file system has room for "
            f"{disk.f_favail} more; choose fewer, or another disk"
        )
    if dry_run:
        return found
    out.mkdir(parents=True, exist_ok=True)
    with sole_writer(out):
        require_own_folder(out, settings)  # another call may have come first
        made_from = json.dumps({"drawing": DRAWING, **asdict(settings)})
        names = "".join(
            f"{wnid(number)} {', '.join(look_of(number))}\n" for number in range(settings.classes)
        )
        for name, text in ((SETTINGS, made_from), (NAMES, names)):
            write_whole(out / name, text)
        work = partial(write_piece, out, settings)
        with progress_bar("writing", count) as advance:
            for done in in_processes(work, missing(out, settings), processes):
                advance(done)
    return found


def megabytes(amount: float) -> str:
    """An amount of bytes in words.

    >>> megabytes(2_345_678), megabytes(23_456_789_000)
    ('2.3 MB', '23.5 GB')
    """
    return f"{amount / 1e9:,.1f} GB" if amount >= 1e9 else f"{amount / 1e6:,.1f} MB"


# ---- looking through a folder


def verify(folder: Path, *, processes: int = 1) -> dict[str, Any]:
    """Open every picture of a folder in this layout.

    Returns:
        For each split the numbers of ``classes`` and ``pictures``; ``broken`` files with ``path``
        and ``reason``; ``problems`` of the layout in words.

    Raises:
        DataError: it is no folder, or not in this layout.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    if not (folder / "train").is_dir():
        raise DataError(
            f"{folder} has no folder train: pictures must lie in train/CLASS/ and val/CLASS/, with "
            f"names that end in {', '.join(SUFFIXES)}"
        )
    found: dict[str, Any] = {"folder": str(folder), "broken": [], "problems": []}
    problems, paths = found["problems"], []
    classes: dict[str, set[str]] = {}
    for split in SPLITS:
        names = classes[split] = set()
        pictures = 0
        astray = 0
        for entry in sorted((folder / split).iterdir() if (folder / split).is_dir() else []):
            if entry.is_dir():
                inside = [path for path in sorted(entry.iterdir()) if _is_picture(path)]
                names.add(entry.name)
                pictures += len(inside)
                paths += inside
                if not inside:
                    problems.append(f"{entry}: no pictures")
            else:
                astray += _is_picture(entry)
        if astray:
            problems.append(f"{folder / split}: {astray} pictures lie in no folder of a class")
        found[split] = {"classes": len(names), "pictures": pictures}
    for one, others in (SPLITS, SPLITS[::-1]):
        if lacking := sorted(classes[one] - classes[others]):
            more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
            problems.append(f"{folder / others}: no class {', '.join(lacking[:5])}{more}")
    pieces = [paths[start : start + CHUNK] for start in range(0, len(paths), CHUNK)]
    with progress_bar("opening", len(paths)) as advance:
        for opened, broken in in_processes(open_all, pieces, processes):
            advance(opened)
            found["broken"] += broken
    found["broken"].sort(key=lambda each: each["path"])
    return found


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def open_all(paths: Sequence[Path]) -> tuple[int, list[dict[str, str]]]:
    """How many were opened, and the broken ones of them."""
    broken = []
    for path in paths:
        try:
            file_size(path)
            with Image.open(path) as picture:
                picture.load()
        except Exception as error:  # noqa: BLE001  Pillow raises whatever a damaged file leads it to
            broken.append({"path": str(path), "reason": _reason(error)})
    return len(paths), broken


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "no picture that Pillow knows"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# ---- command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="Exit status: 0 all well, 1 something is wrong and was named, 2 wrong usage.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="folder to write to")
    what.add_argument("--verify", type=Path, metavar="FOLDER", help="open every picture of it")
    making = parser.add_argument_group("with --out")
    making.add_argument(
        *("--classes",), type=whole_number(2, MOST_CLASSES), help=f"2 to {MOST_CLASSES} (10)"
    )
    making.add_argument("--per-class", type=whole_number(1), help="for training (500)")
    making.add_argument(
        "--val-per-class", type=whole_number(1), help="for validation (a fifth of that)"
    )
    making.add_argument("--size", type=whole_number(16, 1024), help="pixels of both sides (224)")
    making.add_argument("--seed", type=whole_number(0), help="(0)")
    making.add_argument("--dry-run", action="store_true", default=None, help="write nothing")
    told = "one for each core that may be used"
    parser.add_argument("--processes", type=whole_number(1), default=usable_cores(), help=told)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def main() -> int:
    """Command line."""
    parser = _parser()
    given = parser.parse_args()
    if given.verify is not None:
        for name in ("classes", "per_class", "val_per_class", "size", "seed", "dry_run"):
            if getattr(given, name) is not None:
                parser.error(f"--{name.replace('_', '-')} goes with --out, not with --verify")
    found, status = result_of(
        lambda: _verify(given) if given.verify is not None else _prepare(given),
        given.out or given.verify,
        interrupted(again=False) if given.out else "interrupted",
    )
    return status if found is None else found


def _prepare(given: argparse.Namespace) -> int:
    per_class = given.per_class or 500
    settings = Settings(
        classes=given.classes or 10,
        per_class=per_class,
        val_per_class=given.val_per_class or max(1, per_class // VAL_SHARE),
        size=given.size or 224,
        seed=given.seed or 0,
    )
    found = prepare(given.out, settings, processes=given.processes, dry_run=bool(given.dry_run))
    if given.json:
        print(json.dumps(found))
        return 0
    print(f"{given.out}: {settings.describe()}")
    if given.dry_run:
        print(
            f"{found['there']} are there; {found['missing']} would be written, about "
            f"{megabytes(found['bytes'])} of {megabytes(found['free_bytes'])} that are free"
        )
    else:
        print(f"{found['there']} were there, {found['written']} written")
    return 0


def _verify(given: argparse.Namespace) -> int:
    found = verify(given.verify, processes=given.processes)
    wrong = bool(found["broken"] or found["problems"])
    if given.json:
        print(json.dumps(found))
        return int(wrong)
    for each in found["broken"]:
        print(f"{each['path']}: {each['reason']}")
    for problem in found["problems"]:
        print(problem)
    for split in SPLITS:
        print(f"{split}: {found[split]['classes']} classes, {found[split]['pictures']} pictures")
    print(f"{len(found['broken'])} broken")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
