"""Exports a model, checked against the live one, for every frontend: ``hvd.export``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hvd_elastic.errors import ScriptError
from hvd_elastic.script.saving import save_file
from hvd_elastic.worker import context

_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
"""How far outputs may differ from those of the live model, relative to the largest of them, and
absolutely: other kernels add in another order, in float32."""
Result = TypeVar("Result")


def export(model: Any, example: Any, name: str) -> None:
    """Save a model with its code in the folder of the run, checked against the live model.

    Rank 0 exports, as ``hvd.save`` saves; on other ranks the call does nothing. The file is read
    back, and its outputs for ``example`` are compared with those of the model, before it counts as
    saved.

    Args:
        model: module of PyTorch, which is exported on the CPU and in evaluation mode, and stays as
            it is; or model of Keras that is built.
        example: inputs of the model. With PyTorch a tensor, or a tuple of tensors; with two rows or
            more, the first dimension of all inputs may have any size in the exported model. With
            Keras an array, or a list or dict of arrays.
        name: name of the file. With PyTorch ``….pt2`` for ``torch.export`` (read by
            ``torch.export.load``), or ``….onnx`` for ONNX, which needs onnx, onnxscript and
            onnxruntime. With Keras ``….savedmodel.zip``: the folder of a SavedModel, which
            ``tf.saved_model.load`` and TensorFlow Serving read once it is unpacked.

    Raises:
        ScriptError: the name has another ending; the format cannot hold the model; a package is
            missing; or the outputs of the exported model differ.
        CheckpointError: the file cannot be written on this host.
    """
    worker = context.current().worker
    exported = worker.frontend.exported(model, example, name)
    worker.check_has_ranks(f"whether this rank writes {name!r}")
    if worker.rank:
        return
    with tempfile.TemporaryDirectory() as folder:
        content = exported(Path(folder))
    save_file(worker, name, lambda file: file.write(content))


def tried(name: str, call: Callable[[], Result], advice: str = "") -> Result:
    """Return the result of a call; raise ScriptError, with advice, if it fails."""
    try:
        return call()
    except ScriptError:
        raise
    except Exception as error:  # frameworks raise many kinds
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ScriptError(f"hvd.export: {name} cannot hold this model: {said}{advice}") from error


def compare_outputs(name: str, expected: Sequence[Any], found: Sequence[Any]) -> None:
    """Raise ScriptError if outputs, given as arrays, are not those of the live model."""
    ours, theirs = ([np.asarray(each, np.float64) for each in some] for some in (expected, found))
    if [each.shape for each in ours] != [each.shape for each in theirs]:
        raise ScriptError(
            f"hvd.export: {name} gives outputs of the shapes {[each.shape for each in theirs]}, "
            f"and the model {[each.shape for each in ours]}; it was not saved"
        )
    for own, other in zip(ours, theirs, strict=True):
        apart = np.abs(own - other).max(initial=0)
        limit = _ABSOLUTE + _RELATIVE * np.abs(own).max(initial=0)
        if not apart <= limit:
            raise ScriptError(
                f"hvd.export: outputs of {name} differ from the model's by {apart:.3g}, "
                f"more than {limit:.3g}; it was not saved. Layers that draw random numbers in "
                "evaluation mode do that"
            )
