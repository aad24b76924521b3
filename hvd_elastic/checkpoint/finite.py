"""Finds NaN and infinity in the bytes of a tensor, of types that NumPy lacks as well."""

from __future__ import annotations

from typing import Any

import numpy as np

_CHUNK_BYTES = 1 << 19  # stays in a processor's cache between the passes over it
_PATTERNS = {
    "float16": ("<u2", 0x7C00),
    "bfloat16": ("<u2", 0x7F80),
    "float32": ("<u4", 0x7F800000),
    "float64": ("<u8", 0x7FF0 << 48),
    "complex64": ("<u4", 0x7F800000),
    "complex128": ("<u8", 0x7FF0 << 48),
    "float8_e4m3fn": ("u1", 0x7F),  # the only NaN; it has no infinity
    "float8_e5m2": ("u1", 0x7C),
}
"""For each type, the integer of a number's size, and the bits that are all set in NaN and infinity:
those of the exponent."""


def has_not_finite(dtype: str, data: np.ndarray[Any, Any], first: int = 0) -> bool:
    """Return whether a number in the bytes of a tensor is NaN or infinity.

    Args:
        dtype: name of the tensor's type; a type without NaN has none.
        data: a contiguous part of the tensor's bytes. Numbers that are cut are left out.
        first: where in the tensor the part begins [bytes].

    >>> has_not_finite("float32", np.array([1.0, np.nan], np.float32).view(np.uint8))
    True
    """
    if dtype not in _PATTERNS:
        return False
    kind, mask = _PATTERNS[dtype]
    size = np.dtype(kind).itemsize
    data = data[-first % size :]
    numbers = data[: len(data) // size * size].view(kind)
    step = _CHUNK_BYTES // size
    chunks = (numbers[at : at + step] for at in range(0, len(numbers), step))
    return any(int((chunk & chunk.dtype.type(mask)).max()) == mask for chunk in chunks)
