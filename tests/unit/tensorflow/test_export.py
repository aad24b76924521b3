"""``hvd.export``: a SavedModel runs by itself, and gives the outputs of the live model."""

from __future__ import annotations

from tests.paths import skip_module_without_tensorflow

skip_module_without_tensorflow()

import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow import export
from hvd_elastic.worker.context import Context


def test_saved_model(alone: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    example = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    export(model, example, "net.savedmodel.zip")
    with zipfile.ZipFile("saved/net.savedmodel.zip") as archive:
        archive.extractall()
    loaded = tf.saved_model.load("net")
    found = loaded.serve(tf.zeros((5, 3)) + example[0])
    np.testing.assert_allclose(found[4], model(example)[0], rtol=1e-5)
    with pytest.raises(ScriptError, match=r"ends in \.savedmodel\.zip"):
        export(model, example, "net.onnx")
