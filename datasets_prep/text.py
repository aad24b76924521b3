#!/usr/bin/env python3
"""Write text files as shards of token sequences of equal length.

    python datasets_prep/text.py --source books/ --out /data/books --length 1024

Every example is an array of --length tokens (uint16, or uint32 for more than 65,536 tokens). By
default a token is a byte. --vocabulary N trains a tokenizer (byte-level BPE) on the text, and
--tokenizer takes one from a tokenizer.json; both need the library tokenizers. Files are cut at line
ends into pieces of about 1 MB, and the last tokens of a piece that do not fill a sequence are left
out.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from datasets_prep import frame
from datasets_prep.frame import Source
from datasets_prep.processes import whole_number
from hvd_elastic.data.files import file_size, write_whole
from hvd_elastic.errors import DataError

PIECE_BYTES = 1 << 20
SUFFIXES = (".txt", ".md", ".text")
BYTES = "bytes"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class ToTokens:
    """Cuts text into sequences of tokens.

    Attributes:
        length: tokens of a sequence.
        tokenizer: path of a ``tokenizer.json``, or ``BYTES``.
        sha256: of the file.
    """

    length: int
    tokenizer: str = BYTES
    sha256: str = ""

    def __call__(self, data: bytes) -> list[tuple[bytes]]:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"it is no UTF-8 text ({error.reason} at byte {error.start})") from None
        if self.tokenizer == BYTES:
            tokens = np.frombuffer(data, np.uint8).astype(np.uint16)
        else:
            made = _load(self.tokenizer)
            wide = made.get_vocab_size() > 1 << 16
            tokens = np.array(made.encode(text).ids, np.uint32 if wide else np.uint16)
        whole = len(tokens) // self.length * self.length
        return [(_npy(part),) for part in tokens[:whole].reshape(-1, self.length)]


def _npy(array: np.ndarray) -> bytes:
    out = BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


@functools.lru_cache(maxsize=1)
def _load(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise DataError("a tokenizer needs its library: pip install tokenizers") from None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001  the library raises Exception itself
        raise DataError(f"{path} is no tokenizer that the library can load: {error}") from None


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the shards."""
    files = list_texts(given.source)
    tokenizer: Path | None = given.tokenizer
    if given.vocabulary is not None:
        tokenizer = given.out.with_name(given.out.name + f".{TOKENIZER}")
        if not tokenizer.exists():
            train_tokenizer(files, given.vocabulary, tokenizer)
    convert = ToTokens(given.length)
    if tokenizer is not None:
        _load(str(tokenizer))
        digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        convert = ToTokens(given.length, str(tokenizer.absolute()), digest)
    pieces = [piece for path in files for piece in cut(path)]
    return [frame.prepare(given.out, pieces, (), frame.settings_of(given, ("npy",), convert))]


def list_texts(source: Path) -> list[Path]:
    """Return the text files of a folder, or one file."""
    if not source.is_dir():
        file_size(source)
        return [source]
    found = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not found:
        raise DataError(f"{source} holds no text files ({', '.join(SUFFIXES)})")
    for path in found:
        file_size(path)
    return found


def cut(path: Path) -> Iterator[Source]:
    """Yield pieces of a file of about ``PIECE_BYTES``, each of which ends with a line."""
    size, start = file_size(path), 0
    with path.open("rb") as file:
        while start < size:
            file.seek(start + PIECE_BYTES - 1)
            file.readline()
            end = min(size, file.tell())
            yield Source(str(path), f"{path.name}:{start}", -1, start, end - start)
            start = end


def train_tokenizer(files: list[Path], vocabulary: int, path: Path) -> None:
    """Write a byte-level BPE tokenizer that was trained on the text."""
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ModuleNotFoundError:
        raise DataError("training a tokenizer needs its library: pip install tokenizers") from None
    made = ByteLevelBPETokenizer()
    made.train([str(file) for file in files], vocab_size=vocabulary, show_progress=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, made.to_str().encode())


def main() -> int:
    """Command line."""
    parser = frame.options(__doc__ or "", per_shard=16)
    parser.add_argument("--source", type=Path, required=True, help="text file, or folder of them")
    parser.add_argument("--length", type=whole_number(1), default=1024, help="tokens (1024)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    which.add_argument("--vocabulary", type=whole_number(257), help="train one of so many tokens")
    return frame.main(parser, run)


if __name__ == "__main__":
    sys.exit(main())
