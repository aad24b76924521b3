"""Pictures of classes that a network can tell apart: a shape, what fills it, and a letter on it.

Place, size, turn, colours, background and noise are drawn anew for each. Each follows from a seed
and its own place in the data set alone; the same versions of NumPy and Pillow make the same bytes.
"""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["DRAWING", "MOST_CLASSES", "draw_picture", "look_of"]

DRAWING = 1
"""Raised when the same seed gives other pictures."""
MOST_CLASSES = 1000
QUALITY = 90

Array = Any  # of NumPy

SHAPES: dict[str, Callable[[Array, Array], Array]] = {  # inside or not, within -1..1
    "disc": lambda u, v: np.hypot(u, v) < 1,
    "square": lambda u, v: np.maximum(abs(u), abs(v)) < 0.85,
    "triangle": lambda u, v: (v < 0.7) & (1.8 * abs(u) - v < 0.95),
    "cross": lambda u, v: (np.minimum(abs(u), abs(v)) < 0.35) & (np.maximum(abs(u), abs(v)) < 1),
    "star": lambda u, v: np.hypot(u, v) < 0.68 + 0.32 * np.cos(5 * np.arctan2(u, -v)),
    "ring": lambda u, v: abs(np.hypot(u, v) - 0.75) < 0.25,
    "diamond": lambda u, v: 1.5 * abs(u) + abs(v) < 1,
    "dome": lambda u, v: (np.hypot(u, v - 0.4) < 1) & (v < 0.4),
    "bar": lambda u, v: (abs(u) < 1) & (abs(v) < 0.45),
    "heart": lambda u, v: u**2 + (-1.2 * v - 0.6 * np.sqrt(abs(u)) + 0.1) ** 2 < 0.8,
}
# Which of two colours. Like shapes and letters they stay what they are in a mirror, since training
# flips pictures.
FILLINGS: dict[str, Callable[[Array, Array], Array]] = {
    "plain": lambda u, _v: u > 9,
    "lying stripes": lambda _u, v: np.floor(3 * v) % 2 == 0,
    "checks": lambda u, v: (np.floor(3 * u) + np.floor(3 * v)) % 2 == 0,
    "standing stripes": lambda u, _v: np.floor(3 * u) % 2 == 0,
    "dots": lambda u, v: np.hypot((2.5 * u) % 1 - 0.5, (2.5 * v) % 1 - 0.5) < 0.32,
    "circles": lambda u, v: np.floor(4 * np.hypot(u, v)) % 2 == 0,
    "rays": lambda u, v: np.cos(8 * np.arctan2(u, v)) > 0,
    "lattice": lambda u, v: np.minimum((3 * u) % 1, (3 * v) % 1) < 0.3,
    "halves": lambda _u, v: v < 0,
    "waves": lambda u, v: np.sin(9 * v + 2 * np.cos(6 * u)) > 0,
}
LETTERS = "AHMOTUVWXY"


def look_of(number: int) -> tuple[str, str, str]:
    """Shape, filling and letter of a class; ten classes in a row differ in all three.

    >>> look_of(0), look_of(11)
    (('disc', 'plain', 'A'), ('square', 'checks', 'M'))
    >>> len({look_of(number) for number in range(1000)})
    1000
    """
    ones, tens, hundreds = number % 10, number // 10 % 10, number // 100
    filling, letter = (ones + tens) % 10, (ones + tens + hundreds) % 10
    return list(SHAPES)[ones], list(FILLINGS)[filling], LETTERS[letter]


@lru_cache
def letter_mask(letter: str, size: int) -> Image.Image:
    """The letter, grey where its rim is, on black."""
    # Pillow brings this font along, so all machines have it.
    font = ImageFont.load_default(size)
    mask = Image.new("L", (size, size))
    draw = ImageDraw.Draw(mask)
    rim = max(1, size // 12)
    middle = (size / 2, size / 2)
    draw.text(middle, letter, 128, font, anchor="mm", stroke_width=rim, stroke_fill=128)
    draw.text(middle, letter, 255, font, anchor="mm")
    return mask


def draw_picture(seed: int, split: int, number: int, index: int, size: int) -> bytes:
    """One picture as a JPEG file.

    Args:
        seed: of the data set.
        split: 0 for training, 1 for validation.
        number: of the class.
        index: in its class.
        size: of both sides [pixels].
    """
    rng = np.random.default_rng((seed, split, number, index))
    shape, filling, letter = look_of(number)
    wide = 2 * size  # halved at the end, which smooths the edges
    radius = wide * rng.uniform(0.28, 0.42)
    middle = rng.uniform(0.9 * radius, wide - 0.9 * radius, size=2)
    turn = rng.uniform(-0.25, 0.25)
    places = np.arange(wide, dtype=np.float32) + 0.5
    x, y = (places - middle[0])[None, :] / radius, (places - middle[1])[:, None] / radius
    u = (x * math.cos(turn) + y * math.sin(turn)).astype(np.float32)
    v = (y * math.cos(turn) - x * math.sin(turn)).astype(np.float32)

    coarse = rng.integers(40, 160, size=(4, 4, 3), dtype=np.uint8)
    ground = Image.fromarray(coarse).resize((wide, wide), Image.Resampling.BICUBIC)
    pixels = np.asarray(ground).copy()
    hue = rng.uniform()
    first = _colour(hue, rng.uniform(0.6, 1.0), rng.uniform(0.8, 1.0))
    second = _colour(hue + rng.uniform(0.3, 0.7), rng.uniform(0.6, 1.0), rng.uniform(0.3, 0.6))
    inside = SHAPES[shape](u, v)
    other = inside & FILLINGS[filling](u, v)
    pixels[inside] = first
    pixels[other] = second

    mask = letter_mask(letter, max(8, round(0.8 * radius)))
    corner = (round(middle[0] - mask.width / 2), round(middle[1] - mask.height / 2))
    picture = Image.fromarray(pixels)
    picture.paste((0, 0, 0), corner, mask.point(lambda grey: 255 if grey else 0))
    picture.paste((255, 255, 255), corner, mask.point(lambda grey: max(0, 2 * grey - 255)))
    noise = rng.normal(0, rng.uniform(2, 12), size=(size, size, 3))
    pixels = np.clip(np.asarray(picture.reduce(2)) + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def _colour(hue: float, saturation: float, value: float) -> tuple[int, ...]:
    return tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue % 1, saturation, value))
