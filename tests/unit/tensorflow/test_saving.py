"""hvd.save without a leader, and load_model from everything that holds weights."""

from __future__ import annotations

from tests.paths import skip_module_without_tensorflow

skip_module_without_tensorflow()

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_elastic.tensorflow as hvd
from hvd_elastic.checkpoint.manifests import find_checkpoints
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.script.saving import save_again
from hvd_elastic.worker.context import Context
from tests.unit.tensorflow.test_state import state_of, write

pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning:keras")
"""Keras reads variables in a way that NumPy will no longer have."""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def model_of(width: int = 3) -> keras.Model:
    """A model whose layers Keras numbers anew in each call."""
    layers = [keras.layers.Dense(width), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((2,)), *layers])


def equal(one: keras.Model, other: keras.Model) -> bool:
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return all(np.array_equal(*pair) for pair in pairs)


def saved(context: Context, name: str) -> Path:
    return Path(context.worker.sink.saved_folder) / name


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("best.keras", lambda model: model),
        ("best.weights.h5", lambda model: model),
        ("best", lambda model: model),
        ("best.safetensors", lambda model: {"model": model, "epoch": 3, "seen": [np.arange(2)]}),
    ],
)
def test_what_is_saved_is_loaded(alone: Context, name: str, wrapped: Callable[[Any], Any]) -> None:
    model = model_of()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    hvd.save(name, wrapped(model))
    other = model_of()
    assert not equal(model, other)
    assert hvd.load_model(saved(alone, name), other) is other
    assert equal(model, other)


@pytest.mark.parametrize("again", [True, False])
def test_another_rank_0_saves_what_was_called_for(alone: Context, again: bool) -> None:
    model, ranks = model_of(), vars(alone.worker.communicator)
    alone.worker.saves.again = {} if again else None
    ranks["rank"] = 1
    hvd.save("best", model)
    assert not saved(alone, "best").exists()
    ranks["rank"] = 0
    save_again(alone.worker)
    assert saved(alone, "best").exists() == again
    if again:
        assert equal(hvd.load_model(saved(alone, "best"), model_of()), model)


def test_keras_alone_loads_what_is_saved_as_its_own(alone: Context) -> None:
    model = model_of()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.25)), "mse")
    hvd.save("whole.keras", model)
    loaded = keras.saving.load_model(saved(alone, "whole.keras"))
    assert equal(model, loaded)
    assert type(loaded.optimizer) is keras.optimizers.SGD


def test_weights_of_a_checkpoint_and_of_a_module_are_loaded(alone: Context, tmp_path: Path) -> None:
    state = state_of()
    before = state.model.get_weights()
    path = write(state, alone, tmp_path)
    hvd.load_model(path, state.model)
    for here, there in zip(state.model.get_weights(), before, strict=True):
        assert np.array_equal(here, there)
    module = tf.Module()
    module.table = tf.Variable([1.0, 2.0], dtype=tf.bfloat16, name="table")
    hvd.save("module", module)
    module.table.assign([0.0, 0.0])
    hvd.load_model(saved(alone, "module"), module)
    assert module.table.numpy().astype(float).tolist() == [1.0, 2.0]


def test_a_newest_checkpoint_that_is_not_finite_is_skipped(
    alone: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of()
    before = state.model.get_weights()
    finite = write(state, alone, tmp_path)
    alone.worker.progress.step = 9
    kernel = state.model.weights[0]
    kernel.assign(kernel * np.nan)
    assert write(state, alone, tmp_path) == finite
    assert len(find_checkpoints(tmp_path)) == 2
    hvd.load_model(tmp_path, state.model)
    for here, there in zip(state.model.get_weights(), before, strict=True):
        assert np.array_equal(here, there)
    assert "holds NaN or infinity" in caplog.text


@pytest.mark.parametrize("name", ["best.keras", "best.weights.h5", "best"])
def test_another_model_is_refused_and_left_as_it_was(alone: Context, name: str) -> None:
    hvd.save(name, model_of())
    other = model_of(5)
    before = other.get_weights()
    with pytest.raises(CheckpointError, match="another model"):
        hvd.load_model(saved(alone, name), other)
    for here, there in zip(other.get_weights(), before, strict=True):
        assert np.array_equal(here, there)


@pytest.mark.parametrize("name", ["best.keras", "best.weights.h5", "best"])
def test_a_damaged_file_is_named(alone: Context, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for content in (b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name} cannot be loaded"):
            hvd.load_model(path, model_of())


def test_bad_names_and_objects_are_named(alone: Context) -> None:
    with pytest.raises(ScriptError, match="not a valid name"):
        hvd.save("a/b", model_of())
    with pytest.raises(ScriptError, match="for a model of Keras"):
        hvd.save("best.keras", {"model": model_of()})
    with pytest.raises(ScriptError, match="cannot be put into a checkpoint"):
        hvd.save("best", {"what": object()})
    hvd.save("best", model_of())
    with pytest.raises(CheckpointError, match="build it first"):
        hvd.load_model(saved(alone, "best"), keras.Sequential([keras.layers.Dense(1)]))
    assert [path.name for path in saved(alone, "").glob("[!.]*")] == ["best"]
