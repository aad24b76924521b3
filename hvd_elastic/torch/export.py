"""Exports a model of PyTorch for programs that have neither its class nor this package."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.script.export import compare_outputs, tried
from hvd_elastic.torch.inference import in_evaluation_mode, on_device

Run = Callable[[tuple[Any, ...]], Any]


def exported(model: torch.nn.Module, example: Any, name: str) -> Callable[[Path], bytes]:
    """See :meth:`Frontend.exported`."""
    kinds = {".pt2": _write_pt2, ".onnx": _write_onnx}
    write = kinds.get(Path(name).suffix)
    if write is None:
        raise ScriptError(
            f"hvd.export(..., {name!r}): the name ends in .pt2 (torch.export) or .onnx (ONNX); "
            "for weights alone use hvd.save"
        )
    inputs = on_device(example if isinstance(example, tuple) else (example,), torch.device("cpu"))

    @torch.no_grad()
    def make(folder: Path) -> bytes:
        path = folder / name
        with in_evaluation_mode(model):
            alone = copy.deepcopy(model).cpu()
        several = all(isinstance(each, torch.Tensor) and len(each) > 1 for each in inputs)
        shapes = tuple({0: torch.export.Dim.AUTO} for _ in inputs) if several else None
        run = _tried(name, lambda: write(alone, inputs, shapes, path))
        fewer = [tuple(each[:1] for each in inputs)] if several else []
        for given in (inputs, *fewer):
            found = _tried(name, partial(run, given))
            compare_outputs(name, _arrays(alone(*given)), _arrays(found))
        return path.read_bytes()

    return make


def _tried(name: str, call: Callable[[], Any]) -> Any:
    advice = (
        ". Control flow that depends on values of tensors, and classes of Python in inputs or "
        "outputs, cannot be exported: leave them out of forward(), or save the weights with "
        "hvd.save"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tried(name, call, advice)


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


def _arrays(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value.double().numpy()]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [array for each in value for array in _arrays(each)]
