"""Folders of shards: read by index, by other people's readers, and what is wrong with them."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import pickle
import random
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hvd_elastic.data import (
    CentreCrop,
    RandomCrop,
    ShardDataset,
    ShardWriter,
    build_index,
    images,
    load_index,
    tfrecord,
    verify,
)
from hvd_elastic.data import dataset as dataset_module
from hvd_elastic.data.files import sha256_of
from hvd_elastic.data.index import table_path
from hvd_elastic.data.tfrecord import TFRecord
from hvd_elastic.errors import DataError, SkippedExampleError
from tests import other_user
from tests.other_user import open_folder as open_folder
from tests.paths import ROOT
from tests.unit.data.shards import damage, npy, write_numbers

pytest.importorskip("google_crc32c", reason="TFRecord needs its checksums")
from PIL import Image

RED = (200, 30, 20)
LAYOUTS = pytest.mark.parametrize("layout", ["tar", "tfrecord"])


def numbers(dataset: ShardDataset) -> list[tuple[float, int]]:
    return [(float(array[0]), label) for array, label in dataset]


@pytest.mark.parametrize("processes", [0, 1])
def test_an_example_that_cannot_be_decoded_is_an_error_for_who_does_not_leave_it_out(
    tmp_path: Path, processes: int
) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    folder = write_numbers(tmp_path / "d", [4])
    damage(folder, [2])
    told = r"s-00.tar: example 'k0002' cannot be decoded: "
    for on_error, kind in (("raise", DataError), ("skip", SkippedExampleError)):
        dataset: Any = ShardDataset(folder, on_error=on_error)  # type: ignore[arg-type]
        with pytest.raises(kind, match=told) as error:
            list(torch_data.DataLoader(dataset, 2, num_workers=processes))
        assert type(error.value) is kind
    with pytest.raises(DataError, match='on_error is \'drop\', it must be "raise" or "skip"'):
        ShardDataset(folder, on_error="drop")  # type: ignore[arg-type]


@LAYOUTS
def test_examples_are_read_by_index_in_the_order_of_the_shards(tmp_path: Path, layout: str) -> None:
    dataset = ShardDataset(write_numbers(tmp_path / "d", [4, 1, 5], layout))
    assert len(dataset) == 10
    assert dataset.classes == ("a", "b", "c")
    assert dataset.blocks == ((4, 1, 5), 16)
    assert [(float(dataset[i][0][0]), dataset[i][1]) for i in (9, 4, 0, 3, -1)] == [
        *((9.0, 0), (4.0, 1), (0.0, 0), (3.0, 0), (9.0, 0)),
    ]
    several = dataset.__getitems__([7, 0, 4, 7])
    assert [float(array[0]) for array, _ in several] == [7, 0, 4, 7]
    for outside in (10, -11):
        with pytest.raises(IndexError, match=f"d has no example {outside}: numbers are 0 to 9"):
            dataset[outside]
    assert dataset[np.int64(-1)][1] == dataset[9][1]
    assert [float(array[0]) for array, _ in dataset[-3::2]] == [7, 9]
    with pytest.raises(TypeError, match=r"not by 'a' \(str\).*Subset"):
        dataset["a"]  # type: ignore[index]


def test_a_pickled_data_set_reads_the_same(tmp_path: Path) -> None:
    dataset = ShardDataset(write_numbers(tmp_path / "d", [3, 3]))
    assert dataset[4][0][0] == 4  # has a shard open
    again = pickle.loads(pickle.dumps(dataset))
    assert numbers(again) == numbers(dataset)


def test_a_process_keeps_a_limited_number_of_shards_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "_OPEN_SHARDS", 2)
    dataset = ShardDataset(write_numbers(tmp_path / "d", [1] * 6))
    order = [0, 5, 1, 4, 2, 3, 0]
    assert [float(dataset[i][0][0]) for i in order] == order
    # Other files of this process may be closed at any time.
    opened = [file.path for file in psutil.Process().open_files()]
    assert len([path for path in opened if path.startswith(str(tmp_path))]) == 4, "and tables"


def test_fields_transform_and_decode(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.tar", "tar", ("npy", "txt", "json", "bin")) as writer:
        writer.add("x", (npy(np.arange(3)), "für".encode(), b'{"n": 1}', b"\0\1"))
        writer.finish()
    build_index(tmp_path)
    array, *rest = ShardDataset(tmp_path)[0]
    assert array.tolist() == [0, 1, 2]
    assert rest == ["für", {"n": 1}, b"\0\1"]
    assert ShardDataset(tmp_path, fields=("txt",))[0] == "für"
    assert ShardDataset(tmp_path, str.upper, fields=("txt", "bin"))[0] == ("FÜR", b"\0\1")
    assert ShardDataset(tmp_path, decode=len, fields=("bin",))[0] == 2
    with pytest.raises(DataError, match="has no field cls; its fields are npy, txt, json, bin"):
        ShardDataset(tmp_path, fields=("cls",))
    with pytest.raises(DataError, match="shuffle_window is 0, it must be 1 or more"):
        ShardDataset(tmp_path, shuffle_window=0)


def test_importing_it_imports_no_framework() -> None:
    code = "import sys, hvd_elastic.data; print({'torch', 'tensorflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# -- readers of other people


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdatasets_own_reader_reads_the_same(tmp_path: Path) -> None:
    web = pytest.importorskip("webdataset", reason="pip install webdataset")
    folder = write_numbers(tmp_path / "d", [4, 3])
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    read = web.WebDataset(urls, shardshuffle=False).decode().to_tuple("__key__", "npy", "cls")
    found = [(key, float(array[0]), label) for key, array, label in read]
    assert found == [(f"k{i:04d}", float(i), i % 3) for i in range(7)]
    del read
    gc.collect()  # it leaves its files open


def test_tensorflows_own_reader_reads_the_same(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu")
    folder = write_numbers(tmp_path / "d", [4, 3], "tfrecord")
    files = [str(path) for path in sorted(folder.glob("*-of-99"))]
    kinds = {
        "npy": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
        "image/filename": tf.io.FixedLenFeature([], tf.string),
    }
    for number, record in enumerate(tf.data.TFRecordDataset(files)):
        found = tf.io.parse_single_example(record, kinds)
        assert found["image/filename"].numpy() == b"k%04d" % number
        assert found["image/class/label"].numpy() == number % 3 + 1
        assert np.load(io.BytesIO(found["npy"].numpy()))[0] == number


def protobuf_example() -> Any:
    """The class ``tf.train.Example``, made from its definition by protobuf itself."""
    pool = pytest.importorskip("google.protobuf.descriptor_pool", reason="pip install protobuf")
    from google.protobuf import descriptor_pb2, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> Any:
        made = file.message_type.add(name=name)
        for name, number, label, kind, type_name in fields:
            made.field.add(
                name=name, number=number, label=label, type=kind, type_name=type_name or None
            )
        return made

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    message("BytesList", ("value", 1, many, field.TYPE_BYTES, ""))
    message("Int64List", ("value", 1, many, field.TYPE_INT64, ""))
    message(
        "Feature",
        ("bytes_list", 1, one, field.TYPE_MESSAGE, ".t.BytesList"),
        ("int64_list", 3, one, field.TYPE_MESSAGE, ".t.Int64List"),
    )
    features = message(
        "Features", ("feature", 1, many, field.TYPE_MESSAGE, ".t.Features.FeatureEntry")
    )
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=one, type=field.TYPE_STRING)
    entry.field.add(
        name="value", number=2, label=one, type=field.TYPE_MESSAGE, type_name=".t.Feature"
    )
    message("Example", ("features", 1, one, field.TYPE_MESSAGE, ".t.Features"))
    made = pool.DescriptorPool()
    made.Add(file)
    return message_factory.GetMessageClass(made.FindMessageTypeByName("t.Example"))


def test_records_are_the_messages_of_protobuf() -> None:
    """Both ways: it reads ours, and we read its, whatever the order of its features."""
    kind, picture = protobuf_example(), b"\xff\xd8" + bytes(300)
    record, place = TFRecord().encode("k", ("jpg", "cls"), (picture, b"299"))
    found = kind.FromString(record[12:-4]).features.feature
    assert found["image/filename"].bytes_list.value == [b"k"]
    assert found["image/encoded"].bytes_list.value == [picture]
    assert found["image/class/label"].int64_list.value == [300]
    assert (place.label, place.fields) == (299, ("jpg", "cls"))

    written = kind()
    for name, value in (("text", b"t"), ("image/encoded", picture), ("several", None)):
        written.features.feature[name].bytes_list.value.extend([value] if value else [b"1", b"2"])
    written.features.feature["image/class/label"].int64_list.value.append(7)
    written.features.feature["height"].int64_list.value.append(375)
    data = written.SerializeToString()
    read = tfrecord._example(data, 0, 5)
    fields = ("jpg", "height", "several", "text", "cls")
    assert (read.key, read.label, read.fields) == ("00000005", 6, fields)
    values = [
        (bytes(12) + data)[at:][:size] for at, size in zip(read.offsets, read.sizes, strict=True)
    ]
    assert (values[0], values[3]) == (picture, b"t")


def test_tarfile_and_tar_read_names_of_every_length(tmp_path: Path) -> None:
    keys = ["a", "k" * 96, "k" * 97, "k" * 300, "für"]
    with ShardWriter(tmp_path / "a.tar", "tar", ("txt",)) as writer:
        for key in keys:
            writer.add(key, (key.encode(),))
        writer.finish()
    with tarfile.open(tmp_path / "a.tar") as file:
        for key in keys:
            stored = file.extractfile(f"{key}.txt")
            assert stored is not None
            assert stored.read().decode() == key
            assert oct(file.getmember(f"{key}.txt").mode) == "0o644"
    listed = subprocess.run(["tar", "-tf", tmp_path / "a.tar"], capture_output=True, check=True)
    assert listed.stderr == b""
    build_index(tmp_path)
    assert list(ShardDataset(tmp_path)) == keys


def test_tars_of_other_people_are_indexed(tmp_path: Path) -> None:
    """As ``tar --sort=name -cf`` writes them: folders, long names, upper case."""
    folder = tmp_path / "files"
    (folder / "sub").mkdir(parents=True)
    names = ["sub/a", "sub/" + "long" * 40]
    for number, name in enumerate(names):
        (folder / f"{name}.JPG").write_bytes(b"picture %d" % number)
        (folder / f"{name}.cls").write_text(f"{number}\n")
    subprocess.run(["tar", "--sort=name", "-cf", tmp_path / "x.tar", "-C", folder, "."], check=True)
    index = build_index(tmp_path)
    assert (index.layout, index.fields, index.labelled) == ("tar", ("jpg", "cls"), True)
    dataset = ShardDataset(tmp_path, decode=bytes)
    assert [dataset[i] for i in range(2)] == [(b"picture 0", 0), (b"picture 1", 1)]
    assert verify(tmp_path) == index


# -- pictures


def jpeg(width: int, height: int) -> bytes:
    """The left half is dark, the right half is light, smoothly."""
    ramp = np.linspace(0, 255, width).astype(np.uint8)
    array = np.broadcast_to(ramp[None, :, None], (height, width, 3))
    return encoded(Image.fromarray(np.ascontiguousarray(array)))


def encoded(picture: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **{"quality": 95, **options})
    return out.getvalue()


def use(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode JPEG files by simplejpeg or by Pillow."""
    if decoder == "Pillow":
        monkeypatch.setattr(images, "simplejpeg", None)
    else:
        pytest.importorskip("simplejpeg")


@pytest.mark.parametrize("decoder", ["simplejpeg", "Pillow"])
@pytest.mark.parametrize("size", [(500, 375), (1200, 900), (64, 300), (30, 20)])
def test_a_scaled_decode_gives_nearly_the_pixels_of_a_full_one(
    size: tuple[int, int], decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(decoder, monkeypatch)
    data = jpeg(*size)
    for make in (CentreCrop, RandomCrop):
        for seed in range(5):
            found = []
            for scaled in (True, False):
                random.seed(seed)
                found.append(make(56, scaled=scaled)(data).astype(int))
            assert found[0].shape == (56, 56, 3)
            assert np.abs(found[0] - found[1]).mean() < 1.5


@pytest.mark.parametrize("decoder", ["simplejpeg", "Pillow"])
def test_a_scaled_decode_decodes_fewer_pixels(
    decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(decoder, monkeypatch)
    data = jpeg(800, 600)
    for size, scaled, decoded in (
        (56, True, (75, 100)),
        (56, False, (600, 800)),
        (700, True, (600, 800)),
    ):
        found = images._decode_part(data, lambda w, h: (0, 0, w, h), size, scaled=scaled)
        assert found.shape == (*decoded, 3)


def test_every_decoder_and_resizer_gives_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    data = encoded(coarse.resize((500, 375), Image.Resampling.BICUBIC))
    found = []
    for decoder in ("simplejpeg", "Pillow"):
        for without in ((), ("torch",)):
            with monkeypatch.context() as patch:
                use(decoder, patch)
                for name in without:
                    patch.delitem(sys.modules, name)
                random.seed(1)
                crops = RandomCrop(224, flip=1.0)(data), CentreCrop(224)(data)
            assert all(crop.flags.c_contiguous and crop.flags.writeable for crop in crops)
            found.append(np.stack(crops).astype(int))
    for other in found[1:]:
        assert np.abs(other - found[0]).max() <= 3
        assert np.abs(other - found[0]).mean() < 0.6


def test_odd_pictures_are_cropped_too() -> None:
    """In every kind of file; damaged ones are refused in words that say how."""
    red = Image.new("RGB", (40, 30), RED)
    for name, data, colour in (
        ("CMYK", encoded(red.convert("CMYK")), RED),
        ("grey", encoded(red.convert("L")), (80, 80, 80)),
        ("progressive", encoded(red, progressive=True), RED),
        ("4:4:4", encoded(red, subsampling=0), RED),
        ("more after it", encoded(red) + b"more", RED),
        ("palette", encoded(red.convert("P", palette=Image.Palette.ADAPTIVE), "PNG"), RED),
        ("16 bits", encoded(Image.fromarray(np.full((30, 40), 200, np.uint16)), "PNG"), None),
    ):
        for crop in (RandomCrop(16), CentreCrop(16)):
            found = crop(data)
            assert found.dtype == np.uint8
            assert found.shape == (16, 16, 3), name
            if colour is not None:
                assert np.abs(found.astype(int) - colour).max() < 25, (name, found[0, 0])
    for broken in (b"", b"no picture", encoded(red)[:200], encoded(red)[:-2]):
        with pytest.raises(DataError, match=r"(?i)empty|no picture|truncated"):
            RandomCrop(16)(broken)


def test_crops_are_inside_and_as_asked() -> None:
    crop = RandomCrop(8, scale=(0.2, 0.5), ratio=(1.0, 1.0))
    for _ in range(200):
        left, top, width, height = crop.part(300, 200)
        assert 0 <= left <= 300 - width
        assert 0 <= top <= 200 - height
        assert width == height
        assert 0.19 < width * height / 60_000 < 0.51
    with pytest.raises(DataError, match="scale two shares"):
        RandomCrop(8, scale=(0.5, 2))


# -- what is wrong with a folder


def change(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_no_index_and_other_indexes_are_explained(tmp_path: Path) -> None:
    for folder, said in (
        (tmp_path / "no", "is no folder"),
        (tmp_path, "has no index.json"),
    ):
        with pytest.raises(DataError, match=said):
            ShardDataset(folder)
    path = write_numbers(tmp_path / "d", [2]) / "index.json"
    with pytest.raises(DataError, match="but its folders d have one; name one of these"):
        ShardDataset(tmp_path)
    whole = json.loads(path.read_text())
    for text, said in (
        ("{", "is damaged"),
        ("[]", "is not an index of hvd_elastic"),
        ('{"format": "other"}', "is not an index of hvd_elastic"),
        (json.dumps({**whole, "version": 9}), "has version 9 of the index.*reads version 2"),
        (json.dumps({**whole, "layout": "zip"}), "layout 'zip' is none of tar, tfrecord"),
        (json.dumps({**whole, "shards": 3}), "is damaged"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            load_index(path.parent)


@LAYOUTS
def test_a_shard_that_has_changed_is_noticed(tmp_path: Path, layout: str) -> None:
    folder = write_numbers(tmp_path / "d", [3, 3], layout)
    dataset = ShardDataset(folder)
    shards = [folder / shard.name for shard in load_index(folder).shards]
    before = shards[1].read_bytes()
    verify(folder)
    # One byte of a value, which only a checksum can see.
    change(shards[1], int(np.load(table_path(shards[1]))["start"][1]) + 600, b"\x55")
    if layout == "tfrecord":
        shards[1].write_bytes(before[:-30] + b"\x55" + before[-29:])
    with pytest.raises(DataError, match="has changed since it was indexed"):
        verify(folder)
    # Another shard of the same size is noticed when an example is read.
    size = len(before)
    shards[1].write_bytes(random.Random(0).randbytes(size))
    with pytest.raises(
        DataError, match=r"example 'k0004' cannot be read: (there|another) .* copy it again"
    ):
        dataset[4]
    if layout == "tar":  # an example of the same name and another size
        shards[1].write_bytes(before.replace(b"00000000204\0", b"00000000203\0"))
        with pytest.raises(DataError, match=r"read: k0004.npy has another size in its place; copy"):
            dataset[4]
    else:  # records of the same lengths
        other = write_numbers(tmp_path / "other", [6, 3], layout) / shards[1].name
        shards[1].write_bytes(other.read_bytes())
        with pytest.raises(DataError, match=r"read: another record is in its place; copy it again"):
            dataset[4]
    shards[1].write_bytes(before[: size - 2200 if layout == "tar" else size - 30])
    with pytest.raises(DataError, match=f"bytes, and had {size} when it was indexed"):
        ShardDataset(folder)
    with pytest.raises(DataError, match="'k0005' cannot be read: the file ends after"):
        dataset[5]
    with pytest.raises(DataError, match=f"bytes, and had {size} when it was indexed"):
        ShardDataset.__getitem__(pickle.loads(pickle.dumps(dataset)), 5)
    shards[1].unlink()
    with pytest.raises(DataError, match="a shard of the index, cannot be read: No such file"):
        ShardDataset(folder)


def test_tables_that_do_not_fit_are_noticed(tmp_path: Path) -> None:
    folder = write_numbers(tmp_path / "d", [3])
    table = table_path(folder / "s-00.tar")
    whole = np.load(table)
    for wrong, said in (
        (whole[:2], "2 rows instead of 3"),
        (np.arange(3), "other columns"),
    ):
        np.save(table, wrong)
        with pytest.raises(DataError, match=said):
            ShardDataset(folder)[0]
    table.write_bytes(b"")
    with pytest.raises(DataError, match="cannot be used"):
        ShardDataset(folder)[0]
    whole["label"] = 1
    np.save(table, whole)
    with pytest.raises(DataError, match="does not fit the shard"):
        verify(folder)


def test_damaged_shards_are_not_indexed(tmp_path: Path) -> None:
    good = write_numbers(tmp_path / "good", [3]) / "s-00.tar"
    data = good.read_bytes()
    record = (write_numbers(tmp_path / "r", [3], "tfrecord") / "s.tfrecord-00-of-99").read_bytes()
    for number, (name, content, said) in enumerate(
        (
            ("x.tar", b"", "is empty"),
            ("x.tar", b"no tar" * 300, "is not a whole tar file"),
            ("x.tar", gzip.compress(data), "is compressed"),
            ("x.tar", data[:-1024], "does not end with two empty blocks"),
            ("x.tar", data[:-1200], "is cut off|is not a whole tar file"),
            ("x.tar", data[:700], "is cut off|is not a whole tar file"),
            ("x.tar", data[:-1024] + data, "do not lie together"),
            ("x.tfrecord", b"", "is empty"),
            ("x.tfrecord", data, "it is no TFRecord file"),
            ("x.tfrecord", record[:-3], "is cut off in record 2"),
            ("x.tfrecord", record[:20] + b"\x99" + record[21:], "record 0 is damaged"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(content)
        with pytest.raises(DataError, match=said):
            build_index(folder)
        assert not (folder / "index.json").exists()


def test_named_pipes_and_devices_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    folder = write_numbers(tmp_path / "d", [3])
    shard = folder / "s-00.tar"
    dataset = ShardDataset(folder)
    for path, said, use in (
        (table_path(shard), "the table of a shard, cannot be used", lambda: dataset[0]),
        (shard, "s-00.tar, a shard of the index, cannot be read", lambda: ShardDataset(folder)),
        (folder / "index.json", "index.json cannot be read", lambda: ShardDataset(folder)),
    ):
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(DataError, match=f"{said}.*it is a named pipe, no file"):
            use()
    for name in ("x.tar", "x.tfrecord"):
        path = tmp_path / name[2:] / name
        path.parent.mkdir()
        path.symlink_to("/dev/zero")
        with pytest.raises(OSError, match=f"it is a device, no file.*{name}"):
            build_index(path.parent)


def test_folders_and_members_that_cannot_be_indexed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds neither tar nor TFRecord files"):
        build_index(tmp_path)
    with pytest.raises(DataError, match="there is no folder"):
        build_index(tmp_path / "no")

    def tar(*members: tuple[str, bytes]) -> None:
        with tarfile.open(tmp_path / "a.tar", "w") as file:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))

    for members, said in (
        ([("a.jpg", b""), ("a.cls", b"x")], "a.cls holds b'x' instead of the number of a class"),
        ([("a", b""), (".b.jpg", b"")], r"holds no example: .* \(.b.jpg, a, …\) is named KEY.FI"),
        ([("a.jpg", b""), ("a.jpg", b"")], "each needs an ending of its own"),
        ([("a.jpg", b""), ("b.jpg", b""), ("a.cls", b"1")], "do not lie together"),
    ):
        tar(*members)
        with pytest.raises(DataError, match=said):
            build_index(tmp_path)
    tar(("a.jpg", b""), ("a.cls", b"2"))
    with pytest.raises(DataError, match="label 2, and 2 classes are named"):
        build_index(tmp_path, ["x", "y"])


def test_hard_links_are_followed_and_symbolic_ones_named(tmp_path: Path) -> None:
    """As tar stores a file that it has stored before; the first link leads to another example."""
    inside = tmp_path / "in"
    inside.mkdir()
    for number in range(3):
        (inside / f"{number}.cls").write_text(str(number))
        (inside / f"{number}.txt").write_text(f"text {number}")
    for number in (1, 2):
        (inside / f"{number}.txt").unlink()
        (inside / f"{number}.txt").hardlink_to(inside / "0.txt")
    (inside / "2.cls").unlink()
    (inside / "2.cls").hardlink_to(inside / "1.cls")
    (inside / "1.jpg").symlink_to("0.txt")
    words = ["tar", "--sort=name", "-cf", str(tmp_path / "a.tar"), "-C", str(inside), "."]
    subprocess.run(words, check=True)
    index = build_index(tmp_path)
    verify(tmp_path)
    assert index.shards[0].left_out == {"./1.jpg (symbolic link)": 1}
    assert list(ShardDataset(tmp_path)) == [("text 0", 0), ("text 0", 1), ("text 0", 1)]


def test_an_example_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.tar", "tar", ("jpg",)) as writer:
        writer.add("odd", (b"no picture",))
        writer.finish()
    build_index(tmp_path)
    with pytest.raises(DataError, match=r"a\.tar: example 'odd' cannot be decoded: no pict"):
        ShardDataset(tmp_path)[0]


@other_user.needs_root
def test_what_another_user_has_put_in_the_way_of_a_shard_is_not_written_to(
    open_folder: Path,
) -> None:
    def plant() -> None:
        for name in (".s-00.tar.part", ".s-00.tar.npy.part", ".index.json.part"):
            (open_folder / name).touch()
            (open_folder / name).chmod(0o666)

    other_user.call(plant)
    write_numbers(open_folder, [3])
    owners = {path.stat().st_uid for path in open_folder.iterdir() if path.suffix != ".part"}
    assert owners == {os.geteuid()}


def test_a_shard_appears_only_whole(tmp_path: Path) -> None:

    def fail() -> None:
        with ShardWriter(tmp_path / "a.tar", "tar", ("npy",)) as writer:
            writer.add("x", (b"1",))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())
    with ShardWriter(tmp_path / "a.tar", "tar", ("npy",)) as writer:
        writer.add("x", (b"1",))
        shard = writer.finish()
    assert shard.sha256 == sha256_of(tmp_path / "a.tar")
    assert shard.bytes == (tmp_path / "a.tar").stat().st_size
    with ShardWriter(tmp_path / "b.tfrecord", "tfrecord", ("txt", "jpg", "cls")) as writer:
        with pytest.raises(DataError, match="in the order jpg, txt, cls"):
            writer.add("x", (b"", b"", b"1"))
        writer.finish()


@pytest.mark.parametrize(
    "change",
    [
        *({"name": name} for name in ("..", "", "a/../b", "/a", "a.tar\0")),
        *({"sha256": name} for name in ("../../../etc/x", "")),
    ],
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, change: dict[str, str]) -> None:
    index = write_numbers(tmp_path / "d", [2]) / "index.json"
    whole = json.loads(index.read_text())
    whole["shards"][0].update(change)
    index.write_text(json.dumps(whole))
    with pytest.raises(DataError, match=r"would not lie in this folder|which is none; make it"):
        load_index(index.parent)


def test_an_index_that_is_nested_too_deeply_is_damaged(tmp_path: Path) -> None:
    index = write_numbers(tmp_path / "d", [2]) / "index.json"
    index.write_text(index.read_text().replace("{", '{"classes":' + "[" * 200_000, 1))
    with pytest.raises(DataError, match=r"index.json is damaged .* make it again"):
        load_index(index.parent)


def test_the_page_on_data_writes_shards_as_it_is_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    found = re.search(r"### Writing shards\n\n```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    folder = tmp_path / "data" / "mine"
    words: dict[str, str] = {}
    parts = [[(f"k{part}{number}", b"jpeg", words, 1) for number in range(2)] for part in range(2)]
    exec(found[1].replace("/data/mine", str(folder)), {"parts": parts})
    assert [shard.examples for shard in load_index(folder).shards] == [2, 2]
