"""Shards that other programs wrote: all is read, or what is left out is named."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.testbed.environments import PeerEnvironment, PeerMissingError
from benchmarks.testbed.file_server import FileServer
from datasets_prep import index_shards
from hvd_elastic.data import ShardDataset, build_index, load_index, verify
from hvd_elastic.errors import DataError
from tests.paths import COSTLY, ROOT
from tests.unit.data import peer_shards
from tests.unit.data.peer_shards import expected, shown
from tests.unit.data.shards import npy, write_numbers

pytest.importorskip("google_crc32c", reason="TFRecord needs its checksums")

FIXTURES = ROOT / "tests/fixtures/shards"
"""Files that webdataset 1.0.2 and 0.2.111, and TensorFlow 2.21, wrote by ``peer_shards.py``."""
SCRIPT = ROOT / "datasets_prep/index_shards.py"


def tar(path: Path, members: Sequence[tuple[str, bytes]], kind: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar file, and return its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1.5  # PAX stores a fraction in a header of its own
            file.addfile(info, io.BytesIO(data))
    return path.parent


def texts(count: int, first: int = 0) -> list[tuple[str, bytes]]:
    return [(f"k{number}.txt", b"%d" % number) for number in range(first, first + count)]


def shown_ours(folder: Path | str) -> list[Any]:
    dataset = ShardDataset(folder, fields=("__key__", *peer_shards.FIELDS))
    return [shown(*example) for example in dataset]


# -- tar


@pytest.mark.parametrize("version", ["1.0", "0.2"])
def test_shards_of_webdataset_are_read(tmp_path: Path, version: str) -> None:
    packed = FIXTURES / f"webdataset-{version}/s-000000.tar.gz"
    (tmp_path / "s.tar").write_bytes(gzip.decompress(packed.read_bytes()))
    index = build_index(tmp_path)
    assert verify(tmp_path) == index
    assert shown_ours(tmp_path) == expected()


@pytest.mark.parametrize("kind", ["USTAR", "GNU", "PAX"])
def test_each_format_of_tar_and_each_name_is_read(tmp_path: Path, kind: str) -> None:
    """Short, long, in folders, not ASCII, not even UTF-8."""
    keys = ["a", "./b", "für", "caf\udce9", "f" * 80 + "/" + "n" * 80]
    keys += [] if kind == "USTAR" else ["l" * 300, "日" * 60]
    members = [
        (f"{key}.{field}", b"%d" % at) for at, key in enumerate(keys) for field in ("TXT", "cls")
    ]
    tar(tmp_path / "s.tar", members, getattr(tarfile, f"{kind}_FORMAT"))
    index = build_index(tmp_path)
    assert verify(tmp_path) == index
    dataset = ShardDataset(tmp_path)
    assert [dataset.key(number) for number in range(len(keys))] == keys
    assert list(dataset) == [(str(number), number) for number in range(len(keys))]


@pytest.mark.parametrize("options", [("--format=posix",), ("--format=gnu",), ("--format=v7",)])
def test_archives_of_tar_itself_are_read(tmp_path: Path, options: tuple[str, ...]) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(str(number))
    out = tmp_path / "out/s.tar"
    out.parent.mkdir()
    subprocess.run(["tar", "--sort=name", *options, "-cf", out, "-C", tmp_path, "."], check=False)
    build_index(out.parent)
    verify(out.parent)
    assert list(ShardDataset(out.parent)) == ["0", "1", "2"]


def test_what_follows_the_end_of_an_archive_is_named(tmp_path: Path) -> None:
    for number in range(2):
        tar(tmp_path / f"{number}.tar", texts(2, 2 * number))
    with (tmp_path / "0.tar").open("ab") as file:
        file.write((tmp_path / "1.tar").read_bytes())
    with pytest.raises(DataError, match=r"0\.tar has data after its end, .* joined by cat"):
        build_index(tmp_path)


def test_a_label_of_too_many_digits_is_named(tmp_path: Path) -> None:
    tar(tmp_path / "a.tar", [("a.cls", b"9" * 25), ("a.txt", b"")])
    with pytest.raises(DataError, match=r"a\.cls holds b'9+' instead of the number of a class"):
        build_index(tmp_path)


def test_members_of_no_example_are_left_out_and_counted(tmp_path: Path) -> None:
    mac = [pair for name, data in texts(3) for pair in ((f"._{name}", b"mac"), (name, data))]
    tar(tmp_path / "s.tar", [*mac, ("README", b"words"), (".DS_Store", b"")])
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0
    assert (
        "5 members are part of no example and left out: 3 ._*, 1 README, 1 .DS_Store" in done.stdout
    )
    assert list(ShardDataset(tmp_path)) == ["0", "1", "2"]
    assert load_index(tmp_path).shards[0].left_out == {"._*": 3, "README": 1, ".DS_Store": 1}


def test_fields_may_come_in_any_order_and_be_missing(tmp_path: Path) -> None:
    first = [("a.txt", b"a"), ("a.cls", b"0"), ("b.cls", b"1"), ("b.txt", b"b")]
    tar(tmp_path / "s-0.tar", first)
    tar(
        tmp_path / "s-1.tar", [("c.cls", b"2"), ("c.txt", b"c"), ("d.txt", b"d"), ("d.json", b"[]")]
    )
    index = build_index(tmp_path)
    assert verify(tmp_path) == index
    assert index.fields == ("txt", "cls", "json")
    lacking = r"3 of 4 examples have no field json, the first in s-0.tar; .* optional=\('json',\)"
    with pytest.raises(DataError, match=lacking):
        ShardDataset(tmp_path)
    with pytest.raises(DataError, match=r"1 of 4 examples have no field cls, the first in s-1.tar"):
        ShardDataset(tmp_path, fields=("txt",))
    dataset = ShardDataset(tmp_path, optional=("json", "cls"))
    assert list(dataset) == [("a", None, 0), ("b", None, 1), ("c", None, 2), ("d", [], None)]
    named = ShardDataset(tmp_path, fields=("cls", "__key__", "txt"), optional=("cls",))
    assert list(named) == [(0, "a", "a"), (1, "b", "b"), (2, "c", "c"), (None, "d", "d")]
    upper = ShardDataset(tmp_path, str.upper, fields=("__key__", "txt"), optional=("cls",))
    assert upper[1:3] == [("b", "B", 1), ("c", "C", 2)]
    with pytest.raises(DataError, match="has no field jsn; its fields are txt, cls, json"):
        ShardDataset(tmp_path, fields=("txt",), optional=("jsn",))


def test_a_field_that_only_the_last_shard_lacks_is_named(tmp_path: Path) -> None:
    for number in range(3):
        more = [("x.json", b"1")] if number < 2 else []
        tar(tmp_path / f"s-{number}.tar", [("x.txt", b"x"), *more])
    build_index(tmp_path)
    with pytest.raises(DataError, match=r"1 of 3 examples have no field json, the first in s-2"):
        ShardDataset(tmp_path)
    assert ShardDataset(tmp_path, optional=["json"])[1:] == [("x", 1), ("x", None)]


def test_arrays_are_decoded_and_pickles_are_not(tmp_path: Path) -> None:
    out = io.BytesIO()
    np.savez(out, a=np.arange(3), b=np.ones(1))
    members = [("x.npz", out.getvalue()), ("x.npy", npy(np.arange(2))), ("x.pth", b"\x80")]
    tar(tmp_path / "s.tar", members)
    build_index(tmp_path)
    with pytest.raises(DataError, match=r"the field pth holds pickles, which can .* decode="):
        ShardDataset(tmp_path)
    arrays, array = ShardDataset(tmp_path, fields=("npz", "npy"))[0]
    assert {name: value.tolist() for name, value in arrays.items()} == {"a": [0, 1, 2], "b": [1.0]}
    assert array.tolist() == [0, 1]
    assert ShardDataset(tmp_path, fields=("pth",), decode=bytes)[0] == b"\x80"


# -- TFRecord


def test_records_of_tensorflow_are_read(tmp_path: Path) -> None:
    """Text, numbers, several values; the name is that of TensorFlow's own script for ImageNet."""
    folder = shutil.copytree(FIXTURES / "tensorflow", tmp_path / "d")
    build_index(folder)
    verify(folder)
    with pytest.raises(DataError, match=r"1 of 3 examples have no field words"):
        ShardDataset(folder)
    fields = ("__key__", "png", "cls", "json", "npy", "txt", "tokens", "words")
    found = list(ShardDataset(folder, fields=fields, optional=("words",)))
    assert [shown(*example[:6]) for example in found] == expected()
    assert [example[6].tolist() for example in found] == [[-1, 1 << 40, at] for at in range(3)]
    assert [example[7] for example in found] == [None, [b"w"], [b"w", b"w"]]


def test_sequence_examples_are_read(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "sequence", tmp_path / "d")
    build_index(folder)
    verify(folder)
    audio, frames, number, words = ShardDataset(folder)[0]
    assert audio.tolist() == [[0, 0], [1, 0.5], [2, 1]]
    assert (frames, number) == ([b"f0", b"f1", b"f2"], 7)
    assert [step.tolist() for step in words] == [[], [1], [1, 1]]


@pytest.mark.parametrize(
    ("stored", "option", "read"),
    [([1, 3], None, [0, 2]), ([0, 2], None, [0, 2]), ([1, 3], 0, [1, 3])],
)
def test_labels_of_records_count_from_0_or_1(
    tmp_path: Path, stored: list[int], option: int | None, read: list[int]
) -> None:
    from hvd_elastic.data.tfrecord import TFRecord

    records = [TFRecord().encode("k", ("txt", "cls"), (b"t", b"%d" % (n - 1)))[0] for n in stored]
    (tmp_path / "a.tfrecord").write_bytes(b"".join(records))
    build_index(tmp_path, labels_from=option)
    assert [label for _, label in ShardDataset(tmp_path)] == read


def features(folder: Path, *records: dict[str, int | bytes]) -> Path:
    """Write a TFRecord file of ``tf.train.Example``, and return its folder."""
    from hvd_elastic.data import tfrecord

    with (folder / "a.tfrecord").open("wb") as file:
        for record in records:
            body = b""
            for name, value in record.items():
                stored = tfrecord._varint(value) if isinstance(value, int) else value
                body += tfrecord._feature(name, 3 if isinstance(value, int) else 1, stored)
            data = tfrecord._delimited(1, body)
            head = len(data).to_bytes(8, "little")
            parts = (head, tfrecord._masked_crc(head), data, tfrecord._masked_crc(data))
            file.write(b"".join(parts))
    return folder


@pytest.mark.parametrize("label", [3, b"3"])
def test_records_with_the_names_of_webdataset_have_their_labels_and_keys(
    tmp_path: Path, label: int | bytes
) -> None:
    build_index(features(tmp_path, {"txt": b"t", "cls": label, "__key__": b"k7"}))
    assert ShardDataset(tmp_path, fields=("__key__", "txt", "cls"))[0] == ("k7", "t", 3)


@pytest.mark.parametrize("record", [{"cls": b"cat"}, {"cls": 1, "label": 2}, {"__key__": 1}])
def test_features_that_are_no_labels_or_keys_do_not_pass_for_them(
    tmp_path: Path, record: dict[str, int | bytes]
) -> None:
    with pytest.raises(DataError, match=r"a\.tfrecord: record 0: the feature \w+ must be "):
        build_index(features(tmp_path, record))


def test_two_features_do_not_become_one_field(tmp_path: Path) -> None:
    image = b"\x89PNG..."
    build_index(features(tmp_path, {"image/encoded": image, "png": b"mine"}))
    found = ShardDataset(tmp_path, fields=("image/encoded", "png"), decode={"png": bytes})[0]
    assert found == (image, b"mine")


def test_labels_of_shards_that_are_not_read_again_stay(tmp_path: Path) -> None:
    """The name of the feature, ``label``, says that they count from 0."""
    features(tmp_path, {"txt": b"a", "label": 1}, {"txt": b"b", "label": 2})
    for _ in range(2):
        build_index(tmp_path)
        assert list(ShardDataset(tmp_path)) == [("a", 1), ("b", 2)]


def test_compressed_shards_are_called_so(tmp_path: Path) -> None:
    record = (FIXTURES / "sequence/sequence.tfrecord").read_bytes()
    for name, data, how in (
        ("a.tfrecord", gzip.compress(record), r"\(gzip\).* gunzip"),
        ("a.tfrecord", zlib.compress(record), r"\(zlib\).* pigz -dz"),
        ("a.tar", gzip.compress(bytes(1024)), r"\(gzip\)"),
        ("a.tar.gz", gzip.compress(bytes(1024)), r"\(gzip\)"),
    ):
        path = tmp_path / str(len(list(tmp_path.iterdir()))) / name
        path.parent.mkdir()
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"{name} is compressed {how}"):
            build_index(path.parent)


# -- the index


@pytest.mark.parametrize(("processes", "moment"), [(1, "reads"), (2, "reads"), (2, "begins")])
def test_an_interrupted_call_says_so(tmp_path: Path, processes: int, moment: str) -> None:
    """Also while its processes are loaded: Python would print where each of them was."""
    shards = tmp_path / "shards"
    for number in range(2):
        tar(shards / f"{number}.tar", texts(9))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "def tell(*_):\n"
        f"    os.write(os.open({str(tmp_path / 'pipe')!r}, os.O_RDWR), b'x')\n"
        "    time.sleep(1)\n"
        f"if {moment!r} == 'reads':\n"
        "    from hvd_elastic.data import indexing\n"
        "    indexing.sha256_of = tell\n"
        "elif '--multiprocessing-fork' in sys.argv:\n"
        "    tell()\n"
    )
    words = [sys.executable, SCRIPT, shards, "--processes", str(processes)]
    with subprocess.Popen(
        words,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as call:
        with (tmp_path / "pipe").open("rb", buffering=0) as pipe:
            assert pipe.read(1) == b"x"
        os.killpg(call.pid, signal.SIGINT)
        assert call.communicate(timeout=60)[1] == "interrupted; no index was written\n"
    assert call.returncode == 130


@pytest.mark.parametrize("place", ["https://x/{0..1}.tar", "/d/{0..1}.tar", "https://x"])
def test_verifying_takes_a_folder(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["index_shards.py", place, "--verify"])
    with pytest.raises(SystemExit, match="2"):
        index_shards.main()
    assert "--verify takes the folder of the shards" in capsys.readouterr().err


def test_an_index_lies_elsewhere_and_has_shards_of_subfolders(tmp_path: Path) -> None:
    shards, index = tmp_path / "shards", tmp_path / "index"
    for number in range(3):
        tar(shards / f"{number}/s-{number}.tar", texts(2, 2 * number))
    with pytest.raises(DataError, match=r"its folders 0, 1, 2 do: name one, or --subfolders"):
        build_index(shards)
    before = sorted(shards.rglob("*"))
    build_index(shards, out=index, subfolders=True, processes=2)
    verify(shards, index)
    assert sorted(shards.rglob("*")) == before
    assert list(ShardDataset(shards, index=index)) == list("012345")
    assert list(ShardDataset(f"{shards}/{{2/s-2,0/s-0}}.tar", index=index)) == list("4501")
    changed = shards / "2" / "s-2.tar"
    changed.write_bytes(changed.read_bytes().replace(b"k4", b"K4"))
    with pytest.raises(DataError, match=rf"SHA-256.*index_shards.py {shards} --index {index}"):
        verify(shards, index)
    other = write_numbers(tmp_path / "other", [3])
    with pytest.raises(DataError, match=r"shards/s-00.tar, a shard of the index in .*other"):
        ShardDataset(shards, index=other)


def test_braces_name_some_of_the_shards(tmp_path: Path) -> None:
    for number in range(12):
        tar(tmp_path / f"s-{number:02}.tar", texts(1, number))
    build_index(tmp_path)
    assert list(ShardDataset(f"{tmp_path}/s-{{08..11}}.tar")) == ["8", "9", "10", "11"]
    assert list(ShardDataset(f"{tmp_path}/{{s-03,s-01}}.tar")) == ["3", "1"]
    with pytest.raises(DataError, match=r"lacks 2 of 4 shards, such as s-12.tar"):
        ShardDataset(f"{tmp_path}/s-{{10..13}}.tar")
    with pytest.raises(DataError, match=r"braces stand for numbers, \{000..127\}"):
        ShardDataset(f"{tmp_path}/s-{{x}}.tar")
    with pytest.raises(DataError, match=r"11..08 counts down; write 08..11"):
        ShardDataset(f"{tmp_path}/s-{{11..08}}.tar")
    with pytest.raises(DataError, match=r"names s-01.tar twice"):
        ShardDataset(f"{tmp_path}/s-{{01,01}}.tar")
    assert len(build_index(f"{tmp_path}/s-{{00..01}}.tar", out=tmp_path / "i").shards) == 2


def test_only_shards_that_have_changed_are_read_again(tmp_path: Path) -> None:
    for number in range(3):
        tar(tmp_path / f"s-{number}.tar", texts(2, 2 * number))
    before = build_index(tmp_path)
    tables = [tmp_path / f"s-{number}.tar.npy" for number in range(3)]
    written = [table.stat().st_mtime_ns for table in tables]
    tar(tmp_path / "s-1.tar", [*texts(2, 10), ("z.json", b"1")])
    after = build_index(tmp_path)
    assert [table.stat().st_mtime_ns == at for table, at in zip(tables, written, strict=True)] == [
        *(True, False, True),
    ]
    assert after.shards[2].sha256 == before.shards[2].sha256
    verify(tmp_path)
    dataset = ShardDataset(tmp_path, optional=("json", "txt"))
    assert [txt for txt, _ in dataset] == ["0", "1", "10", "11", None, "4", "5"]
    assert dataset[4] == (None, 1)
    (tmp_path / "s-0.tar").unlink()
    assert len(build_index(tmp_path).shards) == 2


@pytest.mark.parametrize("text", ['{"version": 2, "shards": []}', '{"a": 1}\n{"a": 2}\n', "hello"])
def test_an_index_of_another_program_is_not_overwritten(tmp_path: Path, text: str) -> None:
    tar(tmp_path / "s.tar", texts(1))
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DataError, match=r"not an index of hvd_elastic, and is not overwritten"):
        build_index(tmp_path)
    build_index(tmp_path, out=tmp_path / "i")
    assert list(ShardDataset(tmp_path, index=tmp_path / "i")) == ["0"]


def test_shards_behind_a_url_without_an_index_are_indexed_and_read(tmp_path: Path) -> None:
    for number in range(3):
        tar(tmp_path / f"there/s-{number}.tar", texts(2, 2 * number))
    with FileServer(tmp_path / "there").serving() as server:
        pattern, index = f"{server.url}/s-{{0..2}}.tar", tmp_path / "index"
        build_index(pattern, out=index)
        assert not list(index.glob(".*"))
        for place in (pattern, server.url):
            dataset = ShardDataset(place, index=index, cache=tmp_path / "cache")
            assert list(dataset) == list("012345")
        assert server.requests == {f"s-{number}.tar": 2 for number in range(3)}
        with pytest.raises(DataError, match="a server does not list its files"):
            build_index(server.url, out=index)


def test_a_url_that_serves_web_pages_is_called_so(tmp_path: Path) -> None:
    folder = write_numbers(tmp_path / "there", [3])
    with FileServer(folder).serving() as server:
        dataset = ShardDataset(server.url, cache=tmp_path / "cache")
        for name in ("s-00.tar", "index.json"):
            (folder / name).write_text("<!DOCTYPE html><html>log in</html>")
        with pytest.raises(DataError, match=r"s-00.tar is a web page; check the URL"):
            dataset[0]
        with pytest.raises(DataError, match=r"index.json is a web page and not an index"):
            ShardDataset(server.url, cache=tmp_path / "cache")
        with pytest.raises(DataError, match=rf"^{server.url}/s-00.tar is a web page; check"):
            build_index(f"{server.url}/{{s-00,s-01}}.tar", out=tmp_path / "i")
        (folder / "s-00.tar").write_bytes(b"1" * 999)
        with pytest.raises(DataError, match=rf"^{server.url}/s-00.tar is not a whole tar file"):
            build_index(f"{server.url}/{{s-00,s-01}}.tar", out=tmp_path / "i")


# -- other people's data sets, and their programs


HUGGING_FACE = """
import datasets, torch
import hvd_elastic.torch as hvd

hvd.init()
data = datasets.Dataset.from_dict(
    {"x": [[n, 2 * n] for n in range(10)], "text": list("abcdefghij")}
)
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
loader = hvd.DataLoader(data.with_format("torch"), 4, shuffle=True, num_workers=2)

@hvd.run
def train(state):
    for _ in hvd.epochs(1):
        for batch in loader:
            optimizer.zero_grad()
            model(batch["x"].float()).mean().backward()
            optimizer.step()
            for x, text in zip(batch["x"].tolist(), batch["text"]):
                print("READ", *x, text)

train(hvd.State(model=model, optimizer=optimizer))
"""


def python_with(package: str, module: str, *alone: str) -> str:
    """Return a Python that has a package beside those of this one.

    ``alone``: with these, and not with all that it asks for, such as a PyTorch of its own.
    """
    name = package.replace("==", "-") + ("-alone" if alone else "")
    options = ("--no-deps", *alone) if alone else ()
    environment = PeerEnvironment(name, (*options, package), module)
    try:
        environment.make()
    except PeerMissingError as error:
        pytest.skip(str(error))
    return str(environment.python)


@COSTLY
def test_a_dataset_of_hugging_face_works_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built; see make horovod")
    (tmp_path / "train.py").write_text(HUGGING_FACE)
    command = [python_with("datasets", "datasets"), str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read = [line for line in done.stdout.splitlines() if line.startswith("READ")]
    assert sorted(read) == [f"READ {n} {2 * n} {chr(97 + n)}" for n in range(10)]
    assert read != sorted(read)


PEERS = {
    "webdataset": "webdataset",
    "webdataset==0.2.111": "webdataset",
    "webdataset==0.2.48": "webdataset",
    "tensorflow": "tensorflow",
    "litdata": "litdata",
    "mosaicml-streaming": "streaming",
}


ALONE = {
    "litdata": (
        "boto3 botocore jmespath lightning-utilities obstore python-dateutil s3transfer tifffile"
    ),
    "mosaicml-streaming": (
        "Brotli catalogue cramjam huggingface-hub<1 python-snappy regex safetensors "
        "tokenizers<0.23 tqdm transformers<5 xxhash zstd<2"
    ),
}
"""What a library needs here of what it asks for."""


@COSTLY
@pytest.mark.parametrize("peer", PEERS)
def test_what_another_library_wrote_is_read_and_it_reads_ours(tmp_path: Path, peer: str) -> None:
    module = PEERS[peer]
    python = sys.executable
    if peer in ("webdataset", "tensorflow"):
        if find_spec(module) is None:  # imported, it would leave variables behind here
            pytest.skip(f"{module} is not installed")
    else:
        # Importing streaming as it is needs torchvision; peer_shards.py does without.
        needed = "transformers, snappy, zstd" if module == "streaming" else module
        python = python_with(peer, needed, *ALONE.get(peer, "").split())
    folders = [tmp_path / name for name in ("theirs", "ours", "again")]
    for folder in folders:
        folder.mkdir()
    theirs, ours, again = map(str, folders)

    def call(*arguments: str) -> Any:
        command = [python, peer_shards.__file__, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    if peer in ("litdata", "mosaicml-streaming"):  # formats of their own
        assert call("convert", module, theirs, ours, again) == expected()
        assert shown_ours(ours) == expected()
        with pytest.raises(DataError, match="holds neither tar nor TFRecord files"):
            build_index(theirs)
        return
    call(f"write_{module}", theirs)
    build_index(theirs)
    assert shown_ours(theirs) == expected()
    peer_shards.write_ours(ours, layout="tar" if module == "webdataset" else "tfrecord")
    assert call(f"read_{module}", ours) == expected()
