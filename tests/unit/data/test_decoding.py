"""Images and masks of all kinds: the same pixels through preparation, decoder and crop."""

from __future__ import annotations

import functools
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pip install pillow")
from PIL import Image

from datasets_prep.pictures import ToJpeg
from hvd_elastic.data import (
    Mixture,
    RandomCrop,
    ShardDataset,
    ShardWriter,
    build_index,
    decode_mask,
    decoding,
    images,
)
from hvd_elastic.data.decoding import decode, decoders_of
from hvd_elastic.errors import DataError

RAMP = np.linspace(0, 65535, 48 * 32).reshape(32, 48).astype(np.uint16)


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def turned_jpeg(orientation: int) -> bytes:
    """A picture whose pixels lie as EXIF says; its left half is red, its upper right green."""
    upright = Image.new("RGB", (64, 32), (200, 30, 20))
    upright.paste((20, 30, 200), (32, 0, 64, 32))
    upright.paste((20, 200, 30), (32, 0, 64, 16))
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # PIL.Image.Transpose
    lying = upright if orientation == 1 else upright.transpose(Image.Transpose(back[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(lying, "JPEG", exif=exif, quality=95)


def whole(data: bytes) -> np.ndarray:
    """All pixels as a crop decodes them."""
    return images._decode_part(data, lambda width, height: (0, 0, width, height), 9999, scaled=True)


@pytest.mark.parametrize("simple", [True, False])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright_in_every_decoder(
    orientation: int, simple: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not simple:
        monkeypatch.setattr(images, "simplejpeg", None)
    data = turned_jpeg(orientation)
    ((jpeg,),) = ToJpeg(0, 95)(data)
    for found in (decode(data), decode(jpeg), whole(data), decode_mask(data)):
        pixels = np.asarray(found).astype(int)
        assert pixels.shape == (32, 64, 3)
        assert np.abs(pixels[4, 4] - (200, 30, 20)).max() < 12
        assert np.abs(pixels[4, 60] - (20, 200, 30)).max() < 12
        assert np.abs(pixels[28, 60] - (20, 30, 200)).max() < 12
    crop = RandomCrop(8, scale=(0.2, 0.3))(data)
    assert crop.shape == (8, 8, 3)


def test_16_bits_are_scaled_and_transparent_parts_are_white() -> None:
    clear = Image.new("RGBA", (8, 8), (9, 9, 9, 0))
    paletted = Image.new("P", (8, 8), 1)
    paletted.putpalette([0, 0, 0, 10, 20, 30])
    for data, expected in (
        (encoded(Image.fromarray(RAMP)), np.round(RAMP / 257)),
        (encoded(Image.fromarray(RAMP), "TIFF"), np.round(RAMP / 257)),
        (b"P5 48 32 65535\n" + RAMP.astype(">u2").tobytes(), np.round(RAMP / 257)),
        (encoded(clear), 255),
        (encoded(paletted, transparency=1), 255),
        (encoded(paletted), (10, 20, 30)),
        (encoded(Image.fromarray(RAMP), transparency=int(RAMP[3, 3])), None),
    ):
        found = np.asarray(decode(data)).astype(int)
        if expected is None:
            assert found[3, 3].tolist() == [255] * 3
            continue
        expected = expected[..., None] if isinstance(expected, np.ndarray) else expected
        assert np.abs(found - expected).max() == 0
        assert np.abs(whole(data).astype(int) - found).max() == 0
        ((jpeg,),) = ToJpeg(0, 95)(data)
        assert encoded(decode(data), "JPEG", quality=95) == jpeg


def write(folder: Path, *fields: tuple[str, bytes]) -> Path:
    folder.mkdir()
    with ShardWriter(folder / "a.tar", "tar", [name for name, _ in fields]) as writer:
        writer.add("k", [data for _, data in fields])
        writer.finish()
    build_index(folder)
    return folder


def test_masks_keep_their_values(tmp_path: Path) -> None:
    """By the name of the field, beside a JPEG, or with a decoder of their own."""
    classes = (np.arange(48 * 32) % 21).reshape(32, 48).astype(np.uint8)
    mask = Image.fromarray(classes)
    mask.putpalette(list(range(63)) * 4)
    photo = encoded(Image.new("RGB", (48, 32)), "JPEG")
    assert mask.mode == "P"
    folder = write(
        tmp_path / "seg",
        ("inst.png", encoded(Image.fromarray(RAMP))),
        ("jpg", photo),
        ("mask.png", encoded(mask)),
        ("png", encoded(mask)),
    )
    instances, picture, *masks = ShardDataset(folder)[0]
    assert picture.mode == "RGB"
    assert np.array_equal(instances, RAMP)
    assert instances.dtype == np.uint16
    assert all(np.array_equal(found, classes) for found in masks)
    dataset = ShardDataset(folder, decode={"jpg": RandomCrop(8), "png": len})
    assert [getattr(each, "shape", None) for each in dataset[0]] == [
        *((32, 48), (8, 8, 3), (32, 48)), None,
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"decode names 'jpeg', and the fields are inst\.png, jpg"):
        ShardDataset(folder, decode={"jpeg": len})
    # A single PNG is a picture, and so is one beside others.
    for fields in (("png",), ("left.png", "right.png")):
        assert decoders_of(fields, {}) == [decode] * len(fields)


def test_the_order_says_how_examples_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "a", ("png", encoded(Image.fromarray(RAMP))), ("txt", b"text"))

    def key(decode: Any = None, **options: Any) -> Any:
        return ShardDataset(folder, decode=decode, **options).order_key

    keys = [
        key(),
        key(bytes),
        key(RandomCrop(8)),
        key(RandomCrop(9)),
        key(lambda data: data),
        key(functools.partial(int, base=3)),
        key(functools.partial(int, base=4)),
        key({"txt": bytes}),
        key(fields=["txt"]),
    ]
    assert len(set(keys)) == len(keys)
    assert key(fields=["txt"]) is None, "text is decoded as ever"
    assert key(RandomCrop(8)) == keys[2], "the same in every process"
    assert not re.search("0x[0-9a-f]{6}", repr(keys))
    mixed = Mixture([(ShardDataset(folder), 1)], shuffle=False).order_key
    monkeypatch.setattr(decoding, "PIXELS", decoding.PIXELS + 1)
    assert key() != keys[0], "another release may decode otherwise"
    assert Mixture([(ShardDataset(folder), 1)], shuffle=False).order_key != mixed


def test_damaged_and_huge_images_name_shard_and_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = encoded(Image.new("1", (300, 300)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40_000)
    folder = write(tmp_path / "bomb", ("png", bomb))
    for decoder in (None, RandomCrop(8), decode_mask):
        with pytest.raises(DataError, match=r"bomb/a\.tar: example 'k' cannot .* decompression bo"):
            ShardDataset(folder, decode=decoder)[0]
    with pytest.raises(DataError, match="pixels of 32 bits"):
        decode(encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"))
