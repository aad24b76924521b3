"""The SHA-256 of files."""

from __future__ import annotations

import hashlib
import os
from typing import Any

_READ_BYTES = 1 << 20  # at a time


def hash_of(number: int, end: int | None = None) -> Any:
    """Return a sha256 object updated with the first ``end`` bytes of an open file; None for all.

    Args:
        number: descriptor of the file, whose position stays.
        end: number of bytes.
    """
    digest = hashlib.sha256()
    offset = 0
    while end is None or offset < end:
        size = _READ_BYTES if end is None else min(_READ_BYTES, end - offset)
        data = os.pread(number, size, offset)
        if not data:
            break
        digest.update(data)
        offset += len(data)
    return digest
