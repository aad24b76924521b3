"""Decodes the part of a picture that a crop needs, as an array.

JPEG files are decoded by simplejpeg where it is installed, others and damaged ones by Pillow. The
part is resized by PyTorch in a process that has imported it, else by Pillow; both filters are the
same and differ by the rounding of a pixel.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hvd_elastic.data.decoding import (
    SIDEWAYS,
    explained,
    jpeg_orientation,
    open_picture,
    orientation,
    to_rgb,
    turned,
)
from hvd_elastic.errors import DataError

try:
    from PIL import Image
except ModuleNotFoundError:  # pragma: no cover  # reading tokens needs no Pillow
    Image = None  # type: ignore[assignment]
try:
    import simplejpeg
except ModuleNotFoundError:  # pragma: no cover  # an optional one
    simplejpeg = None

_TRIES = 10
_JPEG = b"\xff\xd8"  # the first bytes of such a file
_CMYK = ("CMYK", "YCCK")
_FACTORS = (8, 4, 2, 1)
"""By which a JPEG may be decoded smaller. At other sizes, such as 3/8, libjpeg takes longer."""

_TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: pixels[::-1].swapaxes(0, 1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: pixels[:, ::-1].swapaxes(0, 1),
}
"""What brings the pixels of each orientation of EXIF upright."""

Part = tuple[float, float, float, float]
"""Left, top, width and height of a part of a picture [pixels]."""


class RandomCrop:
    """Decodes a random part of a picture, resized: torchvision's ``RandomResizedCrop`` and flip.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the part still has ``size`` pixels there,
    which libjpeg does in the frequency domain. Random numbers come from :mod:`random`, which
    PyTorch's loader seeds in every worker process.

    Args:
        size: of both sides of the result [pixels], >= 1.
        scale: smallest and largest share of the picture's area.
        ratio: smallest and largest width / height of the part.
        flip: probability that the result is mirrored.
        scaled: whether a JPEG may be decoded at a fraction of its size.

    Returns when called with bytes: array of uint8, ``size`` x ``size`` x 3, RGB.
    """

    def __init__(
        self,
        size: int,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        scaled: bool = True,
    ) -> None:
        if size < 1 or not 0 < scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
            raise DataError(
                f"RandomCrop({size}, scale={scale}, ratio={ratio}): the size must be 1 or more, "
                "scale two shares in (0, 1] and ratio two positive numbers, the smaller one first"
            )
        self.size, self.scale, self.ratio, self.flip = size, scale, ratio, flip
        self.scaled = scaled

    def __call__(self, data: bytes) -> np.ndarray:
        pixels = _decode_part(data, self.part, self.size, scaled=self.scaled)
        return _resized(pixels, self.size, mirrored=random.random() < self.flip)

    def part(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return left, top, width and height of a random part of a picture."""
        low, high = map(math.log, self.ratio)
        for _ in range(_TRIES):
            area = width * height * random.uniform(*self.scale)
            ratio = math.exp(random.uniform(low, high))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return random.randint(0, width - w), random.randint(0, height - h), w, h
        w = min(width, round(height * self.ratio[1]))
        h = min(height, round(width / self.ratio[0]))
        return (width - w) // 2, (height - h) // 2, w, h


class CentreCrop:
    """Decodes the middle of a picture, resized, for validation.

    Args:
        size: of both sides of the result [pixels].
        resize: of the shorter side, before the middle is cut out [pixels]; None: size * 8 / 7.
        scaled: whether a JPEG may be decoded at a fraction of its size.

    Returns when called with bytes: array of uint8, ``size`` x ``size`` x 3, RGB.
    """

    def __init__(self, size: int, *, resize: int | None = None, scaled: bool = True) -> None:
        self.size, self.resize, self.scaled = size, resize or size * 8 // 7, scaled

    def __call__(self, data: bytes) -> np.ndarray:
        return _resized(_decode_part(data, self._part, self.size, scaled=self.scaled), self.size)

    def _part(self, width: int, height: int) -> Part:
        side = min(width, height) * self.size / self.resize
        return (width - side) / 2, (height - side) / 2, side, side


def _decode_part(
    data: bytes, choose: Callable[[int, int], Part], size: int, *, scaled: bool
) -> np.ndarray:
    """Return the pixels of a part of a picture, smaller if both sides keep ``size`` of them."""
    width, height, pixels_of = _measured(data)
    left, top, across, down = choose(width, height)
    most = max(1.0, min(across, down) / size) if scaled else 1.0
    factor = next(each for each in _FACTORS if each <= most)
    pixels = pixels_of(width // factor, height // factor)
    x, y = pixels.shape[1] / width, pixels.shape[0] / height
    rows = slice(round(top * y), max(round(top * y) + 1, round((top + down) * y)))
    columns = slice(round(left * x), max(round(left * x) + 1, round((left + across) * x)))
    part = pixels[rows, columns]
    return part if min(part.strides) > 0 else np.ascontiguousarray(part)  # PyTorch needs that


def _measured(data: bytes) -> tuple[int, int, Callable[[int, int], np.ndarray]]:
    """Return width and height of an image, and what decodes it to at least such a size."""
    if simplejpeg is not None and data[:2] == _JPEG:
        with contextlib.suppress(ValueError):
            height, width, space, _ = simplejpeg.decode_jpeg_header(data)
            if space not in _CMYK:
                lies = jpeg_orientation(data)
                return *_turned_size(lies, width, height), partial(_decode_jpeg, data, lies)
    with explained(data):
        picture = open_picture(data)
        lies = orientation(picture)
        return *_turned_size(lies, *picture.size), partial(_decode_by_pillow, data, picture, lies)


def _turned_size(lies: int, width: int, height: int) -> tuple[int, int]:
    return (height, width) if lies in SIDEWAYS else (width, height)


def _decode_jpeg(data: bytes, lies: int, width: int, height: int) -> np.ndarray:
    across, down = _turned_size(lies, width, height)
    try:
        found: np.ndarray = simplejpeg.decode_jpeg(data, "RGB", min_width=across, min_height=down)
    except ValueError:  # Pillow overlooks some damage, and names the rest
        with explained(data):
            return _decode_by_pillow(data, open_picture(data), lies, width, height)
    return _TURNS[lies](found) if lies in _TURNS else found


def _decode_by_pillow(data: bytes, picture: Any, lies: int, width: int, height: int) -> np.ndarray:
    with explained(data):
        # Other kinds than JPEG ignore it.
        picture.draft("RGB", _turned_size(lies, width, height))
        return np.array(turned(to_rgb(picture), lies))


def _resized(pixels: np.ndarray, size: int, *, mirrored: bool = False) -> np.ndarray:
    torch = sys.modules.get("torch")
    if torch is not None:
        # In this order of calls PyTorch sees the layout, which stays; else it transposes twice.
        batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
        batch = torch.nn.functional.interpolate(batch, [size] * 2, mode="bilinear", antialias=True)
        batch = batch.flip(3) if mirrored else batch
        return np.ascontiguousarray(batch[0].permute(1, 2, 0).numpy())
    if Image is None:
        raise DataError("pictures need Pillow: pip install pillow")
    picture = Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR)
    if mirrored:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(picture)
