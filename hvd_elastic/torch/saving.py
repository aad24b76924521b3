"""Saves files from training, and loads what was saved into a model for inference."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.torch.checkpoint import load_object
from hvd_elastic.training import context
from hvd_elastic.training.model_source import find_source
from hvd_elastic.training.saving import save_file

Model = TypeVar("Model", bound=torch.nn.Module)
_NAMED = 5
"""Most keys that an error lists."""
_COMPILED = "_orig_mod."
"""What ``torch.compile`` adds to the keys of a module."""


def save(name: str, obj: Any) -> None:
    """Save an object in the folder of the run, as ``torch.save`` does, whichever host rank 0 is on.

    Rank 0's object is saved; on other ranks the call does nothing, so it may be made on all ranks
    or on rank 0 alone. When it returns, the file is complete on the disk of rank 0's host; it is
    then brought to the leader while training continues. A later file of the same name replaces it;
    until the new one is complete, the earlier one stays.

    Args:
        name: name of the file, such as ``best.pt``: up to 100 letters, digits and ``. _ -``.
        obj: anything that ``torch.save`` can save. :func:`load_model` reads a ``state_dict()``, or
            a dict that has one under ``"model"``.

    Raises:
        ScriptError: the name is not valid, or the object cannot be pickled.
        CheckpointError: the file cannot be written on this host, because the disk is full, for
            example; an earlier one is untouched.
    """

    def write(file: HashingWriter) -> None:
        try:
            torch.save(obj, file)  # type: ignore[arg-type]  # write() and flush() are enough
        except RuntimeError as error:
            # PyTorch fails once more while it handles an error of the file.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            raise ScriptError(
                f"hvd.save({name!r}): the {type(obj).__name__} cannot be saved: {error}. Save "
                "tensors and plain values, such as model.state_dict()"
            ) from error

    save_file(context.current().worker, name, write)


def load_model(source: str | Path, model: Model, *, name: str = "model") -> Model:
    """Load trained weights into a model for inference; works in any process, without ``init()``.

    Args:
        source: where the weights are:

            - a run, by its id or the path of its folder: its newest valid checkpoint;
            - a folder of checkpoints (``--checkpoint-dir``): the newest valid one;
            - the manifest of a checkpoint, ``step-….json``;
            - a file of :func:`save` or ``torch.save``: a ``state_dict()``, or a dict with one
              under ``name``.
        model: module whose parameters and buffers are replaced, on the devices where they are.
        name: name of the model in the ``State`` of the training script, or in the saved dict.

    Returns:
        ``model``, in evaluation mode (``model.eval()``).

    Raises:
        CheckpointError: there is nothing to load, it is damaged, or it is of another model; then
            ``model`` is unchanged.
    """
    path = find_source(source)
    state = load_object(path, name) if path.suffix == ".json" else _load_file(path, name)
    _fill(model, state, path)
    return model.eval()


def _load_file(path: Path, name: str) -> Any:
    """Return the ``state_dict`` in a file of ``torch.save``; no code of the file is run."""
    try:
        found = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} cannot be loaded: it is not a file of torch.save, or it holds objects whose "
            f"loading would run code. Save model.state_dict() alone. ({_first_line(error)})"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be loaded, it is damaged or not a file of torch.save: "
            f"{_first_line(error)}"
        ) from error
    if isinstance(found, Mapping):
        inner = found.get(name)
        return inner if isinstance(inner, Mapping) else found
    raise CheckpointError(
        f"{path} holds a {type(found).__name__}; load_model reads a state_dict(), or a dict with "
        f"one under {name!r}"
    )


def _fill(model: torch.nn.Module, state: Mapping[str, Any], path: Path) -> None:
    """Load ``state`` into a model, if keys and shapes are the same."""
    own = {key.replace(_COMPILED, ""): key for key in model.state_dict()}
    given = {str(key).replace(_COMPILED, ""): value for key, value in state.items()}
    wrong = []
    missing, unexpected = own.keys() - given.keys(), given.keys() - own.keys()
    for what, keys in (("missing keys", missing), ("unexpected keys", unexpected)):
        if keys:
            named = ", ".join(sorted(keys)[:_NAMED])
            more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
            wrong.append(f"{what}: {named}{more}")
    if not wrong:
        there = model.state_dict()
        for key, full in own.items():
            mine, value = there[full], given[key]
            if isinstance(mine, torch.Tensor) and mine.shape != getattr(value, "shape", None):
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
                wrong.append(f"{key} has shape {shape} there, {tuple(mine.shape)} in the model")
    if wrong:
        raise CheckpointError(
            f"{path} is of another model: {'; '.join(wrong[:_NAMED])}. Create the model as the "
            "training script does; name= chooses another object of its State"
        )
    model.load_state_dict({own[key]: value for key, value in given.items()})


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
