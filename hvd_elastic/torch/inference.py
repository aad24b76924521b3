"""A model of PyTorch that is not in training: ``hvd.evaluate``, ``predict`` and ``export``."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as PlainLoader
from torch.utils.data import IterableDataset

from hvd_elastic.errors import ScriptError
from hvd_elastic.input.forked import WorkerStart
from hvd_elastic.input.loader_arguments import examples_of
from hvd_elastic.script.export import compare_outputs, tried
from hvd_elastic.torch.copies import TensorCopies
from hvd_elastic.torch.data import DataLoader
from hvd_elastic.torch.saving import load_model
from hvd_elastic.torch.state import State
from hvd_elastic.worker.inference import Inference


class TorchInference(Inference):
    """See the base class; the model is on one device."""

    state = State
    load_model = staticmethod(load_model)

    def __init__(
        self,
        model: torch.nn.Module,
        dataset: Any,
        called: str,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        instead = f"{called} a map-style dataset"
        self.model, self.dataset = model, dataset
        self.examples = examples_of(dataset, isinstance(dataset, IterableDataset), instead)
        self._num_workers, self._collate = num_workers, collate_fn
        parameters = model.parameters()
        self._device = next((each.device for each in parameters), torch.device("cpu"))

    def batches(self, indices: Sequence[range]) -> PlainLoader[Any]:
        return PlainLoader(
            self.dataset,
            batch_sampler=[*map(list, indices)],
            num_workers=self._num_workers,
            collate_fn=self._collate,
            worker_init_fn=WorkerStart(None),
        )

    def shared(self, dataset: Any, batch_size: int) -> DataLoader[Any]:
        workers, collate = self._num_workers, self._collate
        return DataLoader(dataset, batch_size, num_workers=workers, collate_fn=collate)

    def given(self, batch: Any) -> Any:
        return on_device(batch, self._device)

    def outputs(self, inputs: Any) -> Any:
        return self.model(inputs)

    def values(self, metric: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Any:
        found = metric(outputs, targets)
        if not isinstance(found, torch.Tensor):
            return found
        return found.detach().double().cpu().numpy()

    def array(self, output: torch.Tensor) -> np.ndarray:
        output = output.detach().cpu()
        return (output.float() if output.dtype is torch.bfloat16 else output).numpy()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with in_evaluation_mode(self.model), torch.no_grad():
            yield

    def untrained(self) -> tuple[list[Any], Callable[[], None]]:
        buffers, kept = [*self.model.buffers()], TensorCopies()
        kept.copy_tensors(buffers)
        return [buffer.detach() for buffer in buffers], kept.restore


@contextlib.contextmanager
def in_evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into its own mode after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device, in the same structure."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: on_device(each, device) for key, each in batch.items()}
    if isinstance(batch, (tuple, list)):
        moved = [on_device(each, device) for each in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


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
