"""Every byte of a stream is written by one rank and read back, whatever framework wrote it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_elastic.checkpoint import stream
from hvd_elastic.checkpoint.header import TensorInfo, decode_values, encode_values
from hvd_elastic.checkpoint.manifests import CheckpointInfo, complete_checkpoint
from hvd_elastic.checkpoint.reader import load_arrays, read_header
from hvd_elastic.checkpoint.stream import Content, byte_range, new_shard, shard_count, shard_index
from hvd_elastic.errors import CheckpointError
from tests.paths import LIMIT_S
from tests.unit.checkpoint.written import Told


class Position:
    step, epoch, examples = 7, 1, 700

    def as_state(self) -> dict[str, int]:
        return {"step": 7, "epoch": 1, "examples": 700, "position": 30}


class Arrays(Content):
    """A frontend whose tensors are NumPy arrays."""

    frontend = "numpy"

    def __init__(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        super().__init__()
        self.arrays = list(arrays.values())
        self.stream = [
            TensorInfo(name, str(array.dtype), array.shape, array.nbytes)
            for name, array in arrays.items()
        ]
        self.values = {"rate": 0.1}

    def encode_opaque(self) -> bytes:
        return b"only numpy knows"

    def begin_copy(
        self, begin: int, end: int, target: Any, lasting: set[int]
    ) -> Callable[[], str | None]:
        whole = b"".join(array.tobytes() for array in self.arrays)
        target[:] = np.frombuffer(whole[begin:end], np.uint8)
        return lambda: None


def write(folder: Path, arrays: dict[str, np.ndarray[Any, Any]], size: int = 1) -> CheckpointInfo:
    """As ``size`` ranks would write them."""
    told = Told()
    for rank in range(size):
        told.write(folder, Arrays(arrays), Position(), rank=rank, size=size)
    return complete_checkpoint(folder, told.done, 1)


@given(
    total=st.integers(0, 1 << 45), size=st.integers(1, 4096), least=st.sampled_from([1, 16 << 20])
)
def test_every_byte_is_written_by_one_rank(total: int, size: int, least: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "SHARD_BYTES", least)
        count = shard_count(total, size)
    writing = [shard_index(rank, size, count) for rank in range(size)]
    assert writing[0] == 0, "rank 0 writes the header"
    assert [index for index in writing if index is not None] == [*range(count)]
    ranges = [byte_range(index, count, total) for index in range(count)]
    assert (ranges[0][0], ranges[-1][1]) == (0, total)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert max(e - b for b, e in ranges) <= total / count + 128


@pytest.mark.parametrize("size", [1, 5])
def test_any_framework_is_read_with_numpy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 1)
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "weight": rng.random((30, 20), np.float32),
        "empty": np.empty((0, 3), np.float64),
        "step": np.array(3),
        "flags": rng.random(7) > 0.5,
        "waves": rng.random(5) * 1j,
    }
    info = write(tmp_path, arrays, size)
    header = read_header(info.path)
    assert (header.frontend, header.world) == ("numpy", size)
    assert header.progress == Position().as_state()
    found = load_arrays(info.path)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


def test_shards_without_a_wanted_tensor_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 1)
    arrays = {f"w{i}": np.full(50, float(i)) for i in range(12)}
    info = write(tmp_path, arrays, 4)
    damaged = info.shards[2].path
    damaged.write_bytes(bytes(info.shards[2].bytes))
    for names in (["w0"], ["w11", "w4"], []):
        found = load_arrays(info.path, names)
        assert {name: array[0] for name, array in found.items()} == {
            name: arrays[name][0] for name in names
        }
    for damaged_too in (["w7"], None):
        with pytest.raises(CheckpointError, match=f"{damaged.name} is corrupted"):
            load_arrays(info.path, damaged_too)
    with pytest.raises(CheckpointError, match="has no tensor 'v'"):
        load_arrays(info.path, ["v"])


def test_no_memory_for_the_copy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr(Arrays, "make_buffer", refuse)
    told = Told()
    writer = told.writer(tmp_path)
    content = Arrays({"w": np.ones(4)})
    shard = new_shard(content, Position(), 0, 1)
    assert shard is not None
    writer.start_shard(content, Position(), shard, set(), 0.0)
    writer.prepare(content, 32)
    assert writer.flush(LIMIT_S)
    said = "there is no memory for a copy of 32 bytes (Unable to allocate)"
    assert [said in str(error) for error in told.errors] == [True, True]


def types_of(value: Any) -> Any:
    """``1 == True == 1.0``, so equal values may have become others."""
    if isinstance(value, dict):
        return [(types_of(key), types_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(item) for item in value]
    return type(value)


KEYS = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False)),
    *(st.text(), st.binary(), st.complex_numbers(allow_nan=False), st.sets(st.integers())),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        *(st.lists(inner), st.tuples(inner, inner), st.dictionaries(KEYS, inner)),
        st.dictionaries(st.sampled_from(["$tensor", "$", "a"]), inner),
    ),
    max_leaves=10,
)


@given(value=VALUES)
@settings(deadline=None)
def test_plain_values_are_json_and_come_back(value: Any) -> None:
    encoded = encode_values(value, lambda *_: NotImplemented)
    text = json.dumps(encoded, allow_nan=False)
    found = decode_values(json.loads(text), {}, ())
    assert found == value
    assert types_of(found) == types_of(value)


@pytest.mark.parametrize(
    "encoded", [{"$new": 1}, {"$tensor": "w"}, {"$opaque": 0}, {"$dict": [[[], 1]]}, {"$int": 3}]
)
def test_values_that_make_no_sense_are_errors(encoded: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        decode_values(encoded, {}, ())
