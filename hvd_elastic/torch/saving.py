"""Saves files from training, and loads what was saved into a model for inference."""

from __future__ import annotations

import copy
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.torch.checkpoint import load_object
from hvd_elastic.training import context
from hvd_elastic.training.model_source import another_model, find_source, mismatches
from hvd_elastic.training.saving import save_file
from hvd_elastic.training.shared_weights import load_on_ranks

Model = TypeVar("Model", bound=torch.nn.Module)
_NAMED = 5
"""Most keys that an error lists."""
_COMPILED = "_orig_mod."
"""What ``torch.compile`` adds to the keys of a module."""
_PARALLEL = "module."
"""What DistributedDataParallel and DataParallel add to all keys of a module."""
_MODEL = "model"
"""Usual name of the model in the State, and of its ``state_dict()`` in a saved dict."""
_STATE_KEYS = ("state_dict", "model_state_dict")
"""Where files of other programs have it."""


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


def load_model(
    source: str | Path, model: Model, *, name: str = _MODEL, share: bool = False
) -> Model:
    """Load trained weights into a model for inference; works in any process, without ``init()``.

    Args:
        source: where the weights are:

            - a run, by its id or the path of its folder: its newest valid checkpoint;
            - a folder of checkpoints (``--checkpoint-dir``): the newest valid one;
            - the manifest of a checkpoint, ``step-….json``;
            - a file of :func:`save` or ``torch.save``: a ``state_dict()``, or a dict with one
              under ``name``; for ``"model"`` also ``"state_dict"`` or ``"model_state_dict"``.

            Prefixes that DDP (``module.``) or ``torch.compile`` add to keys do not matter.
        model: module whose parameters and buffers are replaced, on the devices where they are.
            Its own hooks of ``load_state_dict`` may rename keys.
        name: name of the model in the ``State`` of the training script, or in the saved dict.
        share: all ranks call it, in the function under ``hvd.run``; one whose host has the weights
            sends them to the others.

    Returns:
        ``model``, in evaluation mode (``model.eval()``).

    Raises:
        CheckpointError: there is nothing to load, it is damaged, it is of another model, or
            ``model`` is on the meta device; then ``model`` is unchanged.
    """
    if share:

        def send(communicator: Any, root: int) -> None:
            tensors = [*model.parameters(), *model.buffers()]
            communicator.broadcast([tensor.detach() for tensor in tensors], root)

        load_on_ranks(source, lambda path: load_model(path, model, name=name), send)
        return model.eval()
    path = find_source(source)
    state = load_object(path, name) if path.suffix == ".json" else load_state(path, name)
    _fill(model, state, path)
    return model.eval()


def load_state(path: Path, name: str) -> Mapping[str, Any]:
    """Return the ``state_dict`` in a file of ``torch.save``; no code of the file is run.

    Args:
        path: path of the file.
        name: name of the model in a dict that holds several.

    Raises:
        CheckpointError: it is no such file, or holds none.
    """
    try:
        found = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise CheckpointError(_why_refused(path, str(error))) from error
    # PyTorch reads a file that is none of its own as one, and so may raise anything.
    except Exception as error:
        said = f": {_first_line(error)}" if isinstance(error, (RuntimeError, OSError)) else ""
        raise CheckpointError(
            f"{path} cannot be loaded, it is damaged or not a file of torch.save{said}"
        ) from error
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(found).__name__}; load_model reads a state_dict(), or a dict "
            f"with one under {name!r}"
        )
    for key in (name, *(_STATE_KEYS if name == _MODEL else ())):
        inner = found.get(key)
        if isinstance(inner, Mapping):
            return inner
    inside = [str(key) for key, value in found.items() if isinstance(value, Mapping)]
    if inside and not any(isinstance(value, torch.Tensor) for value in found.values()):
        raise CheckpointError(
            f"{path} holds no {name!r}; it holds {', '.join(inside[:_NAMED])}: choose one with "
            f"load_model(..., name={inside[0]!r})"
        )
    return found


def _why_refused(path: Path, said: str) -> str:
    """Return why a file is not loaded, from the message of PyTorch's restricted unpickler."""
    refused = re.search(r"Unsupported (?:global|class|operand): (?:GLOBAL )?([\w.]+)", said)
    if refused is None:
        return f"{path} cannot be loaded: it is not a file of torch.save, or it is damaged"
    return (
        f"{path} cannot be loaded: it holds a {refused[1]}, whose loading would run code, as that "
        "of a whole module saved by torch.save(model) does. Save model.state_dict() alone; if you "
        "trust the file, get it from torch.load(path, weights_only=False)"
    )


def _plain(keys: Iterable[str]) -> dict[str, str]:
    """Return the keys without what ``torch.compile`` and DDP add, each with its full key."""
    plain = {key.replace(_COMPILED, ""): key for key in keys}
    if plain and all(key.startswith(_PARALLEL) for key in plain):
        return {key.removeprefix(_PARALLEL): full for key, full in plain.items()}
    return plain


def _fill(model: torch.nn.Module, state: Mapping[str, Any], path: Path) -> None:
    """Load ``state`` into a model, if keys and shapes are the same."""
    there = model.state_dict()
    for key, tensor in there.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise CheckpointError(
                f"{key} of the model is on the meta device, where it has no memory for what is "
                "loaded: call model.to_empty(device=...) first, or create the model on a device"
            )
    own, given = _plain(there), _plain(map(str, state))
    wrong = mismatches(
        {key: there[full] for key, full in own.items()},
        {key: state[full] for key, full in given.items()},
    )
    if not wrong:
        model.load_state_dict({full: state[given[key]] for key, full in own.items()})
        return
    before = copy.deepcopy(there)
    try:
        model.load_state_dict(state)  # a hook of the model may rename keys
    except Exception as error:
        model.load_state_dict(before, strict=False)
        raise another_model(path, wrong) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
