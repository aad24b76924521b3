"""Writes and reads a few examples by other people's libraries: python peer_shards.py CALL FOLDERS.

It runs in the Python of each library. What a call has read is printed as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.testbed.environments import import_streaming

KEYS = ("a", "sub/für", "long-" * 30)
FIELDS = ("png", "cls", "json", "npy", "txt")


def examples() -> Iterator[dict[str, Any]]:
    """Yield examples whose pixels, numbers and texts differ."""
    for number, key in enumerate(KEYS):
        pixels = np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3) + 50 * number
        out = BytesIO()
        Image.fromarray(pixels).save(out, "PNG")
        yield {
            "__key__": key,
            "png": out.getvalue(),
            "cls": number,
            "json": {"n": number, "name": "ö"},
            "npy": np.array([number, -1.5], np.float32),
            "txt": f"text {number} ü",
        }


def shown(key: str, png: Any, cls: Any, some: Any, npy: Any, txt: Any) -> list[Any]:
    """Return the values of an example as JSON can show them."""
    if isinstance(png, (bytes, memoryview)):  # litdata gives a view
        png = Image.open(BytesIO(png))
    if isinstance(npy, bytes):
        npy = np.load(BytesIO(npy))
    some = json.loads(some) if isinstance(some, (bytes, str)) else some
    txt = txt.decode() if isinstance(txt, bytes) else txt
    return [key, np.asarray(png).tolist(), int(cls), some, np.asarray(npy).tolist(), txt]


def expected() -> list[Any]:
    """Return all examples as a reader should print them."""
    return [shown(*each.values()) for each in examples()]


def write_ours(
    folder: str, given: Iterable[dict[str, Any]] | None = None, layout: str = "tar"
) -> None:
    """Write a shard and its index."""
    from hvd_elastic.data import ShardWriter, build_index

    fields = ("png", "json", "npy", "txt", "cls")
    with ShardWriter(Path(folder) / f"s.{layout}", layout, fields) as writer:
        for example in given or examples():
            npy = BytesIO()
            np.save(npy, example["npy"])
            stored = {"json": json.dumps(example["json"]).encode(), "npy": npy.getvalue()}
            stored |= {"txt": example["txt"].encode(), "cls": b"%d" % example["cls"]}
            values = {**example, **stored}
            writer.add(example["__key__"], [values[field] for field in fields])
        writer.finish()
    build_index(folder)


def ours(folder: str) -> Iterator[dict[str, Any]]:
    """Yield the examples of a folder of shards."""
    from hvd_elastic.data import ShardDataset

    fields = ("__key__", *FIELDS)
    for example in ShardDataset(folder, decode=bytes, fields=fields):
        yield dict(zip(fields, example, strict=True))


def write_webdataset(folder: str) -> None:
    """Write a shard."""
    import webdataset

    with webdataset.ShardWriter(f"{folder}/s-%06d.tar") as writer:
        for example in examples():
            writer.write(example)


def read_webdataset(folder: str) -> list[Any]:
    """Read the shards of a folder."""
    import webdataset

    urls = sorted(map(str, Path(folder).glob("*.tar")))
    read = webdataset.WebDataset(urls, shardshuffle=False).decode("pil")
    return [shown(*each) for each in read.to_tuple("__key__", *FIELDS)]


def write_tensorflow(folder: str) -> None:
    """Write a TFRecord file, with a feature of each kind."""
    import tensorflow as tf

    with tf.io.TFRecordWriter(f"{folder}/train-00000-of-00128") as writer:
        for example in examples():
            features = {
                "image/encoded": tf.train.BytesList(value=[example["png"]]),
                "image/filename": tf.train.BytesList(value=[example["__key__"].encode()]),
                "image/class/label": tf.train.Int64List(value=[example["cls"] + 1]),
                "json": tf.train.BytesList(value=[json.dumps(example["json"]).encode()]),
                "npy": tf.train.FloatList(value=example["npy"]),
                "txt": tf.train.BytesList(value=[example["txt"].encode()]),
                "words": tf.train.BytesList(value=[b"w"] * example["cls"]),
                "tokens": tf.train.Int64List(value=[-1, 1 << 40, example["cls"]]),
            }
            written = tf.train.Example()
            for name, value in features.items():
                kind = {"BytesList": "bytes", "FloatList": "float", "Int64List": "int64"}
                made = {f"{kind[type(value).__name__]}_list": value}
                written.features.feature[name].CopyFrom(tf.train.Feature(**made))
            writer.write(written.SerializeToString())


def read_tensorflow(folder: str) -> list[Any]:
    """Read the TFRecord files that ours wrote."""
    import tensorflow as tf

    features = {
        name: tf.io.FixedLenFeature([], tf.int64 if name == "image/class/label" else tf.string)
        for name in ("image/filename", "image/encoded", "image/class/label", "json", "npy", "txt")
    }
    found = []
    for record in tf.data.TFRecordDataset(sorted(map(str, Path(folder).glob("*.tfrecord")))):
        key, png, label, *rest = (
            tf.io.parse_single_example(record, features)[name].numpy() for name in features
        )
        found.append(shown(key.decode(), png, label - 1, *rest))
    return found


def same(example: dict[str, Any]) -> dict[str, Any]:
    """Return the argument: litdata takes a function that other processes can import."""
    return example


def write_litdata(folder: str, given: Iterable[dict[str, Any]] | None = None) -> None:
    """Write a folder of litdata."""
    import litdata

    litdata.optimize(same, list(given or examples()), folder, chunk_bytes="1MB", num_workers=1)


def from_litdata(folder: str) -> Iterable[dict[str, Any]]:
    """Return the examples of a folder of litdata."""
    import litdata

    found: Iterable[dict[str, Any]] = litdata.StreamingDataset(folder)
    return found


def write_streaming(folder: str, given: Iterable[dict[str, Any]] | None = None) -> None:
    """Write a folder of mosaicml-streaming."""
    columns = {"__key__": "str", "png": "bytes", "cls": "int"}
    columns |= {"json": "json", "npy": "ndarray", "txt": "str"}
    with import_streaming().MDSWriter(out=folder, columns=columns) as writer:
        for example in given or examples():
            writer.write(example)


def from_streaming(folder: str) -> Iterable[dict[str, Any]]:
    """Return the examples of a folder of mosaicml-streaming."""
    found: Iterable[dict[str, Any]]
    found = import_streaming().StreamingDataset(local=folder, shuffle=False, batch_size=1)
    return found


def convert(library: str, theirs: str, folder: str, again: str) -> list[Any]:
    """Write by a library, copy to ours, copy that back, and return what the library reads."""
    write, read = globals()[f"write_{library}"], globals()[f"from_{library}"]
    write(theirs)
    write_ours(folder, list(read(theirs)))
    write(again, list(ours(folder)))
    return [shown(*(each[name] for name in ("__key__", *FIELDS))) for each in read(again)]


if __name__ == "__main__":
    call, *arguments = sys.argv[1:]
    print(json.dumps(globals()[call](*arguments)))
