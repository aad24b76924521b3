"""Exports a model of Keras for programs that have neither its class nor this package."""

from __future__ import annotations

import io
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow.variables import is_model
from hvd_elastic.training import context
from hvd_elastic.training.saving import save_file

_ENDING = ".savedmodel.zip"
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
"""How far outputs may differ from those of the live model, relative to the largest of them, and
absolutely."""


def export(model: Any, example: Any, name: str) -> None:
    """Save a model with its graph in the folder of the run, checked against the live model.

    Rank 0 exports, as :func:`hvd_elastic.tensorflow.save` saves; on other ranks the call does
    nothing. The SavedModel is read back, and its outputs for ``example`` are compared with those of
    the model, before it counts as saved.

    Args:
        model: model of Keras that is built.
        example: inputs of the model: an array, or a list or dict of arrays.
        name: name of the file, ``….savedmodel.zip``: the folder of a SavedModel, which
            ``tf.saved_model.load`` and TensorFlow Serving read once it is unpacked.

    Raises:
        ScriptError: the name has another ending, SavedModel cannot hold the model, or the outputs
            of the exported model differ.
        CheckpointError: the file cannot be written on this host.
    """
    if not name.endswith(_ENDING) or not is_model(model):
        raise ScriptError(
            f"hvd.export(..., {name!r}): a {type(model).__name__} is exported under a name that "
            f"ends in {_ENDING}, and has to be a model of Keras. For its weights, or a .keras "
            "file, use hvd.save"
        )
    worker = context.current().worker
    worker.check_has_ranks(f"whether this rank writes {name!r}")
    if worker.communicator.rank:
        return
    inputs = tf.nest.map_structure(tf.convert_to_tensor, example)
    expected = tf.nest.flatten(model(inputs, training=False))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, name.removesuffix(_ENDING))
        try:
            model.export(folder, verbose=False)
            loaded = tf.saved_model.load(folder)  # its variables live as long as it does
            found = tf.nest.flatten(loaded.serve(inputs))
        except Exception as error:  # Keras and TensorFlow raise many kinds
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ScriptError(f"hvd.export: {name} cannot hold this model: {said}") from error
        for own, other in zip(expected, found, strict=True):
            ours, theirs = np.asarray(own, np.float64), np.asarray(other, np.float64)
            limit = _ABSOLUTE + _RELATIVE * float(np.abs(ours).max(initial=0))
            if ours.shape != theirs.shape or not np.abs(ours - theirs).max(initial=0) <= limit:
                raise ScriptError(
                    f"hvd.export: outputs of {name} differ from those of the model; it was not "
                    "saved. Layers that draw random numbers in evaluation do that"
                )
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(folder.rglob("*")):
                archive.write(path, path.relative_to(temporary))

    def write(file: HashingWriter) -> None:
        file.write(buffer.getbuffer())

    save_file(worker, name, write)
