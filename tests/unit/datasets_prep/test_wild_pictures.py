"""Images that other people made: each is equal to Pillow's reference, or named."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import warnings
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pip install pillow")
from PIL import Image, ImageOps

from datasets_prep import image_folder, pictures
from hvd_elastic.data import ShardDataset, load_index
from hvd_elastic.data.decoding import decode
from hvd_elastic.data.images import _decode_part
from hvd_elastic.data.index import load_table
from hvd_elastic.errors import DataError
from tests.paths import COSTLY

FEWEST = 1000
PACKAGES = (("pillow", True), ("piexif", True), ("scikit-image", False))
"""Packages with images, and whether those are in the source release alone."""


def fetch(folder: Path) -> None:
    """Unpack packages from PyPI and Debian."""
    for package, is_source in PACKAGES:
        only = ["--no-binary", ":all:"] if is_source else []
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *only, package]
        subprocess.run(words, cwd=folder, check=False)
    for path in [*folder.iterdir()]:
        out = folder / f"{path.name}.files"
        if path.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(path) as packed:
                packed.extractall(out)
        elif path.suffix == ".gz":
            with tarfile.open(path) as file:
                file.extractall(out, filter="data")
    subprocess.run(["apt-get", "download", "tuxpaint-stamps-default"], cwd=folder, check=False)
    for path in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", path, folder / "stamps"], check=True)


def reference(data: bytes) -> Image.Image:
    """What Pillow makes of an image: upright, 16 bits scaled, transparency on white."""
    picture: Any = Image.open(BytesIO(data))
    most = (1 << getattr(picture, "tag_v2", {}).get(258, (16,))[0]) - 1  # 12 bits in TIFF
    is_wide = picture.mode.startswith("I;16") or (picture.mode, picture.format) == ("I", "PPM")
    picture = ImageOps.exif_transpose(picture)
    if is_wide:
        clear = picture.info.get("transparency")
        values = np.asarray(picture).astype(np.float64)
        grey = np.round(values * 255 / most)
        picture = Image.fromarray(np.where(values == clear, 255, grey).astype(np.uint8))
    elif picture.mode in ("I", "F"):
        raise ValueError("pixels of 32 bits")
    if picture.has_transparency_data:
        whole = picture.convert("RGBA")
        picture = Image.new("RGBA", whole.size, "white")
        picture.alpha_composite(whole)
    return picture.convert("RGB")


def difference(one: Any, other: Any) -> int:
    first, second = np.asarray(one).astype(int), np.asarray(other).astype(int)
    return int(np.abs(first - second).max(initial=0)) if first.shape == second.shape else 999


@COSTLY
@pytest.mark.filterwarnings("ignore")
def test_wild_images_are_equal_to_pillows_reference_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wild").mkdir()
    fetch(tmp_path / "wild")
    files = sorted(
        path
        for path in (tmp_path / "wild").rglob("*")
        if path.suffix.lower() in pictures.SUFFIXES and path.is_file()
    )
    assert len(files) >= FEWEST, "PyPI or Debian's packages cannot be reached"
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for number, path in enumerate(files):
        (source / f"n{number}{path.suffix}").write_bytes(path.read_bytes())
    monkeypatch.setattr(sys, "argv", ["", f"--source={source}", f"--out={out}", "--json"])
    assert image_folder.main() == 0
    said = json.loads(capsys.readouterr().out)[0]["skipped"]
    named = {int(line.partition(".")[0].removeprefix("n")) for line in said}
    shards = load_index(out).shards
    tables = [load_table(out / shard.name, 1, shard.examples) for shard in shards]
    keys = [key.decode() for table in tables for key in table["key"]]
    prepared = {int(key.rpartition("_n")[2]): place for place, key in enumerate(keys)}
    assert {*prepared} | named == {*range(len(files))}
    dataset = ShardDataset(out)
    wrong: list[tuple[Any, ...]] = []
    for number, path in enumerate(files):
        data = path.read_bytes()
        expected, why = None, ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = reference(data)
            except Exception as error:  # noqa: BLE001  Pillow raises whatever a damaged file leads to
                why = str(error)
            try:
                found = decode(data)
                crop = _decode_part(data, lambda w, h: (0, 0, w, h), 10**6, scaled=False)
            except DataError:
                found = crop = None
        if expected is None or found is None or crop is None:
            if (expected, found, crop) != (None, None, None) or number not in named:
                wrong.append((path.name, "is not named by all", expected, found, why))
            continue
        out_jpeg = BytesIO()
        expected.save(out_jpeg, "JPEG", quality=92)
        jpeg = Image.open(out_jpeg)
        ours = dataset[prepared[number]] if number in prepared else None
        if min(difference(ours, jpeg), difference(ours, expected)) > 0:
            wrong.append((path.name, "is prepared otherwise"))
        if difference(found, expected) > 0 or difference(crop, expected) > 2:
            wrong.append((path.name, "is decoded otherwise"))
    assert not wrong, (len(wrong), wrong[:9])
