"""Saves files from training, and loads what was saved into a model for inference."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hvd_elastic.checkpoint.reader import load_file
from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.tensorflow.content import TensorFlowContent, load_checkpoint, new_array
from hvd_elastic.tensorflow.variables import LiveVariable, assign, has_variables, variables_of
from hvd_elastic.training import context
from hvd_elastic.training.model_source import another_model, find_source, mismatches
from hvd_elastic.training.saving import save_file
from hvd_elastic.training.shared_weights import load_on_ranks

Model = TypeVar("Model", bound=Any)
_MODEL = "model"
"""Usual name of the model in the State, and in a saved dict."""
_OF_KERAS = {".keras": "save", ".weights.h5": "save_weights"}
"""Endings of files in formats of Keras, with the method of a model that writes them."""
_NUMBER = re.compile(r"_\d+(?=\.|$)")
"""What Keras adds to the name of a layer if the process has made one of its kind before."""


def save(name: str, obj: Any) -> None:
    """Save an object in the folder of the run, whichever host rank 0 is on.

    Rank 0's object is saved; on other ranks the call does nothing, so it may be made on all ranks
    or on rank 0 alone. When it returns, the file is complete on the disk of rank 0's host; it is
    then brought to the leader while training continues. A later file of the same name replaces it;
    until the new one is complete, the earlier one stays.

    Args:
        name: name of the file, up to 100 letters, digits and ``. _ -``. A model goes into
            ``best.keras`` as ``model.save`` writes it, into ``best.weights.h5`` as
            ``model.save_weights`` does, and into any other name as a dict does.
        obj: a model of Keras, a ``tf.Module``, a variable; or nested dicts and lists of these,
            arrays and plain values, written in the format of safetensors.

    Raises:
        ScriptError: the name is not valid, or the object cannot be saved.
        CheckpointError: the file cannot be written on this host, because the disk is full, for
            example; an earlier one is untouched.
    """

    def write(file: HashingWriter) -> None:
        method = next((how for end, how in _OF_KERAS.items() if name.endswith(end)), None)
        if method is None:
            whole = {_MODEL: obj} if has_variables(obj) else obj
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

    save_file(context.current().worker, name, write)


def load_model(
    source: str | Path, model: Model, *, name: str = _MODEL, share: bool = False
) -> Model:
    """Load trained weights into a model for inference; works in any process, without ``init()``.

    Args:
        source: where the weights are:

            - a run, by its id or the path of its folder: its newest valid checkpoint;
            - a folder of checkpoints (``--checkpoint-dir``): the newest valid one;
            - the manifest of a checkpoint, ``step-….json``;
            - a file of :func:`save`, or one that Keras wrote.
        model: model that is built, whose variables are set.
        name: name of the model in the ``State`` of the training script, or in the saved dict.
        share: all ranks call it, in the function under ``hvd.run``; one whose host has the weights
            sends them to the others.

    Returns:
        ``model``.

    Raises:
        CheckpointError: there is nothing to load, it is damaged, it is of another model, or
            ``model`` is not built; then ``model`` is unchanged.
    """
    if share:

        def send(communicator: Any, root: int) -> None:
            live = [LiveVariable(variable) for variable in variables_of(model).values()]
            values = [variable.copy() for variable in live]
            communicator.broadcast(values, root)
            for variable, value in zip(live, values, strict=True):
                variable.set(value)

        load_on_ranks(source, lambda path: load_model(path, model, name=name), send)
        return model
    path = find_source(source)
    own = variables_of(model)
    if not own:
        raise CheckpointError(
            f"this {type(model).__name__} has no variables that {path} could be loaded into: build "
            "it first, with its input shape (keras.Input) or model.build(shape)"
        )
    if path.name.endswith((*_OF_KERAS, ".h5")):
        _load_weights(model, own, path)
        return model
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
    return model


def _load_weights(model: Any, own: Mapping[str, Any], path: Path) -> None:
    """Have Keras load a file; undo what it has loaded of one that does not fit."""
    before = {key: LiveVariable(variable).view() for key, variable in own.items()}
    try:
        model.load_weights(path)
    except Exception as error:  # Keras and HDF5 raise many kinds
        assign(own, before)
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
