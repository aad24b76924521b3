"""hvd-elastic get lists what a script saved, and copies a file whole or not at all."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path

import msgspec
import pytest

from hvd_elastic.checkpoint import saved
from hvd_elastic.checkpoint.saved import find_stored, store_file
from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.config import runs_folder
from hvd_elastic.errors import CheckpointError
from hvd_elastic.records.run_folder import RunFolder
from tests.small_disk import mounted
from tests.unit.cli.test_runs import Call, _home, call
from tests.unit.wire.wire_samples import saved_file

__all__ = ["_home", "call"]

BEST = bytes(range(256)) * 512


def store(folder: Path, name: str, content: bytes) -> None:
    write = partial(HashingWriter.write, data=content)
    store_file(folder, write, partial(saved_file, name, step=9, host="node2"))


def names(folder: str | Path = ".") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    folder = RunFolder.create("digits-1")
    for name, content in (("best.pt", BEST), ("final.pt", b"final")):
        store(folder.saved, name, content)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def test_without_a_name_files_are_listed(run: RunFolder, call: Call) -> None:
    done = call("get", "digits-1")
    header, best, final = done.out.splitlines()
    assert header.split() == ["NAME", "SIZE", "STEP", "SAVED"]
    assert best.split()[:4] == ["best.pt", "131.1", "kB", "9"]
    assert final.split()[:4] == ["final.pt", "5", "B", "9"]
    listed = call("get", "digits-1", "--json").json
    assert [(row["name"], row["bytes"], row["host"]) for row in listed] == [
        ("best.pt", len(BEST), "node2"),
        ("final.pt", 5, "node2"),
    ]
    assert listed[0]["path"] == str(run.saved / "best.pt")


def test_a_run_that_saved_nothing_says_so(call: Call) -> None:
    RunFolder.create("empty")
    done = call("get", "empty")
    assert (done.status, done.out) == (0, "")
    assert "run empty has saved no files" in done.err
    assert call("get", "empty", "--json").json == []


def test_a_file_is_copied_here_to_a_file_or_into_a_folder(run: RunFolder, call: Call) -> None:
    Path("models").mkdir()
    Path("old.pt").write_text("earlier")
    for arguments, path in (
        ((), "best.pt"),
        (("old.pt",), "old.pt"),
        (("models",), "models/best.pt"),
    ):
        done = call("get", "digits-1", "best.pt", *arguments)
        assert done.status == 0, done.err
        assert done.out == f"{path}: 131.1 kB\n"
        assert Path(path).read_bytes() == BEST
    assert call("get", "digits-1", "final.pt", "x", "--json").json["path"] == "x"
    assert names() == ["best.pt", "models", "old.pt", "x"]


def test_a_dash_prints_the_bytes(run: RunFolder, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    from hvd_elastic.cli.runs.export import get

    get("digits-1", "best.pt", "-")
    assert capfdbinary.readouterr().out == BEST


def test_a_file_that_is_not_what_was_saved_is_not_copied(run: RunFolder, call: Call) -> None:
    recorded = find_stored(run.saved)["best.pt"].sha256
    for changed in (BEST[:-1] + b"x", BEST[:-1]):
        (run.saved / "best.pt").write_bytes(changed)
        found = hashlib.sha256(changed).hexdigest()
        for dest in ("mine.pt", "-"):
            done = call("get", "digits-1", "best.pt", dest)
            assert (done.status, done.out, names()) == (1, "", [])
            words = f"{run.saved / 'best.pt'} has SHA-256 {found}, and the script saved {recorded}"
            assert words in done.err


@pytest.mark.parametrize("dest", ["mine.pt", "-"])
def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    run: RunFolder,
    dest: str,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    from hvd_elastic.cli.runs import export

    def compare(folder: Path, name: str, sha256: str) -> str:
        if content:
            store(folder, name, content.pop(0))
        return saved.differing(folder, name, sha256)

    content = [b"later", b"last"]
    monkeypatch.setattr(export, "differing", compare)
    export.get("digits-1", "best.pt", dest)
    out = capfdbinary.readouterr().out
    assert (out if dest == "-" else Path(dest).read_bytes()) == b"last"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_whose_leader_died_while_it_was_stored_is_copied(
    run: RunFolder, call: Call, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The description of the later file is there from before it is replaced."""

    def die(path: Path, target: Path) -> Path:
        if target.name.endswith(".json") == replaced:
            raise InterruptedError
        return rename(path, target)

    rename = Path.replace
    with monkeypatch.context() as patched:
        patched.setattr(saved, "write_json", lambda p, v: p.write_bytes(msgspec.json.encode(v)))
        patched.setattr(Path, "replace", die)
        with pytest.raises(CheckpointError, match="the file cannot be written"):
            store(run.saved, "best.pt", b"later")
    expected = b"later" if replaced else BEST
    assert call("get", "digits-1", "best.pt").status == 0
    assert Path("best.pt").read_bytes() == expected
    assert find_stored(run.saved)["best.pt"].bytes == len(expected)
    assert "..best" not in call("get", "digits-1").out


@pytest.mark.parametrize("name", ["other.pt", "../run.json", ".best.pt.json", ""])
def test_a_name_that_was_not_saved_is_refused(run: RunFolder, call: Call, name: str) -> None:
    done = call("get", "digits-1", name)
    assert done.status == 1
    assert f"has no saved file {name!r}; it has: best.pt, final.pt" in " ".join(done.err.split())
    assert names() == []


def test_a_place_that_cannot_be_written_is_explained(run: RunFolder, call: Call) -> None:
    done = call("get", "digits-1", "best.pt", "no/such/folder/x")
    assert done.status == 1
    assert "no/such/folder/x cannot be written: No such file" in done.err
    assert call("get", "digits-1", "best.pt", "-", "--json").status == 2
    assert not (runs_folder() / "other").exists()


def test_a_place_that_is_no_file_is_refused(run: RunFolder, call: Call) -> None:
    os.mkfifo("pipe")
    done = call("get", "digits-1", "best.pt", "pipe")
    assert (done.status, "pipe is neither a file nor a folder" in done.err) == (2, True)
    assert not Path("pipe").is_file()
    done = call("get", "digits-1", "best.pt", "models/")
    assert (done.status, "models/ is no folder; make it first" in done.err) == (2, True)
    assert names() == ["pipe"]


@pytest.mark.root
def test_a_full_disk_keeps_what_was_there(run: RunFolder, call: Call, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "64k") as disk:
        (disk / "best.pt").write_text("earlier")
        done = call("get", "digits-1", "best.pt", str(disk))
        assert done.status == 1
        assert "No space left on device" in done.err
        assert (disk / "best.pt").read_text() == "earlier"
        assert names(disk) == ["best.pt"]
