"""``hvd-elastic export``: writes the weights of a run in a format that other programs read."""

# ruff: noqa: D301  (the backspace tells the command line to keep the lines of the examples)
from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from hvd_elastic.checkpoint.header import Header, TensorInfo
from hvd_elastic.checkpoint.reader import load_arrays, named, read_header
from hvd_elastic.cli.jobs.naming import source_of
from hvd_elastic.cli.options import AsJson, argument, option
from hvd_elastic.errors import CheckpointError, RunError, UsageError
from hvd_elastic.formatting import bytes_words, count
from hvd_elastic.frameworks import TITLES
from hvd_elastic.replaced_files import replacing
from hvd_elastic.script.model_source import find_source

_ENDINGS = {"safetensors": ".safetensors", "torch": ".pt", "keras": ".keras"}


def export(
    source: Annotated[
        str,
        argument(
            "a run or its job (newest checkpoint), a checkpoint, or a file of hvd.save", "RUN|FILE"
        ),
    ],
    to: Annotated[str, option("safetensors, torch or keras", "--to", metavar="FORMAT")],
    out: Annotated[Path | None, option("file to write (default: here, named for the run)")] = None,
    name: Annotated[str, option("which object of the script's State to export")] = "model",
    model: Annotated[
        str | None,
        option(
            "of --to keras: function that makes the model, in a module that can be imported",
            metavar="MODULE:FUNCTION",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the weights of a run to one file that is read without this package.

    safetensors: tensors by name, for every framework. torch: a state_dict, for torch.load. keras: a
    whole model of Keras, made by --model.

    \b
    Examples:
      hvd-elastic export resnet-1 --to safetensors
      hvd-elastic export resnet-1 --to torch --out weights.pt
      hvd-elastic export digits-1 --to keras --model network:make_model
      hvd-elastic export ~/.hvd_elastic/runs/resnet-1/saved/best.pt --to safetensors
    """
    if to not in _ENDINGS:
        raise UsageError(f"--to {to}: it is one of {', '.join(_ENDINGS)}")
    if (model is not None) != (to == "keras"):
        raise UsageError(
            "--to keras writes a whole model: say which function makes it, as in --model "
            "network:make_model"
            if model is None
            else f"--model is of --to keras; --to {to} writes the weights alone"
        )
    source = source_of(source)
    path = find_source(source)
    stem = path.stem if Path(source).is_file() else Path(source).name
    target = Path(stem + _ENDINGS[to]) if out is None else out
    if target.is_dir():
        raise UsageError(f"--out {target} is a folder: give the name of a file in it")
    if path.suffix == ".json":
        writers = {"safetensors": _safetensors, "torch": _torch, "keras": _keras}
        tensors = writers[to](path, name, target, model)
    else:
        tensors = _from_file(path, name, to, target, model)
    size = target.stat().st_size
    if as_json:
        told = {"path": str(target), "format": to, "from": str(path), "bytes": size}
        print(json.dumps({**told, "tensors": tensors}))
    else:
        print(f"{target}: {count(tensors, 'tensor')}, {bytes_words(size)}, from {path}")


def _safetensors(path: Path, name: str, target: Path, _: str | None) -> int:
    """Write the tensors of an object of a checkpoint; return their number."""
    header = read_header(path)
    objects = named(name, header.values["objects"], path)
    entries = objects.get("$ordered", objects.get("$dict", objects))
    pairs = list(entries.items() if isinstance(entries, Mapping) else entries)
    infos = {info.name: info for info in header.tensors}
    own: dict[str, str] = {}
    for key, value in pairs:
        tensor = value.get("$tensor") if isinstance(value, Mapping) else None
        if tensor is None:
            raise CheckpointError(
                f"{path}: {name}.{key} is no plain tensor, and safetensors holds nothing else: "
                "use --to torch"
            )
        own[key] = tensor
    arrays = load_arrays(path, set(own.values()))
    described = [(key, infos[tensor], arrays[tensor]) for key, tensor in own.items()]
    _write_safetensors(described, header, target)
    return len(own)


def _write_safetensors(
    described: list[tuple[str, TensorInfo, np.ndarray[Any, Any]]], header: Header, target: Path
) -> None:
    tensors = tuple(
        TensorInfo(key, info.dtype, info.shape, info.bytes) for key, info, _ in described
    )
    made = Header(tensors, header.progress, header.world, header.frontend, header.library, {})
    with _whole(target) as temporary, temporary.open("xb") as file:
        file.write(made.encode())
        for _, _, array in described:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _torch(path: Path, name: str, target: Path, _: str | None) -> int:
    """Write an object of a checkpoint as torch.save does; return the number of its tensors."""
    _require("torch", _frontend_of(path), path)
    from hvd_elastic.torch.checkpoint import load_object

    return _save_torch(load_object(path, name), target)


def _save_torch(state: Mapping[str, Any], target: Path) -> int:
    import torch

    with _whole(target) as temporary, temporary.open("xb") as file:
        torch.save(state, file)
    return sum(isinstance(value, torch.Tensor) for value in state.values())


def _keras(path: Path, name: str, target: Path, function: str | None) -> int:
    """Write a whole model of Keras; return the number of its variables."""
    if path.suffix == ".json":
        _require("tensorflow", _frontend_of(path), path)
    if target.suffix != ".keras":
        raise UsageError(f"--out {target}: Keras reads a whole model from a name ending in .keras")
    make = _function(function or "")
    from hvd_elastic.tensorflow.saving import load_model  # checks the versions

    made = make()
    import keras

    if not isinstance(made, keras.Model):
        raise UsageError(f"--model {function} made a {type(made).__name__}, no model of Keras")
    load_model(path, made, name=name)
    with _whole(target) as temporary:
        named_so = temporary.with_suffix(".keras")
        made.save(named_so)
        named_so.replace(temporary)
    return len(made.variables)


def _from_file(path: Path, name: str, to: str, target: Path, function: str | None) -> int:
    """Export a file that a script saved."""
    if to == "keras":
        return _keras(path, name, target, function)
    if path.name.endswith((".keras", ".h5", ".safetensors")):
        raise RunError(
            f"{path} is of a format that other programs read already; export takes it as a source "
            "of --to keras alone"
        )
    import torch

    from hvd_elastic.torch.saving import load_state

    state = load_state(path, name)
    if to == "torch":
        return _save_torch(state, target)
    described = []
    for key, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{path}: {key} is no plain tensor, and safetensors holds nothing else: use --to "
                "torch"
            )
        kind, data = str(tensor.dtype).removeprefix("torch."), tensor.contiguous()
        info = TensorInfo(key, kind, tuple(tensor.shape), data.nbytes)
        described.append((key, info, data.reshape(-1).view(torch.uint8).numpy()))
    from hvd_elastic import __version__

    _write_safetensors(described, Header((), {}, 0, "torch", __version__, {}), target)
    return len(described)


def _frontend_of(path: Path) -> str:
    return read_header(path).frontend


def _require(frontend: str, found: str, path: Path) -> None:
    if found != frontend:
        other = "keras" if found == "tensorflow" else "torch"
        raise RunError(
            f"{path} was written by a training with {TITLES[found]}, whose names and shapes a file "
            f"of {TITLES[frontend]} cannot hold: use --to {other}, or --to safetensors"
        )


def _function(named_so: str) -> Callable[[], Any]:
    module, _, function = named_so.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), function)
        return found
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"--model {named_so}: {error}. Give MODULE:FUNCTION, such as network:make_model for "
            "the function make_model in ./network.py"
        ) from error


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yield the name of a temporary file that becomes ``target`` when it is whole."""
    try:
        with replacing(target) as temporary:
            yield temporary
    except OSError as error:
        raise RunError(
            f"{target} cannot be written: {error.strerror or error}; what was there is untouched"
        ) from error
