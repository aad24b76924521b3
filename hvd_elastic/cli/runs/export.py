"""``hvd-elastic get`` and ``export``: files that a run saved, and weights for other programs."""

# ruff: noqa: D301  (the backspace tells the command line to keep the lines of the examples)
from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np

from hvd_elastic.checkpoint.header import Header, TensorInfo
from hvd_elastic.checkpoint.reader import load_arrays, named, read_header
from hvd_elastic.checkpoint.saved import differing, find_stored
from hvd_elastic.cli.jobs.naming import open_run, source_of
from hvd_elastic.cli.options import AsJson, RequiredRun, argument, option
from hvd_elastic.cli.output import print_json
from hvd_elastic.errors import CheckpointError, RunError, UsageError
from hvd_elastic.formatting import bytes_words, count, date_words
from hvd_elastic.frameworks import TITLES
from hvd_elastic.programs.file_hash import hash_of
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.replaced_files import replacing
from hvd_elastic.script.model_source import find_source

_PIECE_BYTES = 1 << 20
"""Size of the pieces in which a file is read and copied."""


def get(
    run: RequiredRun,
    name: Annotated[
        str | None, argument("A file to copy; all are listed if left out.", "NAME")
    ] = None,
    dest: Annotated[
        str | None,
        argument(
            "File or folder to copy it to; '-' = stdout. Here under its name if left out.", "DEST"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the files that the script of a run saved with hvd.save, or copy one of them.

    \b
    Examples:
      hvd-elastic get digits-3                      list what was saved
      hvd-elastic get digits-3 best.pt              copy to ./best.pt
      hvd-elastic get digits-3 best.pt models/digits.pt
      hvd-elastic get digits-3 best.pt - | sha256sum
    """
    folder = open_run(run)
    if name is None:
        _list(folder, as_json)
        return
    if dest == "-" and as_json:
        raise UsageError("--json prints on stdout, and so does DEST '-': leave one of them out")
    source = folder.saved / name
    names = _names(folder)
    if name not in names:
        there = f"it has: {', '.join(names)}" if names else "it has saved none"
        raise RunError(f"run {folder.run_id} has no saved file {name!r}; {there}")
    if dest == "-":
        _print(source, folder.run_id)
        return
    target = Path(name if dest is None else dest)
    if target.is_dir():
        target /= name
    elif dest is not None and dest.endswith("/"):
        raise UsageError(f"{dest} is no folder; make it first: mkdir -p {dest}")
    elif target.exists() and not target.is_file():
        raise UsageError(f"{target} is neither a file nor a folder; '-' writes to stdout")
    try:
        _copy(source, target, folder.run_id)
    except OSError as error:
        raise RunError(
            f"{target} cannot be written: {error.strerror or error}. Name a place with room that "
            "this user can write; what was there is untouched"
        ) from error
    size = target.stat().st_size
    if as_json:
        print(
            json.dumps({"run_id": folder.run_id, "name": name, "path": str(target), "bytes": size})
        )
    else:
        print(f"{target}: {bytes_words(size)}")


def _names(folder: RunFolder) -> list[str]:
    """Return the names of the saved files; hidden ones are descriptions and unfinished."""
    if not folder.saved.is_dir():
        return []
    return sorted(path.name for path in folder.saved.glob("[!.]*") if path.is_file())


def _list(folder: RunFolder, as_json: bool) -> None:
    described = find_stored(folder.saved)
    rows: list[dict[str, Any]] = []
    for name in _names(folder):
        status = (folder.saved / name).stat()
        known = described.get(name)
        rows.append(
            {
                "name": name,
                "bytes": status.st_size,
                "step": None if known is None else known.step,
                "epoch": None if known is None else known.epoch,
                "host": None if known is None else known.host,
                "sha256": None if known is None else known.sha256,
                "time": status.st_mtime,
                "path": str(folder.saved / name),
            }
        )
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"run {folder.run_id} has saved no files", file=sys.stderr)
        return
    width = max(4, *(len(row["name"]) for row in rows))
    print(f"{'NAME':<{width}} {'SIZE':>9} {'STEP':>9}  SAVED")
    for row in rows:
        at = date_words(row["time"])
        step = "" if row["step"] is None else row["step"]
        print(f"{row['name']:<{width}} {bytes_words(row['bytes']):>9} {step:>9}  {at}")


def _copy(source: Path, target: Path, run_id: str) -> None:
    """Copy a file, whole and as it was saved or not at all."""
    with replacing(target) as temporary:
        with _opened(source, run_id) as file, temporary.open("xb") as copy:
            shutil.copyfileobj(file, copy, _PIECE_BYTES)
            copy.flush()
            os.fsync(copy.fileno())


def _print(source: Path, run_id: str) -> None:
    """Write a file to stdout, or nothing if it is not as it was saved."""
    with _opened(source, run_id) as file:
        shutil.copyfileobj(file, sys.stdout.buffer, _PIECE_BYTES)
    sys.stdout.flush()


def _opened(source: Path, run_id: str) -> BinaryIO:
    """Open a file.

    Raises:
        RunError: it is not the one that the script has saved.
    """
    while True:
        file = source.open("rb")
        sha256 = hash_of(file.fileno()).hexdigest()
        recorded = differing(source.parent, source.name, sha256)
        if not recorded:
            return file
        replaced = not os.path.samestat(os.fstat(file.fileno()), source.stat())
        file.close()
        if not replaced:
            raise RunError(
                f"{source} has SHA-256 {sha256}, and the script saved {recorded}: it was changed "
                f"or damaged since. Nothing was copied. hvd-elastic run --resume {run_id} fetches "
                "it again if its host still has it; to use it as it is, copy it from there by "
                "yourself"
            )


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
