"""Exports a model of PyTorch for programs that have neither its class nor this package."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.evaluation import in_evaluation_mode, on_device
from hvd_elastic.training import context
from hvd_elastic.training.saving import save_file

_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
"""How far outputs may differ from those of the live model, relative to the largest of them, and
absolutely: other kernels add in another order, in float32."""
Run = Callable[[tuple[Any, ...]], Any]


def export(model: torch.nn.Module, example: Any, name: str) -> None:
    """Save a model with its code in the folder of the run, checked against the live model.

    Rank 0 exports, as :func:`hvd_elastic.torch.save` saves; on other ranks the call does nothing.
    The file is read back, and its outputs for ``example`` are compared with those of the model,
    before it counts as saved.

    Args:
        model: model; it is exported on the CPU and in evaluation mode, and stays as it is.
        example: inputs of the model: a tensor, or a tuple of tensors. With two rows or more, the
            first dimension of all inputs may have any size in the exported model.
        name: name of the file: ``….pt2`` for ``torch.export`` (read by ``torch.export.load``), or
            ``….onnx`` for ONNX, which needs onnx, onnxscript and onnxruntime.

    Raises:
        ScriptError: the name has another ending; the format cannot hold the model; a package is
            missing; or the outputs of the exported model differ.
        CheckpointError: the file cannot be written on this host.
    """
    kinds = {".pt2": _write_pt2, ".onnx": _write_onnx}
    write = kinds.get(Path(name).suffix)
    if write is None:
        raise ScriptError(
            f"hvd.export(..., {name!r}): the name ends in .pt2 (torch.export) or .onnx (ONNX); "
            "for weights alone use hvd.save"
        )
    worker = context.current().worker
    worker.check_has_ranks(f"whether this rank writes {name!r}")
    if worker.communicator.rank:
        return
    inputs = on_device(example if isinstance(example, tuple) else (example,), torch.device("cpu"))
    with in_evaluation_mode(model), torch.no_grad():
        alone = copy.deepcopy(model).cpu()
        expected = alone(*inputs)
        several = all(isinstance(each, torch.Tensor) and len(each) > 1 for each in inputs)
        shapes = tuple({0: torch.export.Dim.AUTO} for _ in inputs) if several else None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            run = _tried(name, lambda: write(alone, inputs, shapes, path))
            _compare(name, expected, _tried(name, lambda: run(inputs)))
            if several:
                fewer = tuple(each[:1] for each in inputs)
                _compare(name, alone(*fewer), _tried(name, lambda: run(fewer)))
            content = path.read_bytes()
    save_file(worker, name, lambda file: _put(content, file))


def _put(content: bytes, file: HashingWriter) -> None:
    file.write(content)


def _tried(name: str, call: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()
    except ScriptError:
        raise
    except Exception as error:  # PyTorch and ONNX raise many kinds
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ScriptError(
            f"hvd.export: {name} cannot hold this model: {said}. Control flow that depends on "
            "values of tensors, and classes of Python in inputs or outputs, cannot be exported: "
            "leave them out of forward(), or save the weights with hvd.save"
        ) from error


def _write_pt2(model: torch.nn.Module, inputs: tuple[Any, ...], shapes: Any, path: Path) -> Run:
    torch.export.save(torch.export.export(model, inputs, dynamic_shapes=shapes), path)
    loaded = torch.export.load(path).module()
    return lambda given: loaded(*given)


def _write_onnx(model: torch.nn.Module, inputs: tuple[Any, ...], shapes: Any, path: Path) -> Run:
    lacking = [
        each for each in ("onnx", "onnxscript", "onnxruntime") if not importlib.util.find_spec(each)
    ]
    if lacking:
        raise ScriptError(
            f"hvd.export: ONNX needs {' and '.join(lacking)} on the host of rank 0: pip install "
            f"{' '.join(lacking)}"
        )
    import onnxruntime  # type: ignore[import-not-found,import-untyped,unused-ignore]

    program = torch.onnx.export(model, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    program.save(path)
    if len([*path.parent.iterdir()]) > 1:
        raise ScriptError(
            f"hvd.export: {path.name} cannot hold this model: it is above the 2 GB of one ONNX "
            "file. Export it as .pt2"
        )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(given: tuple[Any, ...]) -> Any:
        arrays = [each.numpy() for each in given]
        return [torch.from_numpy(o) for o in session.run(None, dict(zip(names, arrays)))]  # noqa: B905

    return run


def _compare(name: str, expected: Any, found: Any) -> None:
    """Raise ScriptError if outputs are not those of the live model."""
    ours, theirs = _tensors(expected), _tensors(found)
    if [each.shape for each in ours] != [each.shape for each in theirs]:
        raise ScriptError(
            f"hvd.export: {name} gives outputs of the shapes {[tuple(t.shape) for t in theirs]}, "
            f"and the model {[tuple(t.shape) for t in ours]}; it was not saved"
        )
    for own, other in zip(ours, theirs, strict=True):
        if not own.numel():
            continue
        apart = (own.double() - other.double()).abs().max().item()
        limit = _ABSOLUTE + _RELATIVE * own.double().abs().max().item()
        if not apart <= limit:
            raise ScriptError(
                f"hvd.export: outputs of {name} differ from those of the model by {apart:.3g}, "
                f"more than {limit:.3g}; it was not saved. Layers that draw random numbers in "
                "evaluation mode do that"
            )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for each in value for tensor in _tensors(each)]
