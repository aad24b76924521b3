"""Turns pictures of any kind into the JPEG files of a data set."""

from __future__ import annotations

import os
import re
import sys
import warnings
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from datasets_prep.common import is_of_storage, unlisted
from datasets_prep.frame import Source
from hvd_elastic.data.decoding import explained, open_picture, orientation, to_rgb, turned
from hvd_elastic.data.files import HIDDEN, LINKS, files_below, is_shown, leads_to_folder
from hvd_elastic.errors import DataError

SUFFIXES = (
    *(".jpeg", ".jpg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".avif"),
    *(".jp2", ".ppm", ".pgm", ".pbm", ".pnm"),
)
_SHOWN = 5
_WORDNET = re.compile(r"n\d{8}")


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


class LeftOut(Counter[str]):
    """Counts what a folder has beside images, by endings and kinds."""

    def say(self, folder: Path) -> None:
        """Print what was left out of a folder, if anything."""
        if self:
            most = ", ".join(f"{what} ({count})" for what, count in self.most_common(_SHOWN))
            more = f" and {len(self) - _SHOWN} other kinds" if len(self) > _SHOWN else ""
            print(
                f"{folder}: {self.total()} entries are left out, which are no images by their "
                f"names: {most}{more}",
                file=sys.stderr,
            )


def folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, but for hidden ones and caches."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and is_shown(path.name))


def classes_in(folder: Path) -> list[str]:
    """Return the names of the classes of a folder, which has one for each; [] if it has none."""
    return [name for name in folders_in(folder) if holds_pictures(folder / name)]


def holds_pictures(folder: Path) -> bool:
    """Return whether there is an image in a folder, at any depth."""
    return any(True for _ in _pictures(folder, LeftOut()))


def files_in(folder: Path) -> list[str]:
    """Return the names of the pictures that lie in a folder itself."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and is_shown(path.name) and not path.is_dir()
    )


def list_folder(folder: Path, classes: Sequence[str], *, some: bool = False) -> Files:
    """Return the pictures in a folder, in the order of their names; print what is left out.

    Args:
        folder: with pictures, at any depth; with ``classes`` a folder for each.
        classes: names of these folders by label; empty: there are no labels.
        some: whether folders of classes may be missing.

    Raises:
        DataError: a class has no folder, or a folder with pictures no class.
    """
    files, left_out = Files(folder), LeftOut()
    if not classes:
        files.add(_pictures(folder, left_out), -1)
        left_out.say(folder)
        return files
    with os.scandir(folder) as entries:
        kinds = filter(None, map(_why_left_out, entries))
        left_out.update(kind for kind in kinds if kind != LINKS)  # these may be classes
    there, found = folders_in(folder), classes_in(folder)
    if other := sorted(set(found) - set(classes)):
        raise DataError(
            f"{folder}/{other[0]} is no class; the classes are {', '.join(classes[:5])}…"
        )
    if empty := sorted(set(there) - set(found)):
        print(f"{folder}: without pictures: {', '.join(empty[:_SHOWN])}", file=sys.stderr)
    if lacking := [name for name in classes if name not in there]:
        if not some:
            raise DataError(f"class {lacking[0]} has no folder in {folder}")
        print(
            f"{folder}: {len(lacking)} classes have no folder: {', '.join(lacking[:_SHOWN])}",
            file=sys.stderr,
        )
    for label, name in enumerate(classes):
        if name in there:
            inside = _pictures(folder / name, left_out)
            files.add(((f"{name}/{path}", entry) for path, entry in inside), label)
    left_out.say(folder)
    return files


class Files(Sequence[Source]):
    """Files in a folder as sources, in some 50 bytes for each.

    Attributes:
        newest: when the newest one was written [s since 1970].
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._names, self._ends = bytearray(), array("q")
        self._labels, self._sizes = array("q"), array("q")
        self.newest = 0.0

    def add(self, files: Iterable[tuple[str, os.DirEntry[str]]], label: int) -> None:
        """Add files of one class by their paths in the folder."""
        for name, entry in files:
            self._names += os.fsencode(name)
            self._ends.append(len(self._names))
            self._labels.append(label)
            try:
                found = entry.stat()
            except OSError as error:
                if is_of_storage(error):
                    raise unlisted(entry.path, error) from error
                # A link that leads nowhere.
                self._sizes.append(-1)
                continue
            self._sizes.append(found.st_size)
            self.newest = max(self.newest, found.st_mtime)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        start = self._ends[index - 1] if index else 0
        name = os.fsdecode(bytes(self._names[start : self._ends[index]]))
        path = f"{self._root}/{name}"
        return Source(path, name, self._labels[index], file_bytes=self._sizes[index])


def _pictures(folder: Path, left_out: LeftOut) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the pictures in a folder at any depth, by their paths in it, in the order of names."""
    return files_below(folder, _why_left_out, left_out)


def _why_left_out(entry: os.DirEntry[str]) -> str:
    """Return the kind of an entry that is neither a picture nor a folder of them; "": it is."""
    ending = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122  ten times as fast
    if not is_shown(entry.name):
        return HIDDEN
    if leads_to_folder(entry):
        return LINKS
    if entry.is_dir(follow_symlinks=False) or ending in SUFFIXES:
        return ""
    return ending or "without ending"


def read_classes(path: Path, folders: Collection[str] = ()) -> list[str]:
    """Return the names in a file with a class in each line.

    A line is the name of a class, such as ``polar bear``, or begins with it: with the name of one
    of ``folders``, or as ``n01440764 tench``, with a number of WordNet.

    Raises:
        DataError: the file cannot be read, has no names, or one twice.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise DataError(
            f"{path}, the file with the names of the classes, cannot be read: {reason}; it needs "
            "one class in each line, in the order of the labels"
        ) from None
    names: list[str] = []
    for number, line in enumerate(lines, 1):
        if name := line.strip():
            first = name.split()[0]
            if name not in folders and (first in folders or _WORDNET.fullmatch(first)):
                name = first
            if name in names:
                raise DataError(f"{path}, line {number}: class {name!r} is there twice")
            names.append(name)
    if not names:
        raise DataError(f"{path} names no class; it needs one in each line")
    return names
