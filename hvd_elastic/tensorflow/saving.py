"""Writes the files that a script saves or exports, and loads weights for inference."""

from __future__ import annotations

import io
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvd_elastic.checkpoint.reader import load_file
from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.script.export import compare_outputs, tried
from hvd_elastic.script.model_loading import ModelLoader
from hvd_elastic.script.model_source import another_model, mismatches
from hvd_elastic.tensorflow.content import TensorFlowContent, load_checkpoint, new_array
from hvd_elastic.tensorflow.variables import (
    LiveVariable,
    assign,
    has_variables,
    keep_values,
    variables_of,
)

_OF_KERAS = {".keras": "save", ".weights.h5": "save_weights"}
"""Endings of files in formats of Keras, with the method of a model that writes them."""
_SAVED_MODEL = ".savedmodel.zip"
_NUMBER = re.compile(r"_\d+(?=\.|$)")
"""What Keras adds to the name of a layer if the process has made one of its kind before."""


def write_object(name: str, obj: Any, file: HashingWriter) -> None:
    """See :meth:`Frontend.write_object`."""
    method = next((how for end, how in _OF_KERAS.items() if name.endswith(end)), None)
    if method is None:
        whole = {"model": obj} if has_variables(obj) else obj
        content = TensorFlowContent({"saved": _values(whole)}, ())
        content.values = content.values["saved"]
        for part in content.head({}, 1):
            file.write(part)
        return
    if not hasattr(obj, method):
        raise ScriptError(
            f"hvd.save({name!r}): a {type(obj).__name__} cannot be saved under this name, "
            "which is for a model of Keras; give it the model, or save under a name that ends "
            "in .safetensors"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        getattr(obj, method)(path)
        with path.open("rb") as written:
            shutil.copyfileobj(written, file)


class _Loader(ModelLoader):
    """Sets the variables of models that are built."""

    def tensors(self, model: Any) -> list[LiveVariable]:
        return [*map(LiveVariable, variables_of(model).values())]

    def fill(self, model: Any, path: Path, name: str) -> None:
        own = variables_of(model)
        if not own:
            raise CheckpointError(
                f"this {type(model).__name__} has no variables that {path} could be loaded into: "
                "build it first, with its input shape (keras.Input) or model.build(shape)"
            )
        if path.name.endswith((*_OF_KERAS, ".h5")):
            _load_weights(model, own, path)
            return
        if path.suffix == ".json":
            found = load_checkpoint(path, name)
        else:
            found = load_file(path, new_array)
            found = found.get(name, found) if isinstance(found, Mapping) else {}
        if [_NUMBER.sub("", key) for key in own] == [_NUMBER.sub("", key) for key in found]:
            found = dict(zip(own, found.values(), strict=True))
        wrong = mismatches(own, found)
        if wrong:
            raise another_model(path, wrong)
        assign(own, found)


load_model = _Loader().load_model


def _load_weights(model: Any, own: Mapping[str, Any], path: Path) -> None:
    """Have Keras load a file; undo what it has loaded of one that does not fit."""
    restore = keep_values(own.values())
    try:
        model.load_weights(path)
    except Exception as error:  # Keras and HDF5 raise many kinds
        restore()
        said = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be loaded into this {type(model).__name__}, it is damaged or of "
            f"another model: {said}"
        ) from error


def _values(value: Any) -> Any:
    """Return a value with the variables of each object in its place."""
    if has_variables(value):
        return variables_of(value)
    if isinstance(value, Mapping):
        return {key: _values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_values, value)]
    return value


def exported(model: Any, example: Any, name: str) -> Callable[[Path], Any]:
    """See :meth:`Frontend.exported`."""
    if not name.endswith(_SAVED_MODEL) or not isinstance(model, keras.Model):
        raise ScriptError(
            f"hvd.export(..., {name!r}): a {type(model).__name__} is exported under a name that "
            f"ends in {_SAVED_MODEL}, and has to be a model of Keras. For its weights, or a .keras "
            "file, use hvd.save"
        )

    def make(temporary: Path) -> Any:
        folder = temporary / name.removesuffix(_SAVED_MODEL)
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
