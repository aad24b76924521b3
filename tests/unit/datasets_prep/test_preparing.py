"""Scripts that write shards: what they make of odd, damaged and missing files, and resuming."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import gzip
import hashlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pip install pillow")
pytest.importorskip("google_crc32c", reason="pip install google-crc32c")
from PIL import Image

from benchmarks.testbed.file_server import CUT, FileServer
from datasets_prep import (
    archives,
    cifar10,
    frame,
    image_folder,
    imagenet,
    imagenet_layout,
    index_shards,
    pictures,
)
from datasets_prep.common import is_of_storage
from datasets_prep.on_hosts import DISAGREES, prepare_on_hosts
from hvd_elastic.data import ShardDataset, load_index, remote, verify
from hvd_elastic.data.index import Index
from hvd_elastic.errors import DataError
from hvd_elastic.hosts.hostfile import Host
from tests import other_user
from tests.other_user import open_folder as open_folder
from tests.paths import LIMIT_S
from tests.small_disk import mounted
from tests.waiting import until

RED, BLUE = (200, 30, 20), (20, 30, 200)


def encoded(picture: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def call(monkeypatch: pytest.MonkeyPatch, script: ModuleType, *words: object) -> int:
    """The command line, in this process."""
    one = () if script is index_shards else ("--processes", "1")
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, words), *one])
    status: int = script.main()
    return status


def write_birds(folder: Path, count: int = 6) -> Path:
    """Two classes of small pictures, which differ by their colour."""
    for name, colour in (("owl", RED), ("tit", BLUE)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            picture = Image.new("RGB", (40 + number, 30), colour)
            picture.save(folder / name / f"{name}{number}.jpg", quality=95)
    return folder


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    return write_birds(tmp_path / "birds")


# -- pictures


def near(picture: Image.Image, place: tuple[int, int], colour: tuple[int, int, int]) -> bool:
    found = picture.getpixel(place)
    assert isinstance(found, tuple)
    return all(abs(a - b) <= 12 for a, b in zip(found, colour, strict=True))


def converted(data: bytes, resize: int = 0) -> Image.Image:
    ((jpeg,),) = pictures.ToJpeg(resize, 95)(data)
    found = Image.open(io.BytesIO(jpeg))
    assert (found.format, found.mode) == ("JPEG", "RGB")
    return found


def test_pictures_of_every_kind_come_out_right() -> None:
    """The left half is red and the right half blue, or dark and light."""
    colour = Image.new("RGB", (64, 32), RED)
    colour.paste(BLUE, (32, 0, 64, 32))
    grey = Image.new("L", (64, 32), 50)
    grey.paste(180, (32, 0, 64, 32))
    wide = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    clear = Image.new("RGBA", (64, 32), (0, 0, 0, 0))
    clear.paste((*BLUE, 255), (32, 0, 64, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side: rotated by 90 degrees clockwise to be upright
    dark, light, white = (50,) * 3, (180,) * 3, (255,) * 3
    assert wide.mode == "I;16"
    for name, data, left, right in (
        ("CMYK", encoded(colour.convert("CMYK"), quality=95), RED, BLUE),
        ("grey", encoded(grey, quality=95), dark, light),
        ("palette", encoded(colour.convert("P", palette=Image.Palette.ADAPTIVE), "PNG"), RED, BLUE),
        ("16 bits", encoded(wide, "PNG"), dark, light),
        ("16 bits TIFF", encoded(wide, "TIFF"), dark, light),
        ("PNG among JPEG", encoded(colour, "PNG"), RED, BLUE),
        ("grey and alpha", encoded(grey.convert("LA"), "PNG"), dark, light),
        ("transparent", encoded(clear, "PNG"), white, BLUE),
        ("one bit", encoded(grey.convert("1", dither=Image.Dither.NONE), "PNG"), (0,) * 3, white),
        ("GIF", encoded(colour, "GIF"), RED, BLUE),
        ("WebP", encoded(colour, "WEBP", lossless=True), RED, BLUE),
    ):
        found = converted(data)
        assert found.size == (64, 32), name
        assert near(found, (8, 16), left), (name, found.getpixel((8, 16)))
        assert near(found, (56, 16), right), (name, found.getpixel((56, 16)))
    turned = converted(encoded(colour, exif=exif, quality=95))
    assert turned.size == (32, 64)
    assert near(turned, (16, 8), RED)
    assert near(turned, (16, 56), BLUE)
    assert not turned.getexif().get(0x0112)


def test_a_picture_is_made_smaller_and_never_larger() -> None:
    data = encoded(Image.new("RGB", (500, 375), RED))
    assert converted(data, 256).size == (341, 256)
    assert converted(data, 40).size == (53, 40)
    for resize in (0, 375, 1000):
        assert pictures.ToJpeg(resize, 50)(data) == [(data,)], "kept as it is"


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_damaged_pictures_are_named_and_skipped_or_stop_the_call(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (birds / "owl" / "owl0.jpg").read_bytes()
    (birds / "owl" / "cut.jpg").write_bytes(good[:100])
    (birds / "owl" / "empty.jpg").write_bytes(b"")
    (birds / "tit" / "page.jpg").write_text("<html>not found</html>")
    (birds / "tit" / "gone.jpg").symlink_to("nowhere.jpg")
    (birds / "tit" / "endless.jpg").symlink_to("/dev/zero")
    os.mkfifo(birds / "tit" / "pipe.jpg")
    numbers = Image.fromarray(np.ones((4, 4), np.float32))
    (birds / "tit" / "float.tif").write_bytes(encoded(numbers, "TIFF"))
    out = tmp_path / "out"
    words = ["--source", birds, "--out", out]
    assert call(monkeypatch, image_folder, *words, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["examples"] == 12
    expected = {
        "owl/cut.jpg",  # each version of Pillow says it in other words
        "owl/empty.jpg: it is empty (0 bytes)",
        "tit/float.tif: pixels of 32 bits (mode F) have no known range",
        "tit/endless.jpg: it is a device, no file",
        "tit/gone.jpg: No such file or directory",
        "tit/page.jpg: no picture that Pillow knows",
        "tit/pipe.jpg: it is a named pipe, no file",
    }
    lines = {line.split(":")[0] if "/cut" in line else line for line in found["skipped"]}
    assert lines == expected
    assert (out / "skipped.txt").read_text().splitlines() == found["skipped"]
    assert call(monkeypatch, image_folder, *words) == 0, "all is there"
    said = capsys.readouterr().out
    assert "12 examples in 1 shards" in said
    assert "7 skipped" in said
    assert call(monkeypatch, image_folder, *words, "--strict") == 1
    assert "an earlier call without --strict has skipped it" in capsys.readouterr().err
    half = ["--source", birds, "--out", tmp_path / "half"]
    with monkeypatch.context() as patched:
        patched.setattr(Index, "save", interrupt)
        assert call(patched, image_folder, *half) == 130
    assert call(monkeypatch, image_folder, *half, "--strict") == 1
    assert "an earlier call without --strict has skipped it" in capsys.readouterr().err
    words = ["--source", birds, "--out", tmp_path / "strict", "--strict"]
    assert call(monkeypatch, image_folder, *words) == 1
    error = capsys.readouterr().err
    assert any(f"error: {line.split(': ')[0]}" in error for line in expected)
    assert not (tmp_path / "strict" / "index.json").exists()


@pytest.mark.parametrize(
    "number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EMFILE, errno.ENOENT, errno.EACCES]
)
def test_a_storage_that_fails_for_a_while_costs_no_picture(
    birds: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    out, read = tmp_path / "out", frame.Source.read

    def fail(source: frame.Source) -> bytes:
        if source.name == "owl/owl3.jpg":
            raise OSError(number, os.strerror(number), source.path)
        return read(source)

    words = ["--source", birds, "--out", out, "--per-shard", 2]
    with monkeypatch.context() as patched:
        patched.setattr(frame.Source, "read", fail)
        assert call(patched, image_folder, *words) == 1
    error = capsys.readouterr().err
    assert f"error: {birds}/owl/owl3.jpg: {os.strerror(number)}; that is no damage of" in error
    assert "if it fails again, remove the file and call with --again" in error
    assert call(monkeypatch, image_folder, *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert (found["examples"], found["skipped"]) == (12, [])


@other_user.needs_root
def test_a_picture_whose_own_mode_keeps_it_closed_is_skipped(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    birds, out = write_birds(open_folder / "birds"), open_folder / "out"
    closed = birds / "owl" / "owl3.jpg"
    closed.chmod(0)

    def prepare() -> None:
        assert call(monkeypatch, image_folder, "--source", birds, "--out", out) == 0

    other_user.call(prepare)
    assert (out / "skipped.txt").read_text() == "owl/owl3.jpg: Permission denied\n"

    monkeypatch.setattr(os, "access", lambda *_: False)
    # The login to a share is over, or the file is gone.
    for mode, number in ((0o644, errno.EACCES), (0, errno.ENOENT)):
        closed.chmod(mode)
        error = OSError(number, os.strerror(number), str(closed))
        assert is_of_storage(error, was_there=True)


def test_an_archive_that_the_storage_lost_is_named_and_none_of_its_pictures_to_be_removed(
    tmp_path: Path,
) -> None:
    archive = tmp_path / "train.tar"
    source = frame.Source(str(archive), "owl/owl3.jpg", size=99)
    settings = frame.Settings("tar", ("jpg",), 2, pictures.ToJpeg(0, 95))
    with pytest.raises(DataError) as raised:
        frame.prepare(tmp_path / "out", [source], [], settings)
    assert str(raised.value).startswith(f"{archive}: {os.strerror(errno.ENOENT)}; that is no")
    assert str(raised.value).endswith(f"if it fails again, copy {archive} again")


# -- what is written


@pytest.mark.parametrize("layout", ["tar", "tfrecord"])
def test_a_folder_becomes_shards_in_a_mixed_order(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    out = tmp_path / "out"
    words = ["--source", birds, "--format", layout, "--per-shard", 5]
    assert call(monkeypatch, image_folder, *words, "--out", out) == 0
    index = verify(out)
    assert [shard.examples for shard in index.shards] == [5, 5, 2]
    assert index.classes == ("owl", "tit")
    names = {"tar": "out-000002.tar", "tfrecord": "out.tfrecord-00002-of-00003"}
    assert index.shards[2].name == names[layout]
    dataset = ShardDataset(out)
    labels = [label for _, label in dataset]
    assert sorted(labels) == [0] * 6 + [1] * 6 != labels
    assert all(near(picture, (9, 9), (RED, BLUE)[label]) for picture, label in dataset)
    assert {path.name[0] for path in out.iterdir()} == {"o", "i"}, "nothing else is left"
    again = tmp_path / "again" / "out"
    monkeypatch.setattr(sys, "argv", ["", *map(str, words), "--out", str(again), "--processes=2"])
    assert image_folder.main() == 0
    assert load_index(again) == index, "processes make no difference"


def test_sample_splits_and_pictures_without_classes(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    birds.rename(source / "train")
    write_birds(source / "val", 2)
    out = tmp_path / "out"
    assert call(monkeypatch, image_folder, "--source", source, "--out", out, "--sample", 3) == 0
    assert [len(ShardDataset(out / name)) for name in ("train", "val")] == [3, 3]
    flat = tmp_path / "flat"
    flat.mkdir()
    (flat / "a.png").write_bytes(encoded(Image.new("RGB", (5, 5), RED), "PNG"))
    assert call(monkeypatch, image_folder, "--source", flat, "--out", tmp_path / "plain") == 0
    assert near(ShardDataset(tmp_path / "plain")[0], (2, 2), RED)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdatasets_own_reader_reads_them(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = pytest.importorskip("webdataset", reason="pip install webdataset")
    out = tmp_path / "out"
    assert call(monkeypatch, image_folder, "--source", birds, "--out", out, "--per-shard", 5) == 0
    urls = [str(path) for path in sorted(out.glob("*.tar"))]
    read = web.WebDataset(urls, shardshuffle=False).decode("pil").to_tuple("jpg", "cls")
    ours = ShardDataset(out)
    for (picture, label), (own, own_label) in zip(read, ours, strict=True):
        assert label == own_label
        assert picture.tobytes() == own.tobytes()
    del read
    gc.collect()  # it leaves its files open


# -- archives in their published formats


def add(file: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    file.addfile(info, io.BytesIO(data))


def add_link(file: tarfile.TarFile, name: str, target: str, kind: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    file.addfile(info)


def write_ilsvrc(folder: Path) -> Path:
    """Two classes of three pictures; in the devkit their numbers are the other way round."""
    scipy = pytest.importorskip("scipy.io", reason="pip install scipy")
    folder.mkdir()
    colours = {"n01440764": RED, "n01443537": BLUE}
    with tarfile.open(folder / imagenet.TRAIN, "w") as outer:
        for wnid, colour in colours.items():
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as file:
                for number in range(3):
                    data = encoded(Image.new("RGB", (50, 40), colour))
                    name = f"{wnid}_{number}.JPEG"
                    if number == 2:  # as tar stores a file that it has stored before
                        add_link(file, name, f"{wnid}_1.JPEG", tarfile.LNKTYPE)
                        add_link(file, "link.JPEG", name, tarfile.SYMTYPE)
                    else:
                        add(file, name, data)
            add(outer, f"{wnid}.tar", inner.getvalue())
    with tarfile.open(folder / imagenet.VAL, "w") as file:
        for number, colour in enumerate((BLUE, RED, BLUE, BLUE), 1):
            data = encoded(Image.new("RGB", (50, 40), colour))
            add(file, f"ILSVRC2012_val_{number:08d}.JPEG", data)
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    synsets = np.zeros(3, kind)
    synsets[0] = (1, "n01443537", "goldfish", 0)
    synsets[1] = (2, "n01440764", "tench", 0)
    synsets[2] = (1001, "n00001740", "entity", 2)
    meta = io.BytesIO()
    scipy.savemat(meta, {"synsets": synsets})
    with tarfile.open(folder / imagenet.DEVKIT, "w:gz") as file:
        inside = "ILSVRC2012_devkit_t12/data/"
        add(file, f"{inside}ILSVRC2012_validation_ground_truth.txt", b"1\n2\n1\n1\n")
        add(file, f"{inside}meta.mat", meta.getvalue())
    return folder


def test_imagenet_is_read_straight_from_its_archives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_ilsvrc(tmp_path / "ILSVRC2012"), tmp_path / "out"
    assert call(monkeypatch, imagenet, "--source", source, "--out", out, "--resize", 20) == 0
    assert load_index(out / "val").classes == ("n01440764", "n01443537")
    for split, labels in (("train", [0, 0, 0, 1, 1, 1]), ("val", [0, 1, 1, 1])):
        dataset = ShardDataset(out / split)
        assert sorted(label for _, label in dataset) == labels
        assert all(near(picture, (9, 9), (RED, BLUE)[label]) for picture, label in dataset)
        assert dataset[0][0].size == (25, 20)
    said = capsys.readouterr().err
    assert "train.tar/n01440764.tar: 1 symbolic links are left out: link.JPEG" in said
    words = ["--source", tmp_path, "--out", tmp_path / "x"]
    assert call(monkeypatch, imagenet, *words) == 1
    assert "holds neither ILSVRC2012_img_train.tar, " in capsys.readouterr().err
    words = ["--source", source, "--out", tmp_path / "x"]
    assert call(monkeypatch, imagenet, *words, "--checksum") == 1
    assert "and the published file 1d675b47d978889d74fa0da5fadfb00e" in capsys.readouterr().err
    changes: tuple[tuple[str, Callable[[bytes], bytes] | None, str], ...] = (
        (imagenet.VAL, lambda data: data[: len(data) // 2], "is cut off|holds 2 pictures"),
        (imagenet.TRAIN, lambda data: data[:9000], "cut off"),
        (imagenet.TRAIN, partial(_with_a_damaged_header, b"n01440764_1.JPEG"), "damaged at byte"),
        (imagenet.TRAIN, partial(_with_a_damaged_header, b"n01443537.tar"), "damaged at byte"),
        (imagenet.VAL, partial(_with_a_damaged_header, b"ILSVRC2012_val_"), "no tar archive"),
        (imagenet.DEVKIT, lambda _: b"", "is not the published archive"),
        (imagenet.DEVKIT, lambda data: _with_another_byte(data, -8), "CRC check failed"),
        (imagenet.DEVKIT, None, "lacks ILSVRC2012_devkit_t12.tar.gz"),
    )
    for name, change, said in changes:
        data = (source / name).read_bytes()
        if change is None:
            (source / name).unlink()
        else:
            (source / name).write_bytes(change(data))
        assert call(monkeypatch, imagenet, *words) == 1
        error = capsys.readouterr().err
        assert any(each in error for each in said.split("|")), error
        (source / name).write_bytes(data)


def _with_a_damaged_header(name: bytes, data: bytes) -> bytes:
    return _with_another_byte(data, data.index(name) + 124)


def _with_another_byte(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0xFF
    return bytes(changed)


def test_cifar10_is_read_from_its_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "_PAUSES_S", (0.0,))
    archive, out = tmp_path / "cifar-10-binary.tar.gz", tmp_path / "out"
    images = np.random.default_rng(0).integers(0, 256, (6, 4, 3, 32, 32), np.uint8)
    with tarfile.open(archive, "w:gz") as file:
        names = [name for files in cifar10.SPLITS.values() for name in files]
        for batch, name in zip(images, names, strict=True):
            data = b"".join(bytes([7]) + image.tobytes() for image in batch)
            add(file, f"cifar-10-batches-bin/{name}", data)
        classes = [f"class{number}" for number in range(10)]
        add(file, "cifar-10-batches-bin/batches.meta.txt", "\n".join([*classes, "\n"]).encode())
    with FileServer(tmp_path).serving() as server:
        there = tmp_path / "there.tar.gz"
        url = f"{server.url}/{archive.name}"
        get = ("--archive", there, "--download", url, "--out", out)
        assert call(monkeypatch, cifar10, *get) == 1
        assert f"the published file {cifar10.PUBLISHED_MD5}" in capsys.readouterr().err
        md5 = hashlib.md5(archive.read_bytes()).hexdigest()
        monkeypatch.setattr(cifar10, "PUBLISHED_MD5", md5)
        assert not there.exists()
        server.faults = {archive.name: [404]}
        assert call(monkeypatch, cifar10, *get) == 1
        assert f"{url}: the server answers 404" in capsys.readouterr().err
        server.faults = {archive.name: [CUT]}
        assert call(monkeypatch, cifar10, *get) == 0
        assert server.requests[archive.name] == 4
        assert call(monkeypatch, cifar10, *get, "--checksum") == 0
        assert server.requests[archive.name] == 4, "it is there already"
    train = ShardDataset(out / "train")
    found = {np.asarray(picture).tobytes() for picture, label in train if label == 7}
    assert found == {
        image.transpose(1, 2, 0).tobytes() for image in images[:5].reshape(20, 3, 32, 32)
    }
    assert train.classes == tuple(classes)
    assert len(ShardDataset(out / "val")) == 4
    assert sorted(path.name for path in out.iterdir()) == ["train", "val"]
    there.write_bytes(_with_another_byte(there.read_bytes(), -8))  # its own checksum lies there
    assert call(monkeypatch, cifar10, *get) == 1
    assert f"the published file {md5}" in capsys.readouterr().err
    assert call(monkeypatch, cifar10, "--archive", there, "--out", out) == 1
    assert f"{there} is damaged, or is not CIFAR-10's binary" in capsys.readouterr().err
    there.write_bytes(_with_another_byte(archive.read_bytes(), 5000))
    assert call(monkeypatch, cifar10, "--archive", there, "--out", out) == 1
    assert f"{there} is damaged, or is not CIFAR-10's binary" in capsys.readouterr().err
    archive.write_bytes(gzip.compress(b"other"))
    assert call(monkeypatch, cifar10, "--archive", archive, "--out", out) == 1
    assert "is not CIFAR-10's binary archive" in capsys.readouterr().err
    assert call(monkeypatch, cifar10, "--archive", archive, "--out", out, "--checksum") == 1
    assert f"the published file {md5}" in capsys.readouterr().err


# -- calls that are interrupted, and folders that hold something else


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Have another process that opens a file wait, for at most the kernel's 45 s."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # somebody wants to open it
    try:
        with path.open("rb") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            yield
    finally:
        signal.signal(signal.SIGIO, before)


def started(birds: Path, out: Path) -> subprocess.Popen[str]:
    """A call of which one process is held in a picture, and the other one has done the rest."""
    names = sorted(birds.rglob("*.jpg"))
    words = [sys.executable, image_folder.__file__, "--source", birds, "--out", out]
    process = subprocess.Popen(
        [*map(str, words), "--per-shard", "1", "--processes", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    journal = out / ".prepared.jsonl"
    until(
        lambda: journal.exists() and journal.read_bytes().count(b"\n") >= len(names),
        process=process,
    )
    return process


def test_a_killed_call_goes_on_and_gives_the_same(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with held(birds / "tit" / "tit5.jpg"):
        process = started(birds, out)
        process.kill()
        process.communicate(timeout=LIMIT_S)  # ends when the last process has ended
    with (out / ".prepared.jsonl").open("a") as journal:
        journal.write('{"number": 1, "sha')  # killed in the middle of a line
    assert len(list(out.glob("*.tar"))) == 11
    gone, damaged, bare, *rest = sorted(out.glob("*.tar"))
    gone.unlink()  # by somebody else
    damaged.write_bytes(damaged.read_bytes().replace(b"JFIF", b"jfif"))
    bare.with_name(f"{bare.name}.npy").unlink()
    times = {path: path.stat().st_mtime_ns for path in rest}
    words = ["--source", birds, "--per-shard", 1]
    assert call(monkeypatch, image_folder, *words, "--out", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["there"] == len(rest) == 8
    assert times == {path: path.stat().st_mtime_ns for path in times}
    assert call(monkeypatch, image_folder, *words, "--out", tmp_path / "whole" / "out") == 0
    index, whole = out / "index.json", tmp_path / "whole/out/index.json"
    assert index.read_bytes() == whole.read_bytes()
    verify(out)
    assert not [path.name for path in out.iterdir() if path.name[0] == "."]


def test_ctrl_c_ends_it_in_a_sentence(birds: Path, tmp_path: Path) -> None:
    with held(birds / "tit" / "tit5.jpg"):
        process = started(birds, tmp_path / "out")
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, said
    assert "interrupted; the same call goes on where this one stopped" in said
    assert "Traceback" not in said


def test_a_full_disk_is_said_and_leaves_no_half_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    birds = write_birds(tmp_path / "birds", 40)
    with mounted(tmp_path / "disk", "60k") as disk:
        words = ["--source", birds, "--out", disk / "out", "--per-shard", 5]
        assert call(monkeypatch, image_folder, *words) == 1
        error = capsys.readouterr().err
        assert f"error: {disk / 'out'}" in error
        assert "No space left on device" in error
        assert not list((disk / "out").glob(".*.part"))
        assert not (disk / "out" / "index.json").exists()


def test_other_folders_settings_and_sources_are_refused(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: object) -> str:
        assert call(monkeypatch, image_folder, *words) == 1
        return capsys.readouterr().err

    out, mine = tmp_path / "out", tmp_path / "mine"
    mine.mkdir()
    (mine / "diary").touch()
    assert call(monkeypatch, image_folder, "--source", birds, "--out", out) == 0
    capsys.readouterr()
    same = ("--source", birds, "--out", out)
    assert "holds other files (diary)" in refused("--source", birds, "--out", mine)
    assert "diary is a file" in refused("--source", birds, "--out", mine / "diary")
    assert "made from resize 0 instead of 20" in refused(*same, "--resize", 20)
    assert "made from layout tar instead of tfrecord" in refused(*same, "--format", "tfrecord")
    assert "made from sources 12 instead of 3" in refused(*same, "--sample", 3)
    (shard,) = out.glob("*.tar")
    shard.rename(tmp_path / "away")
    assert "a shard of the index, cannot be read: No such file" in refused(*same)
    (tmp_path / "away").rename(shard)
    changed, was = birds / "tit" / "tit0.jpg", (birds / "tit" / "tit0.jpg").read_bytes()
    changed.write_bytes(was + b"more")
    assert "made from files that have changed since" in refused(*same)
    changed.write_bytes(was)
    os.utime(changed, (2**32, 2**32))
    assert call(monkeypatch, image_folder, *same) == 0
    assert "were written after it was made; if they have changed" in capsys.readouterr().err
    os.utime(changed)
    (birds / "owl" / "owl0.jpg").rename(birds / "owl" / "other.jpg")
    assert "made from files that have changed since" in refused(*same)
    assert call(monkeypatch, image_folder, *same, "--resize", 20, "--again") == 0
    assert ShardDataset(out)[0][0].size != (40, 30)
    capsys.readouterr()
    index = out / "index.json"
    whole = json.loads(index.read_text())
    index.write_text(json.dumps({**whole, "version": 9}))
    assert "has version 9 of the index" in refused(*same)
    index.write_text('{"shards": [], "version": 2}')
    assert "is not an index of hvd_elastic" in refused(*same, "--again")
    assert index.read_text() == '{"shards": [], "version": 2}'
    half = tmp_path / "half"
    half.mkdir()
    (half / "half-000000.tar").touch()
    (half / ".prepared.jsonl").write_text('{"version": 0}\n')
    assert "half was made from" in refused("--source", birds, "--out", half)
    (half / ".prepared.jsonl").write_text("[1]\n")
    assert "is damaged; remove" in refused("--source", birds, "--out", half)
    (half / "diary").touch()
    assert call(monkeypatch, image_folder, "--source", birds, "--out", half, "--again") == 1
    (half / "diary").unlink()
    assert call(monkeypatch, image_folder, "--source", birds, "--out", half) == 0


@pytest.mark.parametrize("layout", ["tar", "tfrecord"])
def test_the_folder_of_the_call_keeps_the_hidden_files_of_others(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    out = tmp_path / "here"
    out.mkdir()
    monkeypatch.chdir(out)
    mine = {".env", ".profile", ".film.tar.part", "-notes", "here-notes.tar"}
    for name in mine - {"-notes", "here-notes.tar"}:
        (out / name).write_text("mine")
    words = ["--source", birds, "--out", ".", "--per-shard", 5, "--format", layout]
    assert call(monkeypatch, image_folder, *words) == 0
    names = {shard.name for shard in load_index(out).shards}
    assert all(name.startswith("here") for name in names)
    (out / "index.json").unlink()  # as a call leaves it that is killed before the end
    for name in mine:
        (out / name).write_text("mine")
    (out / ".prepared.jsonl").touch()
    (out / f".{min(names)}.part").touch()
    assert call(monkeypatch, image_folder, *words, "--again") == 1  # -notes is somebody else's
    assert {path.name for path in out.iterdir()} == mine
    for name in ("-notes", "here-notes.tar"):
        (out / name).unlink()
    assert call(monkeypatch, image_folder, *words, "--again") == 0
    assert mine - {"-notes", "here-notes.tar"} < {path.name for path in out.iterdir()}


def test_the_command_that_removes_folders_on_hosts_names_only_those(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # runclust runs in the home folder
    words = ["--source", birds, "--out", "my birds", "--hostfile", "my hosts", "--again"]
    assert call(monkeypatch, image_folder, *words) == 1
    command = capsys.readouterr().err.partition("on the hosts: ")[2]
    assert shlex.split(command) == ["runclust", "my hosts", "rm", "-r", str(tmp_path / "my birds")]


def test_a_call_that_is_interrupted_while_it_removes_shards_goes_on(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--source", birds, "--out", out]
    assert call(monkeypatch, image_folder, *words, "--per-shard", 1) == 0
    unlink = Path.unlink

    def unlink_some(path: Path, *, missing_ok: bool = False) -> None:
        if path.name.endswith("7.tar"):
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    words += ["--per-shard", 5]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink_some)
        assert call(patched, image_folder, *words, "--again") == 130
    assert "the same call without --again goes on where this one" in capsys.readouterr().err
    assert len([*out.glob("*.tar")]) in range(1, 12)
    assert call(monkeypatch, image_folder, *words) == 0
    assert sum(shard.examples for shard in verify(out).shards) == 12
    assert len([*out.glob("*.tar*")]) == 2 * 3, "those of the earlier call are removed"


def test_a_full_disk_does_not_keep_old_shards_from_being_removed(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(tmp_path / "disk", "1m") as disk:
        words = ["--source", birds, "--out", disk / "out", "--per-shard", 3]
        assert call(monkeypatch, image_folder, *words) == 0
        with (disk / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert call(monkeypatch, image_folder, *words, "--sample", 2, "--again") == 0
        assert sum(shard.examples for shard in verify(disk / "out").shards) == 2


def test_sources_and_classes_that_cannot_be_used_are_explained(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names, empty = tmp_path / "names.txt", tmp_path / "empty"
    empty.mkdir()
    out = ("--out", tmp_path / "out")
    for source, text_of_names, said in (
        (tmp_path / "no", None, "there is no folder"),
        (empty, None, "holds no pictures"),
        (birds, "missing", "the file with the names of the classes, cannot be read: No such file"),
        (birds, "", "names no class"),
        (birds, "owl\ntit\nowl\n", "names.txt, line 3: class 'owl' is there twice"),
        (birds, "owl\n", "birds/tit is no class"),
        (birds, "owl\ntit\nemu\n", "class emu has no folder in"),
    ):
        words = [] if text_of_names is None else ["--classes", names]
        names.unlink(missing_ok=True)
        if text_of_names not in (None, "missing"):
            names.write_text(str(text_of_names))
        assert call(monkeypatch, image_folder, "--source", source, *out, *words) == 1
        assert said in capsys.readouterr().err
    (birds / "both.PNG").touch()
    assert call(monkeypatch, image_folder, "--source", birds, "--out", birds / "owl") == 1
    assert "is in the source" in capsys.readouterr().err
    names.write_text("tit x\nowl y\n")
    (birds / "both.PNG").touch()
    assert call(monkeypatch, image_folder, "--source", birds, *out, "--classes", names) == 0
    assert "1 pictures are left out, since they lie in no folder of a class: both.PNG" in (
        capsys.readouterr().err
    )
    assert load_index(tmp_path / "out").classes == ("tit", "owl")


def test_splits_suffixes_and_folders_are_taken_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_birds(source / "Train", 2)
    write_birds(source / "valid", 1)
    (source / "valid" / "tit" / "tit0.jpg").unlink()
    (source / "valid" / "tit").rmdir()
    (source / "testing").mkdir()
    (source / "extra" / "x").mkdir(parents=True)
    owls = source / "Train" / "owl"
    red = Image.new("RGB", (8, 8), RED)
    for place in (
        *("testing/1.jpg", "extra/x/1.jpg", "stray.jpg", "Train/owl/.ipynb_checkpoints/1.jpg"),
        *("Train/__pycache__/1.jpg", "Train/owl/._1.jpg", "Train/owl/photo.heic", "Train/README"),
    ):
        path = source / place
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(red))
    (source / "Train" / "notes").mkdir()
    (source / "Train" / "notes" / "a.txt").touch()
    (owls / "away").symlink_to(source / "extra")
    kinds = {"avif": "AVIF", "jfif": "JPEG", "jpe": "JPEG", "ppm": "PPM", "tif": "TIFF"}
    for ending, kind in kinds.items():
        (owls / f"k.{ending}").write_bytes(encoded(red, kind))
    words = ["--source", source, "--out", out]
    assert call(monkeypatch, image_folder, *words, "--strict") == 0
    said = capsys.readouterr().err
    for line in (
        "source: left out, since they are no splits (train, val, test): extra",
        "source: 1 pictures are left out, since they lie in no split: stray.jpg",
        "Train: without pictures: notes",
        *("hidden, or of a cache (3)", "without ending (1)", ".heic (1)", "links to folders (1)"),
        "valid: 1 classes have no folder: tit",
        "testing: has no folders of classes, so no labels",
    ):
        assert line in said
    assert {path.name for path in out.iterdir()} == {"Train", "valid", "testing"}
    assert load_index(out / "Train").classes == ("owl", "tit")
    assert [len(ShardDataset(out / name)) for name in ("Train", "valid", "testing")] == [9, 1, 1]
    assert ShardDataset(out / "valid")[0][1] == 0
    # A class may have the name of a split.
    vehicles = write_birds(tmp_path / "vehicles", 1)
    (vehicles / "tit").rename(vehicles / "train")
    words = ["--source", vehicles, "--out", tmp_path / "trains"]
    assert call(monkeypatch, image_folder, *words) == 1
    assert "holds train/, which may be a split or a class, beside owl/" in capsys.readouterr().err
    (tmp_path / "names").write_text("train\nowl\n")
    assert call(monkeypatch, image_folder, *words, "--classes", tmp_path / "names") == 0
    assert load_index(tmp_path / "trains").classes == ("train", "owl")


def test_names_of_files_need_not_be_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    birds = write_birds(tmp_path / "birds", 1)
    (birds / "owl").rename(birds / os.fsdecode(b"ca\xe9"))
    (birds / "tit" / "tit0.jpg").rename(birds / "tit" / os.fsdecode(b"\xe4.jpg"))
    (birds / "tit" / os.fsdecode(b"\xf6.jpg")).write_bytes(b"")
    out = tmp_path / "out"
    words = ["--source", birds, "--out", out]
    assert call(monkeypatch, image_folder, *words) == 0
    assert r"skipped tit/\udcf6.jpg: it is empty" in capsys.readouterr().out
    assert call(monkeypatch, image_folder, *words, "--json") == 0
    assert (out / "skipped.txt").read_bytes() == b"tit/\xf6.jpg: it is empty (0 bytes)\n"
    assert load_index(out).classes == (r"ca\xe9", "tit")
    assert sorted(label for _, label in ShardDataset(out)) == [0, 1]
    assert call(monkeypatch, image_folder, *words, "--strict", "--again") == 1
    assert "error: tit/" in capsys.readouterr().err


def test_a_name_with_a_newline_is_one_line_of_what_was_skipped(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (birds / "owl" / "a\nb.jpg").write_bytes(b"")
    out = tmp_path / "out"
    for _ in range(2):
        assert call(monkeypatch, image_folder, "--source", birds, "--out", out) == 0
        assert "skipped owl/a\\nb.jpg: it is empty (0 bytes)\n" in capsys.readouterr().out
    assert (out / "skipped.txt").read_text() == "owl/a\\nb.jpg: it is empty (0 bytes)\n"


def test_names_of_classes_may_be_several_words(birds: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_bytes(b"\xef\xbb\xbfpolar bear\r\nn01440764 tench, Tinca\n\nsea lion x\n")
    assert pictures.read_classes(names) == ["polar bear", "n01440764", "sea lion x"]
    assert pictures.read_classes(names, ["sea", "polar bear"])[2] == "sea"
    names.write_text("polar bear\npolar fox\n")
    assert pictures.read_classes(names) == ["polar bear", "polar fox"]


def test_shards_are_indexed_and_verified_by_command(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert call(monkeypatch, image_folder, "--source", birds, "--out", out) == 0
    shards = load_index(out).shards
    for path in out.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    capsys.readouterr()
    assert call(monkeypatch, index_shards, out, "--verify") == 1
    assert "has no index.json" in capsys.readouterr().err
    assert call(monkeypatch, index_shards, out, "--json") == 0
    found = {"fields": ["jpg", "cls"], "lacking": {}, "left_out": {}}
    assert json.loads(capsys.readouterr().out) == {"examples": 12, "shards": 1, **found}
    assert load_index(out).shards == shards
    assert call(monkeypatch, index_shards, out, "--verify") == 0
    assert "12 examples in 1 shards fit the index" in capsys.readouterr().out


def test_as_many_processes_index_as_cores_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(index_shards, "usable_cores", lambda: 3)  # the quota of a container
    with pytest.raises(SystemExit):
        call(monkeypatch, index_shards, "--help")
    assert "(default: 3)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        call(monkeypatch, index_shards, tmp_path, "--processes", 0)
    assert "0: it must be 1 or more" in capsys.readouterr().err


def on_host(birds: Path, out: Path, *more: object) -> tuple[object, ...]:
    """Words for the call that indexes the shards which hosts have written."""
    return ("--source", birds, "--out", out, "--on-host", out, *more)


def test_a_source_that_could_not_be_read_for_a_while_is_not_lost(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, owl = tmp_path / "out", birds / "owl" / "owl0.jpg"
    whole = owl.read_bytes()
    owl.write_bytes(bytes(len(whole)))
    assert call(monkeypatch, image_folder, "--source", birds, "--out", out) == 0
    digest = frame.digest_of(load_index(out).made_from)
    for name in ("index.json", "skipped.txt"):
        (out / name).unlink()
    owl.write_bytes(whole)
    assert call(monkeypatch, image_folder, *on_host(birds, out, digest)) == 1
    error = capsys.readouterr().err
    assert "lacks owl/owl0.jpg, which is not damaged; remove that shard" in error
    (birds / "owl" / "more.jpg").write_bytes(whole)
    assert call(monkeypatch, image_folder, *on_host(birds, out, digest)) == DISAGREES
    assert "would be another one on this host than where the call" in capsys.readouterr().err
    (birds / "owl" / "more.jpg").unlink()
    owl.write_bytes(bytes(len(whole)))
    (out / ".prepared.jsonl").unlink()
    assert call(monkeypatch, image_folder, *on_host(birds, out, digest)) == 0
    assert (out / "skipped.txt").read_text() == "owl/owl0.jpg: no picture that Pillow knows\n"


def test_a_host_refuses_to_mix_shards_that_were_made_from_something_else(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, owl, digests = tmp_path / "out", birds / "owl" / "owl0.jpg", []
    for resize in (0, 20):
        made = tmp_path / f"{resize}" / "out"
        words = ("--source", birds, "--out", made, "--resize", resize)
        assert call(monkeypatch, image_folder, *words) == 0
        digests.append(frame.digest_of(load_index(made).made_from))
    begin = [(*on_host(birds, out, digest, "begin"), "--resize", 0) for digest in digests]
    capsys.readouterr()
    whole = owl.read_bytes()
    owl.write_bytes(whole + b"of another edition")
    assert call(monkeypatch, image_folder, *begin[0]) == DISAGREES
    assert "or files of other sizes" in capsys.readouterr().err
    owl.write_bytes(whole)
    assert call(monkeypatch, image_folder, *begin[1]) == DISAGREES
    assert "would be another one on this host" in capsys.readouterr().err
    assert call(monkeypatch, image_folder, *begin[1], "--resize", 20) == 0, "nothing is there yet"
    assert call(monkeypatch, image_folder, *begin[0]) == 0
    shutil.copy(tmp_path / "0" / "out" / "out-000000.tar", out)  # as a host receives it
    assert call(monkeypatch, image_folder, *begin[1], "--resize", 20) == DISAGREES
    assert "was made from resize 0 instead of 20" in capsys.readouterr().err
    assert call(monkeypatch, image_folder, *on_host(birds, out, digests[0])) == 0
    assert load_index(out) == load_index(tmp_path / "0" / "out")
    assert call(monkeypatch, image_folder, *begin[1], "--resize", 20) == DISAGREES
    (out / "index.json").unlink()  # nobody knows any more what these shards were made from
    assert call(monkeypatch, image_folder, *begin[0]) == DISAGREES
    assert "holds other files" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "expected"), [(1, ["b"]), (DISAGREES, [])])
def test_only_a_host_that_disagrees_stops_the_others(
    birds: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    expected: list[str],
) -> None:
    out = tmp_path / "out"
    assert call(monkeypatch, image_folder, *on_host(birds, out, "digest", "begin")) == DISAGREES
    gone = on_host(tmp_path / "gone", out, "digest", "begin")
    assert call(monkeypatch, image_folder, *gone) == 1, "it fails, and does not disagree"
    hosts, copied = tmp_path / "hosts", list[str]()
    hosts.write_text("a\nb\n")

    def run(hosts: list[Host], *_: object) -> Iterator[SimpleNamespace]:
        """One host ends with a status; of the others the index comes back."""
        for host in hosts:
            result = SimpleNamespace(exit_status=status, stderr=b"error: its disk fails")
            answer = SimpleNamespace(stdout='[{"shards": 1}]')
            ok = host.name != "a"
            yield SimpleNamespace(host=host, ok=ok, value=result, answer=answer, error="")

    def copy(hosts: list[Host], *_: object) -> Iterator[SimpleNamespace]:
        for host in hosts:
            copied.append(host.name)
            answer = SimpleNamespace(fetched=1, files=0)
            yield SimpleNamespace(host=host, ok=True, answer=answer)

    monkeypatch.setattr("hvd_elastic.tools.run.commands.run_on_hosts", run)
    monkeypatch.setattr("hvd_elastic.tools.copy.copying.copy_to_hosts", copy)
    with pytest.raises(DataError, match="a: error: its disk fails"):
        prepare_on_hosts(hosts, out, ["out-000000.tar"], "digest")
    assert copied == expected


def test_a_host_that_was_killed_keeps_the_shards_that_it_wrote(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole, sent = tmp_path / "out", tmp_path / "whole" / "out", tmp_path / "sent"
    words = ("--source", birds, "--per-shard", 1)
    assert call(monkeypatch, image_folder, *words, "--out", whole) == 0
    index = load_index(whole)
    names = tmp_path / "names"
    names.write_text("".join(f"{shard.name}\n" for shard in index.shards))
    sent.mkdir()
    given = ("--out", out, "--on-host", out, frame.digest_of(index.made_from), names, sent)
    command = [sys.executable, image_folder.__file__, "--processes", 2, *words, *given]
    with held(birds / "tit" / "tit5.jpg"):
        process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE)
        until(lambda: len([*out.glob("*.tar")]) >= 11, process=process)
        process.kill()
        process.communicate(timeout=LIMIT_S)
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert call(monkeypatch, image_folder, *words, *given) == 0
    assert times.items() <= {path.name: path.stat().st_mtime_ns for path in sent.iterdir()}.items()
    assert not [*out.glob("*.tar")]
    assert {path.name: path.read_bytes() for path in sent.iterdir()} == {
        path.name: path.read_bytes() for path in whole.glob("*.tar")
    }


def test_options_cannot_be_abbreviated(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hosts get the options of the call less --hostfile; with it they would call each other."""
    (tmp_path / "hosts").touch()
    with pytest.raises(SystemExit):
        call(
            monkeypatch, image_folder, "--source", birds, "--out", tmp_path / "out", "--host",
            tmp_path / "hosts",
        )  # fmt: skip
    assert "unrecognized arguments: --host" in capsys.readouterr().err


def test_a_signature_is_sent_with_a_download_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PAUSES_S", ())
    (tmp_path / "a.tgz").write_bytes(b"archive")
    md5 = hashlib.md5(b"archive").hexdigest()
    with FileServer(tmp_path).serving() as server:
        url = f"{server.url}/a.tgz?X-Sig=secret"
        archives.download(url, tmp_path / "there", md5)
        server.faults = {"a.tgz": [403]}
        with pytest.raises(DataError, match=r"/a\.tgz: the server answers 403") as failed:
            archives.download(url, tmp_path / "again", md5)
    assert (tmp_path / "there").read_bytes() == b"archive"
    assert "secret" not in str(failed.value)


def test_a_planted_link_in_place_of_a_part_is_not_written_through(tmp_path: Path) -> None:
    precious, out = tmp_path / "precious", tmp_path / "out"
    precious.write_text("mine")
    (tmp_path / "a.tgz").write_bytes(b"archive")
    (tmp_path / ".there.part").symlink_to(precious)
    with FileServer(tmp_path).serving() as server:
        md5 = hashlib.md5(b"archive").hexdigest()
        archives.download(f"{server.url}/a.tgz", tmp_path / "there", md5)
    settings = imagenet_layout.Settings(2, 1, 1, 16, 0)
    imagenet_layout.prepare(out, settings)
    picture = imagenet_layout.class_folder(out, 0, 0) / "n00000000_0.JPEG"
    picture.unlink()
    for path in (picture, out / "made_from.json"):
        path.with_name(f".{path.name}.part").symlink_to(precious)
    imagenet_layout.prepare(out, settings)
    assert precious.read_text() == "mine"
    assert not picture.is_symlink()


def test_a_full_disk_is_named_and_not_the_server_while_a_shard_is_fetched(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tmp_path / "shards"
    assert call(monkeypatch, image_folder, "--source", birds, "--out", shards) == 0
    capsys.readouterr()
    with (
        FileServer(shards).serving() as server,
        mounted(tmp_path / "disk", "12k") as disk,
    ):
        words = [f"{server.url}/shards-{{000000..000000}}.tar", "--index", disk]
        assert call(monkeypatch, index_shards, *words) == 1
        assert server.requests["shards-000000.tar"] == 1
    error = capsys.readouterr().err
    assert "shards-000000.tar cannot be written: No space left on device" in error
    assert "is the server up" not in error


def test_a_full_temporary_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        for name in (cifar10.NAMES, *cifar10.SPLITS["train"], *cifar10.SPLITS["val"]):
            add(file, f"{cifar10.INSIDE}/{name}", bytes(20_000))
    with mounted(tmp_path / "tmp", "60k") as disk:
        match = rf"{disk}/data_batch_\d.bin cannot be written: No space .*TMPDIR names another"
        with pytest.raises(DataError, match=match):
            cifar10.unpack(archive, disk)
