"""Pictures in the layout of ImageNet: whole files, the same bytes, interruptions, broken files."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="Pillow draws the pictures")
from PIL import Image

from datasets_prep import imagenet_layout, shapes
from datasets_prep.imagenet_layout import Settings, prepare, verify
from tests.paths import LIMIT_S, ROOT
from tests.small_disk import mounted

SCRIPT = Path(imagenet_layout.__file__)
TINY = Settings(classes=2, per_class=4, val_per_class=1, size=32, seed=3)
OPTIONS = ("--classes", 2, "--per-class", 4, "--size", 32, "--seed", 3)


def pictures(folder: Path) -> dict[str, bytes]:
    """All files of a data set, by their names in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The command line, in this process."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments), "--processes", "1"])
    return imagenet_layout.main()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set that nobody changes."""
    folder = tmp_path_factory.mktemp("pictures") / "tiny"
    prepare(folder, TINY)
    return folder


def test_it_is_in_the_layout(tiny: Path) -> None:
    found = pictures(tiny)
    for split, count in (("train", 4), ("val", 1)):
        for wnid in ("n00000000", "n00000001"):
            for index in range(count):
                found.pop(f"{split}/{wnid}/{wnid}_{index}.JPEG")
    assert set(found) == {"made_from.json", "LOC_synset_mapping.txt"}
    names = found["LOC_synset_mapping.txt"].decode().splitlines()
    assert names == ["n00000000 disc, plain, A", "n00000001 square, lying stripes, H"]
    with Image.open(tiny / "train" / "n00000001" / "n00000001_3.JPEG") as picture:
        assert (picture.format, picture.size, picture.mode) == ("JPEG", (32, 32), "RGB")


def test_pictures_follow_from_the_seed_and_their_place_alone(tiny: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "again", TINY, processes=2)
    assert pictures(tmp_path / "again") == pictures(tiny)
    drawn = pictures(tiny)
    jpegs = {data for name, data in drawn.items() if name.endswith(".JPEG")}
    assert len(jpegs) == 10
    assert shapes.draw_picture(3, 0, 1, 2, 32) == drawn["train/n00000001/n00000001_2.JPEG"]
    assert shapes.draw_picture(4, 0, 1, 2, 32) not in jpegs


def test_classes_differ_and_look_the_same_in_a_mirror() -> None:
    looks = [shapes.look_of(number) for number in range(shapes.MOST_CLASSES)]
    assert len(set(looks)) == shapes.MOST_CLASSES
    for parts in zip(*looks[:10], strict=True):
        assert len(set(parts)) == 10, "the first ten differ in shape, filling and letter"
    u = np.linspace(-1, 1, 99)[None, :]
    v = np.linspace(-1, 1, 99)[:, None]
    for name, inside in shapes.SHAPES.items():
        drawn = inside(u, v)
        assert (drawn != drawn[:, ::-1]).mean() < 0.02, name  # all but the very rim
        assert 0.2 < drawn.mean() < 0.85, name


def test_a_later_call_makes_what_is_missing_or_empty(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    prepare(out, TINY)
    folder = out / "train" / "n00000000"
    (folder / "n00000000_1.JPEG").unlink()
    (folder / "n00000000_2.JPEG").write_bytes(b"")
    (folder / ".n00000000_1.JPEG.part").write_bytes(b"half of i")
    kept = (folder / "n00000000_3.JPEG").stat()
    assert call(monkeypatch, "--out", out, *OPTIONS, "--val-per-class", 1, "--dry-run") == 0
    assert "8 are there; 2 would be written, about" in capsys.readouterr().out
    assert not (folder / "n00000000_1.JPEG").exists()
    assert call(monkeypatch, "--out", out, *OPTIONS, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["there"], said["written"], said["val_per_class"]) == (8, 2, 1)
    assert pictures(out) == pictures(tiny)
    now = (folder / "n00000000_3.JPEG").stat()
    assert (now.st_ino, now.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)


def started(out: Path) -> subprocess.Popen[str]:
    """A call that stands still in its sixth picture: it reads a pipe to which nobody writes."""
    pipe = out.with_name("pipe")
    os.mkfifo(pipe)
    out.with_name("sitecustomize.py").write_text(
        "from datasets_prep import shapes\n"
        "draw = shapes.draw_picture\n"
        "def draw_or_wait(seed, split, number, index, size):\n"
        "    if (split, number, index) == (0, 1, 1):\n"
        f"        open({str(pipe)!r}).read()\n"
        "    return draw(seed, split, number, index, size)\n"
        "shapes.draw_picture = draw_or_wait\n"
    )
    words = [sys.executable, SCRIPT, "--out", out, *OPTIONS, "--processes", 2]
    process = subprocess.Popen(
        [str(word) for word in words],
        env={**os.environ, "PYTHONPATH": f"{out.parent}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + LIMIT_S
    while len(list(out.glob("*/*/n*.JPEG"))) < 7:  # all but the three of that piece
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def test_a_killed_call_leaves_whole_files_and_no_process_and_the_next_goes_on(
    tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = started(out)
    process.kill()
    # Ends when the last process that could write to it has ended, the stuck one included.
    process.communicate(timeout=LIMIT_S)
    there = {name: data for name, data in pictures(out).items() if name.endswith(".JPEG")}
    assert len(there) == 7
    assert there.items() < pictures(tiny).items()
    assert prepare(out, TINY)["written"] == 3
    assert pictures(out) == pictures(tiny)


def test_ctrl_c_ends_it_in_a_sentence(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = started(out)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, said
    assert "the same call goes on where this one stopped" in said
    assert "Traceback" not in said


def test_too_little_space_is_noticed_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    many = ("--classes", 1000, "--per-class", 10**9)
    assert call(monkeypatch, "--out", out, *many) == 1
    assert "1200000000000 pictures need about" in capsys.readouterr().err
    assert not out.exists()


def test_a_disk_that_fills_up_meanwhile_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with mounted(tmp_path / "disk", "120k") as disk:
        monkeypatch.setattr(imagenet_layout, "bytes_on_disk", lambda *_: 0)
        status = call(monkeypatch, "--out", disk / "out", "--per-class", 20, "--size", 64)
        assert status == 1
        assert capsys.readouterr().err.endswith(": No space left on device\n")
        assert verify(disk / "out")["broken"] == []


def test_other_folders_and_other_settings_are_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("diary")
    before = pictures(tiny)
    for out, options, said in (
        (tmp_path, OPTIONS, "holds other files"),
        (tmp_path / "mine", OPTIONS, "is a file"),
        (tiny, ("--seed", 3), "made with classes 2, per-class 4, val-per-class 1, size 32 instead"),
    ):
        assert call(monkeypatch, "--out", out, *options) == 1
        assert said in capsys.readouterr().err
    assert pictures(tiny) == before
    descriptor = os.open(tiny, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert call(monkeypatch, "--out", tiny, *OPTIONS) == 1
    os.close(descriptor)
    assert "another call is writing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "x", "--classes", "1"], "--classes: 1: it must be 2 to 1000"),
        (["--out", "x", "--size", "huge"], "invalid whole number value: 'huge'"),
        (["--verify", "x", "--seed", "0"], "--seed goes with --out"),
        (["--verify", "x", "--out", "y"], "not allowed with"),
        ([], "is required"),
    ],
)
def test_wrong_usage(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, *words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of the user's own: greyscale and PNG are fine, and so is what is no picture."""
    folder = tmp_path / "own"
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            Image.new("L", (40, 30), 90).save(folder / split / name / "a.jpg")
    Image.new("P", (9, 9)).save(folder / "train" / "dog" / "b.png")
    (folder / "train" / "dog" / "notes.txt").write_text("good dog")
    return folder


def test_verify_counts(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--verify", own) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == ["train: 2 classes, 3 pictures", "val: 2 classes, 2 pictures", "0 broken"]


def test_verify_names_every_broken_file(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cats, dogs = own / "train" / "cat", own / "val" / "dog"
    (cats / "cut.JPEG").write_bytes(shapes.draw_picture(0, 0, 0, 0, 64)[:-60])
    (cats / "empty.jpeg").write_bytes(b"")
    (dogs / "page.jpg").write_text("<html>not found</html>")
    (dogs / "gone.jpg").symlink_to("nowhere.jpg")
    expected: dict[str, str] = {
        str(cats / "cut.JPEG"): "image file is truncated",
        str(cats / "empty.jpeg"): "no picture that Pillow knows",
        str(dogs / "gone.jpg"): "No such file or directory",
        str(dogs / "page.jpg"): "no picture that Pillow knows",
    }
    assert call(monkeypatch, "--verify", own, "--json") == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [each["path"] for each in found["broken"]] == list(expected)
    for each in found["broken"]:
        assert each["reason"].startswith(expected[each["path"]])
    assert verify(own, processes=2)["broken"] == found["broken"]
    assert call(monkeypatch, "--verify", own) == 1
    said = capsys.readouterr().out
    assert f"{cats / 'empty.jpeg'}: no picture that Pillow knows\n" in said
    assert said.endswith("4 broken\n")


def test_verify_names_what_is_wrong_with_the_layout(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "val" / "dog" / "a.jpg").rename(own / "val" / "ILSVRC2012_val_00000001.JPEG")
    (own / "val" / "cow").mkdir()
    assert call(monkeypatch, "--verify", own) == 1
    said = capsys.readouterr().out
    assert f"{own / 'val'}: 1 pictures lie in no folder of a class" in said
    assert f"{own / 'val' / 'dog'}: no pictures" in said
    assert f"{own / 'train'}: no class cow" in said
    assert call(monkeypatch, "--verify", own / "val") == 1
    assert "has no folder train" in capsys.readouterr().err
    assert call(monkeypatch, "--verify", own / "nowhere") == 1
    assert "there is no folder" in capsys.readouterr().err
