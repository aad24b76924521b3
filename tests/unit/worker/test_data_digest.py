"""What ranks compare of their data sets."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from hvd_elastic.model.sharding import attribute_of
from hvd_elastic.torch.input_source import LoaderSource
from hvd_elastic.worker.checks import data_digest
from hvd_elastic.worker.checks.data_digest import DataDigest, difference
from tests.paths import LIMIT_S

EXAMPLES = 200


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_digest, "_READ_S", LIMIT_S)
    monkeypatch.setattr(data_digest, "_END_S", LIMIT_S)


class Folder(Dataset[Any]):
    """Files and classes, as an ``ImageFolder`` of torchvision has them."""

    def __init__(self, root: str, order: list[int]) -> None:
        self.samples = [(f"{root}/{i % 10}/{i}.png", i % 10) for i in order]
        self.targets = [target for _, target in self.samples]
        self.reads = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        raise OSError("there is no such file")


class Read(Folder):
    """What only its examples show; ``change`` is what this rank makes of them."""

    def __init__(self, change: Any) -> None:
        self.change, self.reads = change, 0

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        image = np.random.default_rng(index).random((3, 16, 16), np.float32)
        return self.change({"image": image, "name": f"{index}.png"})


ORDER = list(range(EXAMPLES))
MIXED = random.Random(0).sample(ORDER, EXAMPLES)
ROWS = torch.rand(EXAMPLES, 3, generator=torch.Generator().manual_seed(0))
OTHER_ROWS = torch.rand(EXAMPLES, 3, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(EXAMPLES) % 10


def compared(one: Any, other: Any) -> str:
    digests = [DataDigest(each, len(each)) for each in (one, other)]
    return difference(digests[0].described(), digests[1].described())


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        (Subset(Folder("/a", ORDER), MIXED), Subset(Folder("/a", ORDER), ORDER), "indices"),
        (Folder("/a", ORDER), Folder("/a", MIXED), "samples"),
        (Folder("/a", ORDER), Folder("/mnt/b", ORDER), ""),
        ([("/a/1", "cat"), ("/a/2", "dog")], [("/b/1", "cat"), ("/b/2", "dog")], ""),
        (ConcatDataset([Folder("/a", ORDER)]), ConcatDataset([Folder("/a", MIXED)]), "samples"),
        (TensorDataset(ROWS, LABELS), TensorDataset(ROWS, LABELS.flip(0)), "tensors[1]"),
        (TensorDataset(ROWS, LABELS), TensorDataset(OTHER_ROWS, LABELS), "tensors[0]"),
        (TensorDataset(ROWS, LABELS), TensorDataset(ROWS * 1.000001, LABELS), ""),
        ([Path("/a/1"), Path("/a/2")], [Path("/b/2"), Path("/b/1")], "entries"),
        (["b", "a"], ["b", "a"], ""),
    ],
)
def test_what_a_data_set_holds_for_each_example_is_compared(
    one: Any, other: Any, field: str
) -> None:
    found = compared(one, other)
    assert found.endswith(field)
    assert bool(found) == bool(field)


def test_arrays_are_compared_as_well() -> None:
    arrays = {"x": ROWS.numpy(), "y": LABELS.numpy()}
    digest = DataDigest(arrays, EXAMPLES).described()
    assert not difference(digest, DataDigest(arrays, EXAMPLES).described())
    arrays["y"] = arrays["y"][::-1]
    assert difference(digest, DataDigest(arrays, EXAMPLES).described()) == "['y']"


def examples_of(dataset: Any) -> dict[str, Any]:
    digest = DataDigest(dataset, len(dataset))
    source = LoaderSource(dataset, len(dataset), default_collate, 0, lambda _: None, pins=False)
    digest.read_examples(source)
    return digest.described()


def same(example: Any) -> Any:
    return example


def decoded_elsewhere(example: Any) -> Any:
    return {**example, "image": example["image"] + np.float32(1e-3)}


def of_another_file(example: Any) -> Any:
    return {**example, "image": example["image"][::-1].copy()}


def named_otherwise(example: Any) -> Any:
    return {**example, "name": f"other {example['name']}"}


def elsewhere(example: Any) -> Any:
    return {**example, "name": f"/mnt/{example['name']}"}


def augmented(example: Any) -> Any:
    return {**example, "image": example["image"] * random.random()}


def drawn(example: Any) -> Any:
    return {**example, "image": np.frombuffer(os.urandom(1000), np.uint8)}


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (same, False),
        (decoded_elsewhere, False),
        (of_another_file, True),
        (named_otherwise, True),
        (elsewhere, False),
        (augmented, True),  # seeded alike on all ranks, so this is another example
        (drawn, False),  # nothing is known of one that is another each time
    ],
)
def test_examples_are_compared_where_reading_one_twice_gives_the_same(
    change: Any, differs: bool
) -> None:
    first, second = Read(same), Read(change)
    found = difference(examples_of(first), examples_of(second))
    assert found == ("examples" if differs else "")
    assert first.reads == 0, "in a process of its own"


def test_a_data_set_whose_examples_cannot_be_read_is_compared_by_the_rest() -> None:
    one, other = (examples_of(Folder("/a", order)) for order in (ORDER, MIXED))
    assert difference(one, other) == "samples"
    assert one["examples"] == []


class Boxed(Folder):
    """Looks attributes up in a dict, as many wrappers do."""

    def __getattr__(self, name: str) -> Any:
        return dict[str, Any]()[name]


def test_a_data_set_may_raise_what_it_likes_for_unknown_attributes() -> None:
    data = Boxed("root", ORDER)
    assert attribute_of(data, "blocks") is None
    assert {"samples", "targets"} <= set(DataDigest(data, EXAMPLES).described())


def test_an_attribute_that_is_there_and_fails_is_no_missing_one() -> None:
    class Broken(Folder):
        @property
        def blocks(self) -> Any:
            raise KeyError("sizes")

    with pytest.raises(KeyError, match="sizes"):
        attribute_of(Broken("root", ORDER), "blocks")


class Shards(Folder):
    blocks = True


def test_shards_are_not_opened_before_training() -> None:
    assert "examples" not in examples_of(Shards("/a", ORDER))


class Held(Read):
    """Reads a file that it holds open, and asks over a connection and a pipe."""

    def __init__(self, file: Any, asking: socket.socket, pipe: int) -> None:
        super().__init__(same)
        self.file, self.asking, self.pipe = file, asking, pipe

    def __getitem__(self, index: int) -> Any:
        self.file.seek(index)
        found = self.file.read(1)
        with suppress(OSError):
            self.asking.sendall(found)
        os.write(self.pipe, found)
        return found


def test_reading_examples_leaves_files_and_connections_of_the_script_as_they_are(
    tmp_path: Path,
) -> None:
    """A child shares a file's place and what is on its way."""
    (tmp_path / "examples").write_bytes(bytes(range(EXAMPLES)))
    asking, answering = socket.socketpair()
    receive, send = os.pipe()
    with (tmp_path / "examples").open("rb", buffering=0) as file, asking, answering:
        held = Held(file, asking, send)
        assert held[7] == bytes([7])
        assert all(examples_of(held)["examples"])
        assert file.tell() == 8
        assert answering.recv(10) == bytes([7])
        assert os.read(receive, 10) == bytes([7])
    os.close(receive)
    os.close(send)


class Locked(Read):
    """Takes long, with a lock that processes share."""

    def __init__(self) -> None:
        super().__init__(same)
        self.lock = multiprocessing.Lock()

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            time.sleep(60)
        return index


def test_reading_that_takes_too_long_does_not_keep_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_digest, "_READ_S", 0.5)
    locked = Locked()
    assert "examples" not in examples_of(locked)
    assert locked.lock.acquire(timeout=LIMIT_S)
