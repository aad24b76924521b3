"""Turns pictures of any kind into the JPEG files of a data set."""

from __future__ import annotations

import os
import warnings
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from datasets_prep.frame import Source
from hvd_elastic.data.decoding import explained, open_picture, orientation, to_rgb, turned
from hvd_elastic.errors import DataError

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class ToJpeg:
    """Resizes and encodes a picture.

    A JPEG in RGB that lies upright and is small enough is kept as it is.

    Attributes:
        resize: of the shorter side, if it is longer [pixels]; 0: as it is.
        quality: of JPEG, 1 to 100.
    """

    resize: int
    quality: int

    def __call__(self, data: bytes) -> list[tuple[bytes]]:
        """Return the picture as a JPEG in RGB, as one example with one value.

        Raises:
            DataError: it is damaged or no picture; says how.
        """
        with warnings.catch_warnings(), explained(data):
            warnings.simplefilter("ignore")  # damaged EXIF; what matters raises
            return [(self._encode(data),)]

    def _encode(self, data: bytes) -> bytes:
        picture = open_picture(data)
        lies = orientation(picture)
        shrinks = 0 < self.resize < min(picture.size)
        if picture.format == "JPEG" and picture.mode == "RGB" and lies == 1 and not shrinks:
            picture.load()  # raises if it is damaged
            return data
        if shrinks and picture.format == "JPEG" and picture.mode == "RGB":
            # Decoding at a fraction of the size; twice the result, so that nothing is lost.
            share = 2 * self.resize / min(picture.size)
            picture.draft("RGB", (int(picture.width * share), int(picture.height * share)))
        upright = turned(to_rgb(picture), lies)
        if shrinks:
            share = self.resize / min(upright.size)
            width, height = (max(self.resize, round(side * share)) for side in upright.size)
            upright = upright.resize((width, height), Image.Resampling.BICUBIC)
        out = BytesIO()
        upright.save(out, "JPEG", quality=self.quality)
        return out.getvalue()


def classes_in(folder: Path) -> list[str]:
    """Return the names of the classes of a folder, which has one for each; [] if it has none."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def files_in(folder: Path) -> list[str]:
    """Return the names of the pictures that lie in a folder itself."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and path.name[0] != "." and not path.is_dir()
    )


def list_folder(folder: Path, classes: Sequence[str]) -> Files:
    """Return the pictures in a folder, in the order of their names.

    Args:
        folder: with pictures, at any depth; with ``classes`` a folder for each.
        classes: names of these folders by label; empty: there are no labels.

    Raises:
        DataError: a class has no folder, or a folder no class.
    """
    files = Files(folder)
    if not classes:
        files.add(_pictures(folder), -1)
        return files
    found = classes_in(folder)
    for here, there, what in (
        (classes, found, f"class {{}} has no folder in {folder}"),
        (found, classes, f"{folder}/{{}} is no class; the classes are {', '.join(classes[:5])}…"),
    ):
        if lacking := sorted(set(here) - set(there)):
            raise DataError(what.format(lacking[0]))
    for label, name in enumerate(classes):
        files.add((f"{name}/{inside}" for inside in _pictures(folder / name)), label)
    return files


class Files(Sequence[Source]):
    """Files in a folder as sources, in some 40 bytes for each."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._names, self._ends, self._labels = bytearray(), array("q"), array("q")

    def add(self, names: Iterable[str], label: int) -> None:
        """Add files of one class by their paths in the folder."""
        for name in names:
            self._names += os.fsencode(name)
            self._ends.append(len(self._names))
            self._labels.append(label)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        start = self._ends[index - 1] if index else 0
        name = os.fsdecode(bytes(self._names[start : self._ends[index]]))
        return Source(f"{self._root}/{name}", name, self._labels[index])


def _pictures(folder: Path) -> Iterator[str]:
    """Yield the pictures in a folder at any depth, by their paths in it, in the order of names."""
    names, folders = [], set()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.add(entry.name)
            elif (
                entry.name[0] == "."
                or Path(entry.name).suffix.lower() not in SUFFIXES
                or (entry.is_symlink() and entry.is_dir())
            ):
                continue
            names.append(entry.name)
    for name in sorted(names):
        if name in folders:
            yield from (f"{name}/{inside}" for inside in _pictures(folder / name))
        else:
            yield name


def read_classes(path: Path) -> list[str]:
    """Return the names in a file with a class in each line: its first word.

    Raises:
        DataError: the file cannot be read, has no names, or one twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise DataError(
            f"{path}, the file with the names of the classes, cannot be read: {reason}; it needs "
            "one class in each line, in the order of the labels"
        ) from None
    names: list[str] = []
    for number, line in enumerate(lines, 1):
        if words := line.split():
            if words[0] in names:
                raise DataError(f"{path}, line {number}: class {words[0]!r} is there twice")
            names.append(words[0])
    if not names:
        raise DataError(f"{path} names no class; it needs one in each line")
    return names
