"""A checkpoint with NaN never takes the place of one without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvd_elastic.checkpoint.manifests import (
    CheckpointInfo,
    complete_checkpoint,
    find_checkpoints,
    newest_valid,
)
from hvd_elastic.checkpoint.place import CheckpointStore
from hvd_elastic.checkpoint.shards import describe_shard, find_shards
from hvd_elastic.checkpoint.stream import has_not_finite
from tests.unit.checkpoint.test_files import Skipped, write


def put(folder: Path, step: int, *, finite: bool, keep: int = 2) -> CheckpointInfo:
    where = "" if finite else "model.weight"
    data = f"state after step {step}".encode()
    shards = [write(folder, step, 0, 2, data), write(folder, step, 1, 2, data, not_finite=where)]
    return complete_checkpoint(folder, shards, keep)


def steps(folder: Path) -> list[int]:
    return [info.step for info in find_checkpoints(folder)]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_single_number_that_is_not_finite_is_found(kind: str, value: float) -> None:
    numbers = np.linspace(-3, 3, 300_001).astype(kind)
    numbers[1] = np.finfo(kind).max
    numbers[2] = np.finfo(kind).smallest_subnormal
    data = numbers.view(np.uint8)
    assert not has_not_finite(kind, data)
    for place in (0, 123_456, 300_000):
        changed = numbers.copy()
        changed[place] = value
        assert has_not_finite(kind, changed.view(np.uint8))


def test_a_part_that_cuts_numbers_is_read_at_the_right_place() -> None:
    numbers = np.array([np.nan, 1.0, 2.0, np.inf], np.float64).view(np.uint8)
    assert not has_not_finite("float64", numbers[3:29], 3)
    assert has_not_finite("float64", numbers[3:], 3)
    assert has_not_finite("float64", numbers[:11])


def test_types_that_numpy_lacks_are_understood_and_integers_are_finite() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        kind = getattr(ml_dtypes, name)
        numbers = np.array([0.5, -2.0, float(ml_dtypes.finfo(kind).max)]).astype(kind)
        assert not has_not_finite(name, numbers.view(np.uint8))
        numbers[1] = np.nan
        assert has_not_finite(name, numbers.view(np.uint8))
    assert not has_not_finite("int32", np.full(9, -1, np.int32).view(np.uint8))


def test_checkpoints_with_nan_do_not_push_out_finite_ones(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        put(tmp_path, step, finite=True)
    for step in (40, 50, 60):
        put(tmp_path, step, finite=False)
    assert steps(tmp_path) == [60, 30, 20]
    assert {path.name[:17] for path in tmp_path.iterdir()} == {
        f"step-{step:012d}" for step in (20, 30, 60)
    }
    put(tmp_path, 70, finite=True)  # recovered
    assert steps(tmp_path) == [70, 30]


def test_the_newest_finite_checkpoint_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    put(tmp_path, 10, finite=True)
    put(tmp_path, 20, finite=False)
    skipped = Skipped()
    found = newest_valid(tmp_path, skipped)
    assert found is not None
    assert found.step == 10
    ((name, why),) = skipped
    assert name == "step-000000000020.json"
    assert "model.weight holds NaN" in why


def test_where_no_checkpoint_is_finite_the_newest_is_taken(tmp_path: Path) -> None:
    put(tmp_path, 20, finite=False)
    found = newest_valid(tmp_path, Skipped())
    assert found is not None
    assert found.not_finite == "model.weight"


def test_at_a_url_finite_checkpoints_stay_and_are_taken(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://finite-{tmp_path.name}"
    store = CheckpointStore("r", tmp_path / "first", url, keep=2, resumed=False)
    for step, finite in ((10, True), (20, True), (30, False), (40, False)):
        store.upload(put(tmp_path / "first", step, finite=finite), lambda: None)
    assert store.url is not None
    assert [info.step for info in store.url.find(Path())] == [40, 20, 10]
    said: list[str] = []
    elsewhere = CheckpointStore("r", tmp_path / "second", url, keep=2, resumed=True)
    found = elsewhere.newest(said.append)
    assert found is not None
    assert found.step == 20
    assert any("step-000000000040" in text and "not finite" in text for text in said)


def test_a_spool_keeps_its_newest_finite_shard(tmp_path: Path) -> None:
    for step in range(10, 70, 10):
        where = "" if step < 30 else "model.weight"
        describe_shard(write(tmp_path, step, 0, 1, b"data", not_finite=where), keep=2)
    assert 20 in [shard.step for shard in find_shards(tmp_path)]
    assert 10 not in [shard.step for shard in find_shards(tmp_path)]
