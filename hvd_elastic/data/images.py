"""Decodes pictures; JPEG at a fraction of its size where a crop allows that."""

from __future__ import annotations

import math
import random
from io import BytesIO
from typing import Any

from hvd_elastic.errors import DataError

try:
    from PIL import Image
except ModuleNotFoundError:  # pragma: no cover  # reading tokens needs no Pillow
    Image = None  # type: ignore[assignment]

_TRIES = 10


def decode(data: bytes) -> Any:
    """Return a picture in RGB (``PIL.Image.Image``)."""
    return _opened(data).convert("RGB")


def _opened(data: bytes) -> Any:
    if Image is None:
        raise DataError("pictures need Pillow: pip install pillow")
    return Image.open(BytesIO(data))


class RandomCrop:
    """Decodes a random part of a picture, resized: torchvision's ``RandomResizedCrop`` and flip.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the part still has ``size`` pixels there,
    which libjpeg does in the frequency domain, in a fraction of the time. Random numbers come from
    :mod:`random`, which PyTorch's loader seeds in every worker process.

    Args:
        size: of both sides of the result [pixels], >= 1.
        scale: smallest and largest share of the picture's area.
        ratio: smallest and largest width / height of the part.
        flip: probability that the result is mirrored.
        scaled: whether a JPEG may be decoded at a fraction of its size.

    Returns when called with bytes: ``PIL.Image.Image``, RGB, ``size`` x ``size``.
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

    def __call__(self, data: bytes) -> Any:
        picture = _opened(data)
        left, top, width, height = self._part(*picture.size)
        box = (left, top, left + width, top + height)
        if self.scaled and picture.format == "JPEG":
            # Pillow takes the smallest fraction at which both sides have at least this many pixels.
            share = self.size / min(width, height)
            whole = picture.size
            wanted = tuple(math.ceil(side * share) for side in whole)
            if share < 1 and picture.draft("RGB", wanted) is not None:
                factors = [now / before for now, before in zip(picture.size, whole, strict=True)]
                box = tuple(side * factors[place % 2] for place, side in enumerate(box))
        picture = picture.convert("RGB").resize((self.size,) * 2, Image.Resampling.BILINEAR, box)
        if random.random() < self.flip:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return picture

    def _part(self, width: int, height: int) -> tuple[int, int, int, int]:
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
    """

    def __init__(self, size: int, *, resize: int | None = None, scaled: bool = True) -> None:
        self.size, self.resize, self.scaled = size, resize or size * 8 // 7, scaled

    def __call__(self, data: bytes) -> Any:
        picture = _opened(data)
        if self.scaled and picture.format == "JPEG":
            share = self.resize / min(picture.size)
            picture.draft("RGB", tuple(math.ceil(side * share) for side in picture.size))
        width, height = picture.size
        side = min(width, height) * self.size / self.resize
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
        return picture.convert("RGB").resize((self.size,) * 2, Image.Resampling.BILINEAR, box)
