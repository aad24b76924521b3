"""Writes the files that a script saves, and loads them into a model for inference."""

from __future__ import annotations

import copy
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.script.model_loading import ModelLoader
from hvd_elastic.script.model_source import another_model, mismatches
from hvd_elastic.torch.checkpoint import load_object

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


def write_object(name: str, obj: Any, file: HashingWriter) -> None:
    """See :meth:`Frontend.write_object`."""
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


class _Loader(ModelLoader):
    """Replaces parameters and buffers of modules."""

    def tensors(self, model: torch.nn.Module) -> list[torch.Tensor]:
        return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]

    def fill(self, model: torch.nn.Module, path: Path, name: str) -> None:
        state = load_object(path, name) if path.suffix == ".json" else load_state(path, name)
        _fill(model, state, path)

    def ready(self, model: torch.nn.Module) -> None:
        model.eval()


load_model = _Loader().load_model


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
    refused = re.search(
        r"un(?:supported|recognized) (?:global|class|function):? (?:GLOBAL )?([\w.]+)",
        said,
        re.IGNORECASE,
    )
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
