#!/usr/bin/env python3
"""Write text files as shards of token sequences of equal length.

    python datasets_prep/text.py --source books/ --out /data/books --length 1024

Every example is an array of --length tokens (uint16, or uint32 for more than 65,536 tokens). By
default a token is a byte. --vocabulary N trains a tokenizer (byte-level BPE) on the text, and
--tokenizer takes one from a tokenizer.json; both need the library tokenizers.

A document is a file (.txt, .md, .text), or with --field NAME also a line of JSON (.jsonl, .ndjson),
any of them packed too (.gz, .zst). Documents follow one another with a separator after each: token
0 where tokens are bytes, else --separator. They are cut at line ends into pieces of about 1 MB; the
last tokens of a piece that do not fill a sequence are lost, and counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from datasets_prep import command_line, frame
from datasets_prep.common import whole_number
from datasets_prep.documents import LINES, TEXTS, Document, Pieces
from datasets_prep.frame import Converted
from datasets_prep.packed import PACKED
from hvd_elastic.errors import DataError
from hvd_elastic.json_text import parse_json
from hvd_elastic.replaced_files import write_whole

PIECE_BYTES, MOST_PIECE_BYTES = 1 << 20, 64 << 20
PIECE_LENGTHS = 1 << 10
"""Sequences of a piece, at least, so that few tokens are lost at its end."""
BYTES = "bytes"
TOKENIZER = "tokenizer.json"
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[SEP]")


@dataclass(frozen=True)
class ToTokens:
    """Cuts documents into sequences of tokens.

    Attributes:
        length: tokens of a sequence.
        tokenizer: path of a ``tokenizer.json``, or ``BYTES``.
        sha256: of the file.
        separator: token that follows each document.
    """

    length: int
    tokenizer: str = BYTES
    sha256: str = ""
    separator: int = 0

    def __call__(self, documents: Iterable[Document]) -> Converted:
        """Return the sequences of the documents of a piece, one after the other."""
        skipped: list[str] = []
        texts = ((each.text, each.ends) for each in self._readable(documents, skipped))
        if self.tokenizer == BYTES:
            end = bytes([self.separator])
            joined = b"".join(part for text, ends in texts for part in (text.encode(), end * ends))
            tokens = np.frombuffer(joined, np.uint8).astype(np.uint16)
        else:
            made = _load(self.tokenizer)
            kind = np.uint32 if made.get_vocab_size() > 1 << 16 else np.uint16
            ids = (
                [*made.encode(text, add_special_tokens=False).ids, *[self.separator] * ends]
                for text, ends in texts
            )
            tokens = np.concatenate([np.empty(0, kind), *(np.array(each, kind) for each in ids)])
        whole = len(tokens) // self.length * self.length
        examples = [(_npy(part),) for part in tokens[:whole].reshape(-1, self.length)]
        return Converted(examples, skipped, {"tokens": whole, "tokens_lost": len(tokens) - whole})

    @staticmethod
    def _readable(documents: Iterable[Document], skipped: list[str]) -> Iterator[Document]:
        for document in documents:
            if document.damage:
                skipped.append(document.damage)
            if document.text or not document.damage:
                yield document


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
    piece_bytes = max(PIECE_BYTES, min(PIECE_LENGTHS * given.length, MOST_PIECE_BYTES))
    if not given.source.exists():
        raise DataError(f"there is no file or folder {given.source}")
    pieces = Pieces(given.source, given.field or "", piece_bytes)
    if pieces.left_out:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in pieces.left_out.most_common(5))
        lines = not given.field and set(pieces.left_out) & {*LINES}
        remedy = "; --field NAME reads JSON lines" if lines else ""
        print(
            f"{given.source}: {pieces.left_out.total()} files are left out, which are no texts by "
            f"their names: {kinds}{remedy}",
            file=sys.stderr,
        )
    if not pieces:
        raise DataError(
            f"{given.source} holds no text files ({', '.join(TEXTS)}; with --field "
            f"{', '.join(LINES)}; all with {' or '.join(PACKED)} too)"
        )
    tokenizer: Path | None = given.tokenizer
    if given.vocabulary is not None:
        tokenizer = Path(f"{os.path.abspath(given.out)}.{TOKENIZER}")  # noqa: PTH100
        trained_from = {"vocabulary": given.vocabulary, **frame.digests(pieces)}
        if given.again or not tokenizer.exists():
            train_tokenizer(pieces, trained_from, tokenizer)
        _require_trained_from(tokenizer, trained_from)
    convert = ToTokens(given.length)
    if tokenizer is not None:
        separator = separator_of(_load(str(tokenizer)), tokenizer, given.separator)
        digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        convert = ToTokens(given.length, str(tokenizer.absolute()), digest, separator)
    elif given.separator is not None:
        raise DataError("--separator names a token of --tokenizer; a byte 0 separates bytes")
    settings = command_line.settings_of(given, ("npy",), convert)
    made_from = {
        **settings.made_from,
        "field": given.field,
        "piece_bytes": piece_bytes,
        "vocabulary": given.vocabulary,
    }
    settings = dataclasses.replace(
        settings, made_from=made_from, shard_bytes=given.shard_megabytes * 1_000_000
    )
    return [frame.prepare(given.out, pieces, (), settings)]


def separator_of(tokenizer: Any, path: Path, name: str | None) -> int:
    """Return the token that separates documents.

    Raises:
        DataError: the tokenizer does not have it.
    """
    for each in (name,) if name is not None else SEPARATORS:
        found: int | None = tokenizer.token_to_id(each)
        if found is not None:
            return found
    raise DataError(
        f"{path} has no token {name or ' or '.join(SEPARATORS)}; name the one that ends a document "
        "with --separator"
    )


def _note_of(tokenizer: Path) -> Path:
    """Return the path of the file that says what a tokenizer was trained from."""
    return tokenizer.with_suffix(".made_from.json")


def _require_trained_from(tokenizer: Path, trained_from: dict[str, Any]) -> None:
    try:
        was = parse_json(_note_of(tokenizer).read_bytes())
    except (FileNotFoundError, ValueError):
        was = None
    if was != trained_from:
        other = "an unknown text"
        if isinstance(was, dict):
            size = was.get("vocabulary")
            other = "another text" if size == trained_from["vocabulary"] else f"{size} tokens"
        raise DataError(
            f"{tokenizer} was trained from {other}, by an earlier call; name another --out, train "
            "and write anew with --again, or use that tokenizer: --tokenizer"
        )


def train_tokenizer(pieces: Pieces, trained_from: dict[str, Any], path: Path) -> None:
    """Write a byte-level BPE tokenizer that was trained on the text, and what it was made from."""
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ModuleNotFoundError:
        raise DataError("training a tokenizer needs its library: pip install tokenizers") from None
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(
        _texts(pieces),
        trained_from["vocabulary"],
        show_progress=False,
        special_tokens=[SEPARATORS[0]],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # first, so that the note is never beside another one
    write_whole(_note_of(path), json.dumps(trained_from), synced=True)
    write_whole(path, made.to_str(), synced=True)


def _texts(pieces: Pieces) -> Iterator[str]:
    for piece in pieces:
        for document in piece.read():
            yield document.text


def main() -> int:
    """Command line."""
    parser = command_line.options(__doc__ or "", per_shard=None)
    parser.add_argument("--source", type=Path, required=True, help="text file, or folder of them")
    parser.add_argument("--length", type=whole_number(1), default=1024, help="tokens (1024)")
    parser.add_argument("--field", help="of JSON lines, that holds the text")
    parser.add_argument("--separator", help="token after each document (the tokenizer's own)")
    parser.add_argument(
        "--shard-megabytes", type=whole_number(1), default=16, help="of text in a shard (16)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    which.add_argument("--vocabulary", type=whole_number(257), help="train one of so many tokens")
    return command_line.main(parser, run)


if __name__ == "__main__":
    sys.exit(main())
