"""The state that a training run must not lose: models, optimizers and the user's own values.

Parameters are not copied at a step of one optimizer. They change only after all gradients of a step
are reduced, so every survivor of a failure holds the state before or after the step in flight,
never between; the one furthest ahead sends its live tensors to the others.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hvd_elastic.errors import ScriptError
from hvd_elastic.script.state import ScriptState, Stateful
from hvd_elastic.torch.buffers import (
    MovingBuffers,
    give_own_memory,
    has_grown,
    is_writable,
    left_out,
    set_left_out,
    take_shapes,
)
from hvd_elastic.torch.checkpoint import TorchContent, content_of, dtype_name, dtype_named
from hvd_elastic.torch.copies import Snapshot, TensorCopies, untrained_tensors
from hvd_elastic.torch.grad_scaler import GradScaler
from hvd_elastic.torch.input_source import TensorPickler
from hvd_elastic.torch.schedule import counting_schedules
from hvd_elastic.torch.tensor_forms import ModuleForms, lay_out
from hvd_elastic.worker.checks.replica_check import parameters_of_check, sums_of
from hvd_elastic.worker.frontend import Schedule, TrainedSums


class State(ScriptState):
    """State that newcomers get, that survives failures, and that checkpoints hold.

    Args:
        model: a module; its live parameters and buffers are sent.
        optimizer: an optimizer.
        values: other values, read and set as attributes. An object with ``state_dict()`` and
            ``load_state_dict()`` (a scheduler, a second model) is kept by reference; all others
            must be plain data (numbers, strings, lists, dicts, tensors). When a step, or the code
            between two epochs, is repeated after a failure, plain values, objects that are not
            modules, and the learning rates of optimizers are first restored.

    Raises:
        ScriptError: what is given as model or optimizer is none, or a value is neither, or is
            PyTorch's own gradient scaler; names it.
    """

    _content_kind = TorchContent
    _pickler = TensorPickler

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        for name, value in (("model", model), ("optimizer", optimizer)):
            swapped = isinstance(value, Optimizer if name == "model" else Module)
            if value is not None and (swapped or not isinstance(value, Stateful)):
                raise ScriptError(
                    f"State({name}=...) was given a {type(value).__name__}; give it the {name} "
                    "itself: hvd.State(model=model, optimizer=optimizer)"
                )
        self._tensors = TensorCopies()
        self._moving: MovingBuffers | None = None
        super().__init__(model, optimizer, **values)

    def _is_object(self, name: str, value: Any) -> bool:
        if isinstance(value, torch.amp.GradScaler) and not isinstance(value, GradScaler):
            raise ScriptError(
                f"State({name}=...): PyTorch's GradScaler looks at the gradients of one rank "
                "before they are averaged; make it hvd_elastic.torch.GradScaler(...), which is "
                "used in the same way"
            )
        return isinstance(value, Stateful)

    def _try_plain(self, value: Any) -> None:
        TorchContent(value, copy_own=False)
        load_plain(dump_plain(_without_numpy(value)))  # no class that a newcomer would not have

    # -- for the library -------------------------------------------------------------------

    def schedules(self) -> dict[str, Schedule]:
        """See :class:`hvd_elastic.worker.frontend.State`; includes forgotten schedulers."""
        forgotten = chain.from_iterable(averager.forgotten for averager in self._averagers())
        outside = {f"scheduler{number or ''}": item for number, item in enumerate(forgotten)}
        return counting_schedules({**self._objects, **outside})

    def take_snapshot(self, *, tensors: bool = False) -> Snapshot:
        several = self._context.worker.averagers.several
        return Snapshot(self._plain, self._objects, self._helpers, tensors=tensors, parts=several)

    def save_values(self, snapshot: Snapshot | None = None, *, tensors: bool = False) -> None:
        super().save_values(snapshot)
        self._tensors.drop()
        if tensors and snapshot is None:
            self._tensors.copy_tensors(untrained_tensors(self._objects, parts=True))

    def roll_back(self) -> None:
        super().roll_back()
        self._tensors.restore()

    def keep_moving(self) -> None:
        if self._moving is None:
            self._moving = MovingBuffers(self.named_modules().values())
        self._moving.keep()

    def undo_moving(self) -> None:
        if self._moving is not None:
            self._moving.undo()

    def module_attributes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, module in self.named_modules().items():
            for path, part in module.named_modules():
                yield f"{name}.{path}" if path else name, vars(part)

    def module_versions(self) -> int:
        return sum(
            0 if tensor.is_inference() else tensor._version
            for item in self.named_modules().values()
            for tensor in chain(item.parameters(), item.buffers())
        )

    def named_modules(self) -> dict[str, torch.nn.Module]:
        return {n: i for n, i in self._objects.items() if isinstance(i, torch.nn.Module)}

    def trained_sums(self, signs: np.ndarray, number: int | None) -> TrainedSums:
        shared: dict[torch.Tensor, torch.Tensor] = {}
        for averager in self._averagers():
            shared |= averager.shared_weights()
        return trained_sums(self.named_modules(), signs, number, shared)

    def named_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {n: i for n, i in self._objects.items() if isinstance(i, torch.optim.Optimizer)}

    def storages(self) -> set[int]:
        """Return the addresses of all tensors, except those of optimizers' states."""
        objects = [
            list(item.parameters()) if isinstance(item, torch.nn.Module) else item.state_dict()
            for item in self._objects.values()
            if not isinstance(item, torch.optim.Optimizer)
        ]
        found = chain(_tensors_in(objects), _tensors_in(self._plain))
        return {tensor.untyped_storage().data_ptr() for tensor in found}

    def _known(self, content: Any) -> list[bool]:
        lasting = self.lasting()
        return [tensor.data_ptr() in lasting for tensor in content.tensors]

    def _device(self, tensor: torch.Tensor) -> str:
        return tensor.device.type

    _pieces = staticmethod(content_of)

    def _fitting(
        self, own: torch.Tensor | None, dtype: str, shape: tuple[int, ...], device: str
    ) -> torch.Tensor:
        like = (dtype_named(dtype), torch.Size(shape), device)
        if own is not None and (own.dtype, own.shape, own.device.type) == like and is_writable(own):
            return own
        return torch.empty(shape, dtype=dtype_named(dtype), device=device)

    def _decode_opaque(self, data: bytes) -> Any:
        return load_plain(data) if data else ()

    def _values(self) -> dict[str, Any]:
        modules = self.named_modules()
        frozen = {name: _frozen(module) for name, module in modules.items()}
        converted = self._forms.converted(modules)
        return {**super()._values(), "frozen": frozen, "converted": converted}

    def _models(self) -> dict[str, torch.nn.Module]:
        return self.named_modules()

    def _constants(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, module in self.named_modules().items():
            for key, buffer in module.named_buffers():
                has_data = not (is_lazy(buffer) or buffer.is_meta or buffer.is_sparse)
                if has_data and (buffer.is_floating_point() or buffer.is_complex()):
                    yield f"{name}.{key}", dtype_name(buffer.dtype), buffer

    def _frozen(self) -> set[str]:
        modules = self.named_modules().items()
        return {f"{name}.{key}" for name, module in modules for key in _frozen(module)}

    def _shared(self) -> set[int]:
        shared = self.lasting()
        for item in self.named_modules().values():
            shared |= {parameter.data_ptr() for parameter in item.parameters()}
        for averager in self._averagers():
            shared -= {each.data_ptr() for each in averager.own_tensors()}
        shared.discard(0)  # the address of tensors without elements
        return shared

    def lasting(self) -> set[int]:
        """Return ``data_ptr()`` of the tensors that change only in an optimizer's step.

        These are the parameters of the optimizers, and the optimizers' own state.
        """
        found: set[int] = set()
        for item in self.named_optimizers().values():
            for group in item.param_groups:
                found |= {parameter.data_ptr() for parameter in group["params"]}
            for values in item.state.values():
                found |= {v.data_ptr() for v in values.values() if torch.is_tensor(v)}
        for averager in self._averagers():
            found |= {each.data_ptr() for each in averager.shared_weights().values()}
        return found

    def _averagers(self) -> Any:
        return self._context.worker.averagers

    def waits_before_step(self) -> bool:
        optimizers = self.named_optimizers().values()
        return bool(optimizers) and all(hasattr(item, "synchronize") for item in optimizers)

    def _build(self) -> None:
        give_own_memory(self.named_modules())
        self._forms = ModuleForms(self.named_modules())

    def _left_out(self) -> dict[str, dict[str, torch.Tensor]]:
        return left_out(self.named_modules())

    def _may_differ(self, item: Any, key: str, here: Any, there: Any) -> bool:
        return isinstance(item, Module) and has_grown(item, key, here, there)

    def _tensors_of(self, item: Any) -> Mapping[str, Any] | None:
        return item.state_dict() if isinstance(item, torch.nn.Module) else None

    def _set_object(self, item: Any, values: Any) -> None:
        if isinstance(item, Module):
            give_own_memory({"": item})
            take_shapes(item, values)
        super()._set_object(item, values)
        if isinstance(item, Optimizer):
            _restore_forms(item, values)

    def _set_values(self, values: dict[str, Any], source: str) -> None:
        self._forms.follow(self.named_modules(), values["converted"])
        super()._set_values(values, source)
        for name, buffers in values.get("left_out", {}).items():
            set_left_out(self.named_modules()[name], buffers)
        for name, names in values["frozen"].items():
            frozen = set(names)
            for key, parameter in self.named_modules()[name].named_parameters():
                if parameter.requires_grad == (key in frozen):
                    parameter.requires_grad_(key not in frozen)


def _without_numpy(value: Any) -> Any:
    """Return a value with Python's numbers in place of NumPy's, as other ranks receive it."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {_without_numpy(key): _without_numpy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_without_numpy(item) for item in value]
    return value


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value and in the dicts and lists of which it consists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_tensors_in, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_tensors_in, value))


def _restore_forms(optimizer: Optimizer, values: dict[str, Any]) -> None:
    """Give an optimizer's state the types that it was received in, and the parameters' strides.

    ``load_state_dict()`` converts it to the types of the parameters, such as float32 moments of
    bfloat16 parameters: a rank that received them would go apart from one that sent them. Strides
    are not sent, and fused optimizers take them to be those of the parameter (channels_last).
    """
    numbers = [number for group in values.get("param_groups", ()) for number in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        state = optimizer.state.get(parameter, {})
        for name, value in values["state"].get(number, {}).items():
            loaded = state.get(name)
            if not (torch.is_tensor(value) and torch.is_tensor(loaded)):
                continue
            if value.dtype != loaded.dtype:
                state[name] = value.to(loaded.device)
        lay_out(state, parameter)


def _frozen(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that require no gradient."""
    return [name for name, each in module.named_parameters() if not each.requires_grad]


def dump_plain(value: Any) -> bytes:
    """Serialise plain data and tensors, for :func:`load_plain`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_plain(data: bytes) -> Any:
    """Return the value that :func:`dump_plain` serialised; refuses data that would run code."""
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


_SUMMED = 1 << 22
"""Elements of a tensor that are summed at once on the CPU: bounds memory."""


def trained_sums(
    modules: Mapping[str, torch.nn.Module],
    signs: np.ndarray,
    number: int | None,
    shared: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> TrainedSums:
    """See :meth:`~hvd_elastic.worker.frontend.State.trained_sums`.

    Args:
        shared: what is compared in place of parameters that differ from rank to rank.
    """
    parameters = _parameters(modules, shared or {})
    chosen = parameters_of_check(parameters, number)
    sums = np.array([_sums(each, signs, number) for _, each in chosen]).reshape(-1, 2)
    epsilons = np.array([torch.finfo(each.dtype).eps for _, each in chosen])
    return TrainedSums([name for name, _ in chosen], sums, epsilons, len(parameters))


def _parameters(
    modules: Mapping[str, torch.nn.Module], shared: Mapping[torch.Tensor, torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for module_name, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point() and parameter.numel() and not parameter.is_sparse:
                # Frozen ones may differ, such as running averages of Keras, but count as a number,
                # so that a collective has the same shape on a rank that has unfrozen one.
                same = shared.get(parameter, parameter)
                values = same.detach() if parameter.requires_grad else parameter.new_zeros(1)
                found.setdefault(id(parameter), (f"{module_name}.{name}", values))
    return list(found.values())


def _sums(tensor: torch.Tensor, signs: np.ndarray, number: int | None) -> np.ndarray:
    flat = tensor.reshape(-1)
    if number is not None:
        start = number * len(signs) % flat.numel()
        flat = flat[start : start + len(signs)]
    pieces = (each.to("cpu", torch.float64).numpy() for each in flat.split(_SUMMED))
    return np.sum([sums_of(each, signs, None) for each in pieces], axis=0)
