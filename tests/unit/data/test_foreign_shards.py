"""Shards that other programs wrote: all is read, or what is left out is named."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.testbed.environments import (
    LITDATA,
    STREAMING,
    PeerEnvironment,
    PeerMissingError,
)
from hvd_elastic.data import ShardDataset, build_index, load_index, verify
from hvd_elastic.errors import DataError
from tests.paths import COSTLY, ROOT
from tests.unit.data import peer_shards
from tests.unit.data.peer_shards import expected, shown
from tests.unit.data.shards import features, npy, tar, texts

pytest.importorskip("google_crc32c", reason="TFRecord needs its checksums")

FIXTURES = ROOT / "tests/fixtures/shards"
"""Files that webdataset 1.0.2 and 0.2.111, and TensorFlow 2.21, wrote by ``peer_shards.py``."""
SCRIPT = ROOT / "datasets_prep/index_shards.py"


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


@pytest.mark.parametrize("zeros", [0, 512, 1023, 1024, 1500, 2048])
def test_a_tar_that_is_cut_off_in_its_end_is_named(tmp_path: Path, zeros: int) -> None:
    """As by a server that stops and has not said how long the file is. Padding may be short."""
    path = tar(tmp_path / "s.tar", texts(1)) / "s.tar"
    path.write_bytes(path.read_bytes().rstrip(b"\0").ljust(2048, b"\0") + bytes(zeros))
    if zeros in (1024, 2048):
        assert build_index(tmp_path).shards[0].examples == 1
        return
    with pytest.raises(DataError, match=r"s\.tar is cut off: .* two empty blocks"):
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


def test_names_that_are_not_utf8_are_counted_or_named(tmp_path: Path) -> None:
    odd = os.fsdecode(b"\xe9")
    tar(tmp_path / "s.tar", [*texts(1), (odd, b"")])
    assert build_index(tmp_path).shards[0].left_out == {r"\xe9": 1}
    tar(tmp_path / "s.tar", [(f"a.{odd}", b"")])
    with pytest.raises(DataError, match=r"s\.tar: the field \\xe9 has a name that is not UTF-8"):
        build_index(tmp_path)
    tar(tmp_path / f"{odd}.tar", texts(1))
    with pytest.raises(DataError, match=r"a shard whose name is not UTF-8, \\xe9\.tar; rename it"):
        build_index(tmp_path)


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
    for again in (False, True):
        assert [label for _, label in ShardDataset(tmp_path)] == read
        build_index(tmp_path, again=again)  # without the option
    assert [label for _, label in ShardDataset(tmp_path)] == read


@pytest.mark.parametrize("label", [3, b"3"])
def test_records_with_the_names_of_webdataset_have_their_labels_and_keys(
    tmp_path: Path, label: int | bytes
) -> None:
    build_index(features(tmp_path, {"txt": b"t", "cls": label, "__key__": b"k7"}))
    assert ShardDataset(tmp_path, fields=("__key__", "txt", "cls"))[0] == ("k7", "t", 3)


def test_a_label_that_was_nan_is_named(tmp_path: Path) -> None:
    folder = features(tmp_path, {"label": 1}, {"label": 1 << 63})  # as the bits of a negative one
    with pytest.raises(DataError, match=r"record 1: label is -9223372036854775808, which is no cl"):
        build_index(folder)


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


def test_a_label_of_several_numbers_in_some_examples_is_a_list_in_all(tmp_path: Path) -> None:
    """In one file, and where another file, which comes later, has the several ones."""
    features(tmp_path, {"label": 3}, {"label": 4})
    build_index(tmp_path)
    assert list(ShardDataset(tmp_path, fields=("__key__", "cls")))[1] == ("00000001", 4)
    features(tmp_path, {"label": [1, 2]}, {"label": 5}, name="b.tfrecord")
    for _ in range(2):
        assert build_index(tmp_path).fields == ("label",)
    verify(tmp_path)
    assert [label.tolist() for label in ShardDataset(tmp_path)] == [[3], [4], [1, 2], [5]]
    features(tmp_path, {"label": b"cat"}, name="c.tfrecord")
    with pytest.raises(DataError, match=r"c\.tfrecord: label holds bytes values here, and int64"):
        build_index(tmp_path)
    (tmp_path / "b.tfrecord").unlink()
    (tmp_path / "c.tfrecord").unlink()
    build_index(tmp_path)
    assert [row[1] for row in ShardDataset(tmp_path, fields=("__key__", "cls"))] == [3, 4]


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


def python_of(environment: PeerEnvironment) -> str:
    """Return the Python of an environment."""
    try:
        environment.make()
    except PeerMissingError as error:
        pytest.skip(str(error))
    return str(environment.python)


@COSTLY
def test_a_dataset_of_hugging_face_works_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built; see make horovod")
    (tmp_path / "train.py").write_text(HUGGING_FACE)
    command = [
        python_of(PeerEnvironment("datasets", ("datasets",), "datasets")),
        str(tmp_path / "train.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read = [line for line in done.stdout.splitlines() if line.startswith("READ")]
    assert sorted(read) == [f"READ {n} {2 * n} {chr(97 + n)}" for n in range(10)]
    assert read != sorted(read)


PEERS = {
    "webdataset": None,
    "webdataset==0.2.111": PeerEnvironment(
        "webdataset-0.2.111", ("webdataset==0.2.111",), "webdataset"
    ),
    "webdataset==0.2.48": PeerEnvironment(
        "webdataset-0.2.48", ("webdataset==0.2.48",), "webdataset"
    ),
    "tensorflow": None,
    "litdata": LITDATA,
    "streaming": STREAMING,
}
"""Other libraries and their environments; None: this one."""


@COSTLY
@pytest.mark.parametrize("peer", PEERS)
def test_what_another_library_wrote_is_read_and_it_reads_ours(tmp_path: Path, peer: str) -> None:
    module, environment = peer.partition("=")[0], PEERS[peer]
    python = sys.executable
    if environment is not None:
        python = python_of(environment)
    elif find_spec(module) is None:  # imported, it would leave variables behind here
        pytest.skip(f"{module} is not installed")
    folders = [tmp_path / name for name in ("theirs", "ours", "again")]
    for folder in folders:
        folder.mkdir()
    theirs, ours, again = map(str, folders)

    def call(*arguments: str) -> Any:
        command = [python, peer_shards.__file__, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    if peer in ("litdata", "streaming"):  # formats of their own
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
