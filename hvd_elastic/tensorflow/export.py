"""Exports a model of Keras for programs that have neither its class nor this package."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow.variables import is_model
from hvd_elastic.training.export import compare_outputs, tried

_ENDING = ".savedmodel.zip"


def exported(model: Any, example: Any, name: str) -> Callable[[Path], Any]:
    """See :meth:`Frontend.exported`."""
    if not name.endswith(_ENDING) or not is_model(model):
        raise ScriptError(
            f"hvd.export(..., {name!r}): a {type(model).__name__} is exported under a name that "
            f"ends in {_ENDING}, and has to be a model of Keras. For its weights, or a .keras "
            "file, use hvd.save"
        )

    def make(temporary: Path) -> Any:
        folder = temporary / name.removesuffix(_ENDING)
        inputs = tf.nest.map_structure(tf.convert_to_tensor, example)

        def serve() -> Any:
            model.export(folder, verbose=False)
            loaded = tf.saved_model.load(folder)  # its variables live as long as it does
            return loaded.serve(inputs)

        expected, found = model(inputs, training=False), tried(name, serve)
        compare_outputs(name, tf.nest.flatten(expected), tf.nest.flatten(found))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(folder.rglob("*")):
                archive.write(path, path.relative_to(temporary))
        return buffer.getbuffer()

    return make
