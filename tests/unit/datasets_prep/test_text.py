"""Text that becomes sequences of tokens: nothing is lost without a word."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets_prep import documents, frame, text
from hvd_elastic.data import ShardDataset, load_index
from hvd_elastic.data.files import file_size


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["text.py", *map(str, words), "--processes", "1"])
    return text.main()


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        data = gzip.compress(data[:99]) + gzip.compress(data[99:])
    elif path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard", reason="pip install zstandard")
        data = zstandard.compress(data[:99]) + zstandard.compress(data[99:])
    path.write_bytes(data)


def read(folder: Path, field: str, piece_bytes: int) -> Iterator[documents.Document]:
    for piece in documents.Pieces(folder, field, piece_bytes):
        yield from piece.read()


@pytest.mark.parametrize("piece_bytes", [40, 64, 1000, 10**6])
def test_every_character_is_read_once_at_any_size_of_pieces(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and short lines and files, packed or not."""
    monkeypatch.setattr(documents, "_BLOCK", 50)
    monkeypatch.setattr(documents, "_PACKED_PIECE_BYTES", 1)
    random = np.random.default_rng(0)
    lines = ["".join(random.choice([*"aé€😀 "], n)) for n in random.integers(0, 90, 60)]
    whole = "\n".join(["begins", *lines, "x" * 300, *lines])
    records = "".join(json.dumps({"id": 1, "body": line}) + "\n" for line in lines)
    for name in ("a.txt", "a.txt.gz", "a.md.zst", "a.jsonl", "a.NDJSON.zst"):
        is_text = "json" not in name.lower()
        folder = tmp_path / name
        write(folder / name, (whole if is_text else records).encode())
        for number in range(9):
            write(folder / f"b{number}.text", b"last%d" % number)
        found = [*read(folder, "body", piece_bytes)]
        assert not any(document.damage for document in found)
        texts = "".join(document.text + "\0" * document.ends for document in found).split("\0")
        expected = [whole] if is_text else lines
        assert texts == [*expected, *(f"last{number}" for number in range(9)), ""]


def test_short_documents_are_packed_with_a_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "notes", tmp_path / "out"
    for number in range(100):
        write(source / f"{number:03d}.txt", b"note %02d" % number)
    write(source / "data.csv", b"1,2")
    write(source / ".cache" / "a.txt", b"not this")
    words = ["--source", source, "--out", out, "--length", 30]
    assert call(monkeypatch, *words) == 0
    said = capsys.readouterr()
    assert "2 files are left out, which are no texts by their names: hidden, or of a " in said.err
    assert "780 tokens used, 20 lost at ends of pieces" in said.out
    read = b"".join(array.astype(np.uint8) for array in ShardDataset(out))
    assert read == b"".join(b"note %02d\0" % number for number in range(100))[:780]
    assert call(monkeypatch, *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert (found["tokens"], found["tokens_lost"], found["examples"]) == (780, 20, 26)
    write(source / "007.txt", b"changed!")
    assert call(monkeypatch, *words) == 1
    assert "made from files that have changed since" in capsys.readouterr().err
    assert call(monkeypatch, *words, "--again") == 0


def test_other_encodings_and_damage_cost_a_character_and_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "books", tmp_path / "out"
    records = b"""{"text": "good"}

[1]
{"body": "x"}
{"text": 5}
{"te
no
{"text": "\\ud800"}"""
    for name, data in {
        "bom.txt": b"\xef\xbb\xbfbom" + 9 * b" line\n",
        "byte.txt": 30 * b"a line of text\n" + b"caf\xe9\n",
        "cyrillic.txt": ("что " * 50).encode("koi8-r"),
        "cut.txt.gz": b"",
        "empty.txt": b"",
        "half.jsonl": records,
        "wide.txt": "wide".encode("utf-16"),
        "wide_le.txt": ("wide" * 20).encode("utf-16-le"),
    }.items():
        write(source / name, data)
    whole = gzip.compress(np.random.default_rng(0).bytes(9999))
    (source / "cut.txt.gz").write_bytes(whole[:5000])
    words = ["--source", source, "--out", out, "--length", 16, "--field", "text"]
    assert call(monkeypatch, *words) == 0
    lines = (out / "skipped.txt").read_text().splitlines()
    remedy = "convert it: iconv -f ENCODING -t UTF-8"
    now = "each of which is U+FFFD now; if it has another encoding"
    why = "invalid continuation byte at byte 453"
    end = "Compressed file ended before the end-of-stream marker was reached"
    assert lines == [
        f"byte.txt: 1 characters that are no UTF-8 ({why}), {now}, {remedy}",
        f"cut.txt.gz: it is damaged ({end}); copy it again",
        f"cyrillic.txt: it is no UTF-8 text (invalid continuation byte at byte 0); {remedy}",
        "empty.txt: it is empty (0 bytes)",
        "half.jsonl: the line at byte 18 has no text 'text'; its fields are none",
        "half.jsonl: the line at byte 22 has no text 'text'; its fields are body",
        "half.jsonl: the line at byte 36 has no text in 'text', but 5",
        "half.jsonl: half a character at the line of byte 56 is ? now",
        "half.jsonl: 2 more such lines before byte 75",
        "wide.txt: it is UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8",
        f"wide_le.txt: it has bytes 0, as UTF-16 or a binary file; {remedy}",
    ]
    read = b"".join(array.astype(np.uint8) for array in ShardDataset(out)).decode(errors="replace")
    assert read.startswith("bom line\n")
    assert read.endswith("a line of text\ncaf\ufffd")
    assert call(monkeypatch, *words, "--strict", "--again") == 1
    assert "error: byte.txt: 1 characters" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT])
def test_a_storage_that_fails_for_a_while_costs_no_text(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    source, out = tmp_path / "books", tmp_path / "out"
    for name in ("a.txt", "b.txt"):
        write(source / name, b"a line of text\n" * 9)

    def fail(path: str) -> Any:
        if path.endswith("b.txt"):
            raise OSError(number, os.strerror(number))  # as one while it is read
        return Path(path).open("rb")

    words = ["--source", source, "--out", out, "--length", 8]
    with monkeypatch.context() as patched:
        patched.setattr(documents, "opened", fail)
        assert call(patched, *words) == 1
    error = capsys.readouterr().err
    assert f"error: {source}/b.txt: {os.strerror(number)}; that is no damage" in error

    def fail_to_list(path: Path) -> int:
        if path.name == "b.txt":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return file_size(path)

    with monkeypatch.context() as patched:
        patched.setattr(documents, "file_size", fail_to_list)
        assert call(patched, *words) == 1
    assert f"b.txt: {os.strerror(errno.EIO)}; call again, and if it fails again, remove" in (
        capsys.readouterr().err
    )
    assert call(monkeypatch, *words) == 0
    assert not (out / "skipped.txt").exists()


def test_damaged_text_is_named_where_hosts_have_shared_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "books", tmp_path / "out"
    write(source / "byte.txt", 30 * b"a line of text\n" + b"caf\xe9\n")
    write(source / "wide.txt", "wide".encode("utf-16"))
    words = ["--source", source, "--out", out, "--length", 16]
    assert call(monkeypatch, *words) == 0
    made_from = load_index(out).made_from
    del made_from["counts"]
    skipped = (out / "skipped.txt").read_text()
    assert [line.partition(":")[0] for line in skipped.splitlines()] == ["byte.txt", "wide.txt"]
    for name in ("index.json", "skipped.txt"):
        (out / name).unlink()
    on_host = ["--on-host", out, frame.digest_of(made_from)]
    assert call(monkeypatch, *words, *on_host) == 0
    assert (out / "skipped.txt").read_text() == skipped


def test_links_and_folders_that_cannot_be_read_are_not_left_out_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "books"
    write(source / "a" / "a.txt", b"a line of text\n" * 9)
    write(tmp_path / "elsewhere" / "b.txt", b"another line\n" * 9)
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    (source / "c.txt").symlink_to(tmp_path / "elsewhere" / "b.txt")
    (source / "gone.txt").symlink_to("nowhere")
    (source / "loop.txt").symlink_to("loop.txt")
    (source / "loop").symlink_to("loop")
    os.mkfifo(source / "pipe.txt")
    words = ["--source", source, "--length", 8, "--out"]
    assert call(monkeypatch, *words, tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert "2 files are left out, which are no texts by their names: " in said
    assert "links to folders (1)" in said
    assert (tmp_path / "out" / "skipped.txt").read_text().splitlines() == [
        "gone.txt: No such file or directory",
        "loop.txt: Too many levels of symbolic links",
        "pipe.txt: it is a named pipe, no file",
    ]
    assert b"another" in b"".join(
        array.astype(np.uint8) for array in ShardDataset(tmp_path / "out")
    )
    scan, refused = os.scandir, ["lost+found"]
    (source / "lost+found").mkdir()

    def refuse(path: Any) -> Any:
        if Path(path).name in refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert call(monkeypatch, *words, tmp_path / "third") == 0
    refused.append("a")
    assert call(monkeypatch, *words, tmp_path / "other") == 1
    assert f"error: {source / 'a'}: Permission denied" in capsys.readouterr().err


def test_shards_have_a_size_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 100_000)
    source = tmp_path / "a.txt"
    source.write_bytes(b"one line of text\n" * 153_000)
    words = ["--source", source, "--length", 1024, "--shard-megabytes", 1]
    assert call(monkeypatch, *words, "--out", tmp_path / "out") == 0
    sizes = [shard.examples * 1024 for shard in load_index(tmp_path / "out").shards]
    assert sorted(size // 10**5 for size in sizes) == [5, 10, 10]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "a"}\n')
    for more, said in (
        (["--source", tmp_path / "no"], "there is no file or folder"),
        (["--source", lines], "has JSON lines; name the field that holds the text: --field"),
        (["--source", tmp_path], "--field NAME reads JSON lines"),
        (["--source", source, "--tokenizer", tmp_path / "no.json"], "tokenizer"),
        (["--source", source, "--separator", "x"], "a byte 0 separates bytes"),
        (["--source", lines, "--field", "text"], "the data are too short for one"),
    ):
        call(monkeypatch, *more, "--out", tmp_path / said[:5])
        assert said in capsys.readouterr().err


def test_a_tokenizer_is_trained_on_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers")
    source, out = tmp_path / "texts", tmp_path / "out"
    line = "the cat and the hat and the bat"
    write(source / "a.txt", (line + "\n").encode() * 50)
    write(source / "b.jsonl.gz", (json.dumps({"text": line}) + "\n").encode() * 50)
    words = ["--source", source, "--length", 4, "--field", "text"]
    assert call(monkeypatch, *words, "--out", out, "--vocabulary", 280) == 0
    path = tmp_path / "out.tokenizer.json"
    made: Any = tokenizers.Tokenizer.from_file(str(path))
    tokens = np.concatenate([*ShardDataset(out)])
    assert len(tokens) < len(line) * 50
    end = made.token_to_id("<|endoftext|>")
    assert 50 <= (tokens == end).sum() <= 51
    found = made.decode(tokens.tolist(), skip_special_tokens=False).split("<|endoftext|>")
    assert found[1:50] == [line] * 49
    words += ["--out", tmp_path / "other", "--tokenizer", path, "--separator"]
    assert call(monkeypatch, *words, "<end>") == 1
    assert "has no token <end>; name the one that ends a document" in capsys.readouterr().err


def test_a_tokenizer_of_another_size_or_text_is_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers")
    source, out = tmp_path / "texts", tmp_path / "out"
    write(source / "a.txt", b"the cat and the hat and the bat\n" * 50)
    words = ["--source", source, "--length", 4, "--out", out, "--vocabulary"]
    path = tmp_path / "out.tokenizer.json"
    assert call(monkeypatch, *words, 262) == 0
    before = path.read_bytes()
    assert call(monkeypatch, *words, 262) == 0
    assert call(monkeypatch, *words, 266) == 1
    assert f"{path} was trained from 262 tokens, by an earlier call" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert call(monkeypatch, *words, 266, "--again") == 0
    assert tokenizers.Tokenizer.from_file(str(path)).get_vocab_size() == 266
    assert load_index(out).made_from["vocabulary"] == 266
    shutil.rmtree(out)
    write(source / "a.txt", b"one day in the park\n" * 50)
    assert call(monkeypatch, *words, 266) == 1
    assert "was trained from another text" in capsys.readouterr().err
    path.with_name("out.tokenizer.made_from.json").unlink()
    assert call(monkeypatch, *words, 266) == 1
    assert "was trained from an unknown text" in capsys.readouterr().err
