"""The state that a training run must not lose: models, optimizers and the user's own values.

Parameters are not copied at a step of one optimizer. They change only after all gradients of a step
are reduced, so every survivor of a failure holds the state before or after the step in flight,
never between; the one furthest ahead sends its live tensors to the others.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Container, Iterator, Mapping
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from hvd_elastic.checkpoint.header import decode_values
from hvd_elastic.communicator.interface import Communicator
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.torch.checkpoint import TorchContent, content_of
from hvd_elastic.torch.copies import TensorCopies
from hvd_elastic.torch.grad_scaler import GradScaler
from hvd_elastic.torch.schedule import counting_schedules
from hvd_elastic.torch.snapshot import Snapshot, untrained_tensors
from hvd_elastic.torch.trained_sums import trained_sums
from hvd_elastic.training import context
from hvd_elastic.training.frontend import Schedule, TrainedSums
from hvd_elastic.training.progress import Progress
from hvd_elastic.training.spread import spread


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class State:
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
        ScriptError: a value is neither, or is PyTorch's own gradient scaler; names it.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        named = {"model": model, "optimizer": optimizer, **values}
        self._objects: dict[str, _Stateful] = {}
        self._plain: dict[str, Any] = {}
        for name, value in named.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ScriptError(
                    f"State(): {name!r} cannot be the name of a value, choose another"
                )
            if isinstance(value, torch.amp.GradScaler) and not isinstance(value, GradScaler):
                raise ScriptError(
                    f"State({name}=...): PyTorch's GradScaler looks at the gradients of one rank "
                    "before they are averaged; make it hvd_elastic.torch.GradScaler(...), which is "
                    "used in the same way"
                )
            if isinstance(value, _Stateful):
                self._objects[name] = value
            elif value is not None or name in values:
                self._plain[name] = value
        for name, value in self._plain.items():
            _check_plain(name, value)
        self._large: set[str] = set()
        self._context = context.current()
        self._saved = self.take_snapshot()
        self._tensors = TensorCopies()
        self._context.register_state(self)

    def __getattr__(self, name: str) -> Any:
        for values in ("_objects", "_plain"):
            found = self.__dict__.get(values, {})
            if name in found:
                return found[name]
        raise AttributeError(f"this State has no value {name!r}; pass it to State(...)")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name in self._objects:
            self._objects[name] = value
        else:
            self._plain[name] = value

    def commit(self, **metrics: Any) -> None:
        """Add numbers (``loss=loss``) to the run's metrics; end a step that no optimizer took.

        A tensor is read only when metrics are due. With our ``DataLoader`` nothing else happens:
        the state is saved when the loop body ends. In a script without our loader, the step ends
        here and the world may change here: call it once a step, at the end of the loop body, and
        keep the position in the data as one of the state's values.
        """
        self._context.commit(metrics)

    # -- for the library -------------------------------------------------------------------

    def keep(self, name: str, item: _Stateful) -> None:
        """Add an object of the library to the values; the name starts with ``_``."""
        self._objects[name] = item

    def named_objects(self) -> dict[str, _Stateful]:
        """Return the objects that are kept by reference, by name."""
        return dict(self._objects)

    def schedules(self) -> dict[str, Schedule]:
        """See :class:`hvd_elastic.training.frontend.State`; includes forgotten schedulers."""
        averagers: Any = self._context.worker.averagers
        forgotten = chain.from_iterable(averager.forgotten for averager in averagers)
        outside = {f"scheduler{number or ''}": item for number, item in enumerate(forgotten)}
        return counting_schedules({**self._objects, **outside})

    def take_snapshot(self, *, tensors: bool = False) -> Snapshot:
        """Return a copy that :meth:`roll_back` can restore; see :class:`Snapshot`."""
        several = self._context.worker.averagers.several
        return Snapshot(self._plain, self._objects, self._large, tensors=tensors, parts=several)

    def save_values(self, snapshot: Snapshot | None = None, *, tensors: bool = False) -> None:
        """Set the snapshot that :meth:`roll_back` restores; None takes one now.

        Args:
            snapshot: an earlier one.
            tensors: without ``snapshot``, copy also buffers and parameters that no optimizer
                trains.
        """
        self._saved = snapshot or self.take_snapshot()
        self._tensors.drop()
        if tensors and snapshot is None:
            self._tensors.take(untrained_tensors(self._objects, parts=True))

    def roll_back(self) -> None:
        """Restore the snapshot of the last :meth:`save_values`."""
        self._saved.restore(self._plain, self._objects)
        self._tensors.restore()

    def module_versions(self) -> int:
        """Return a number that grows whenever a tensor of a module is changed in place."""
        return sum(
            0 if tensor.is_inference() else tensor._version
            for item in self.named_modules().values()
            for tensor in chain(item.parameters(), item.buffers())
        )

    def named_modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules by name."""
        return {n: i for n, i in self._objects.items() if isinstance(i, torch.nn.Module)}

    def trained_sums(self, signs: np.ndarray, number: int | None) -> TrainedSums:
        """See :class:`hvd_elastic.training.frontend.State`."""
        return trained_sums(self.named_modules(), signs, number)

    def named_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers by name."""
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

    def sync(
        self,
        communicator: Communicator,
        root_rank: int,
        progress: Progress,
        has_state: Callable[[Progress], bool] = lambda _: False,
    ) -> Progress:
        """Copy the root's state to every rank; return the root's progress.

        The structure is sent as plain data. Tensors are sent in a few large messages from the live
        tensors and, where shapes agree, into live tensors (:mod:`hvd_elastic.training.spread`).

        Args:
            communicator: communicator of all ranks.
            root_rank: rank whose state is copied.
            progress: progress of this rank.
            has_state: called with the root's progress before live tensors are overwritten; returns
                whether this rank already holds the whole state at that progress.
        """
        own = TorchContent(self._values(), _Everything(), copy_own=False)
        if communicator.rank == root_rank:
            lasting = self.lasting()
            known = [tensor.data_ptr() in lasting for tensor in own.tensors]
            devices = [tensor.device.type for tensor in own.tensors]
            header = {
                "values": own.values,
                "opaque": bytearray(own.encode_opaque()),
                "tensors": [
                    (info.name, tensor.dtype, tensor.shape, device)
                    for info, tensor, device in zip(own.stream, own.tensors, devices, strict=True)
                ],
                "known": known,
                "progress": progress.as_state(),
            }
            communicator.broadcast_bytes(dump_plain(header), root_rank)
            spread(own.tensors, known, True, communicator, root_rank, content_of)
            return progress
        header = load_plain(communicator.broadcast_bytes(b"", root_rank))
        theirs = Progress.from_dict(header["progress"])
        has = has_state(theirs)
        live = dict(zip((info.name for info in own.stream), own.tensors, strict=True))
        tensors = {name: _fitting(live.get(name), *how) for name, *how in header["tensors"]}
        ordered = list(tensors.values())
        spread(ordered, header["known"], has, communicator, root_rank, content_of)
        opaque = load_plain(header["opaque"]) if header["opaque"] else ()
        self._take(decode_values(header["values"], tensors, opaque), f"rank {root_rank}")
        return theirs

    def _values(self) -> dict[str, Any]:
        objects = {name: item.state_dict() for name, item in self._objects.items()}
        frozen = {name: _frozen(module) for name, module in self.named_modules().items()}
        return {"objects": objects, "plain": self._plain, "frozen": frozen}

    def content(self, *, copy_own: bool = True) -> TorchContent:
        """Return the present state for a checkpoint; ``copy_own``: copy what differs by rank."""
        shared = self.lasting()
        for item in self.named_modules().values():
            shared |= {parameter.data_ptr() for parameter in item.parameters()}
        shared.discard(0)  # the address of tensors without elements
        return TorchContent(self._values(), shared, copy_own=copy_own)

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
        return found

    def waits_before_step(self) -> bool:
        """Return whether every optimizer calls :meth:`Checkpointing.settle` before its step."""
        optimizers = self.named_optimizers().values()
        return bool(optimizers) and all(hasattr(item, "synchronize") for item in optimizers)

    def load(self, payload: dict[str, Any], path: str) -> Progress:
        """Load the content of a checkpoint and return its progress; ``path`` is for messages.

        Raises:
            CheckpointError: it does not fit this script's model, optimizer or values.
        """
        if set(payload["objects"]) != set(self._objects):
            raise CheckpointError(
                f"checkpoint {path} holds {sorted(payload['objects'])}, this script's State has "
                f"{sorted(self._objects)}. Resume with the script that wrote it."
            )
        # All checks come before anything is overwritten.
        for name, item in self._objects.items():
            _check_fits(name, item, payload["objects"][name], path)
        self._take(payload, f"checkpoint {path}")
        return Progress.from_dict(payload["progress"])

    def _take(self, values: dict[str, Any], source: str) -> None:
        for name, item in self._objects.items():
            try:
                item.load_state_dict(values["objects"][name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"the state of {name!r} from {source} does not fit this script: {error}"
                ) from error
        self._plain.update(values["plain"])
        for name, names in values.get("frozen", {}).items():  # earlier versions did not write it
            frozen = set(names)
            for key, parameter in self.named_modules()[name].named_parameters():
                if parameter.requires_grad == (key in frozen):
                    parameter.requires_grad_(key not in frozen)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value and in the dicts and lists of which it consists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_tensors_in, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_tensors_in, value))


def _frozen(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that require no gradient."""
    return [name for name, each in module.named_parameters() if not each.requires_grad]


def _check_fits(name: str, item: _Stateful, found: dict[str, Any], path: str) -> None:
    """Raise CheckpointError if tensors of a module differ in shape; names the first one."""
    if not isinstance(item, torch.nn.Module):
        return
    own = item.state_dict()
    for key in [*own, *(key for key in found if key not in own)]:
        here, there = _shape(own.get(key)), _shape(found.get(key))
        if here != there:
            raise CheckpointError(
                f"checkpoint {path} is of another model: {name}.{key} is {there} in the checkpoint "
                f"and {here} in this script. Resume with the script and options that wrote it, or "
                "start a new run"
            )


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape))
    return "missing" if value is None else "no tensor"


def dump_plain(value: Any) -> bytes:
    """Serialise plain data and tensors, for :func:`load_plain`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_plain(data: bytes) -> Any:
    """Return the value that :func:`dump_plain` serialised; refuses data that would run code."""
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _check_plain(name: str, value: Any) -> None:
    try:
        load_plain(dump_plain(value))
    except Exception as error:  # torch raises many kinds, all meaning the same here
        raise ScriptError(
            f"State(): {name!r} is a {type(value).__name__}, which is neither plain data "
            "(numbers, strings, lists, dicts, tensors) nor an object with state_dict() and "
            "load_state_dict(). Turn it into one of them."
        ) from error


class _Everything(Container[int]):
    """Contains every address, so that every tensor is sent from its live memory."""

    def __contains__(self, address: object) -> bool:
        return True


def _fitting(
    own: torch.Tensor | None, dtype: torch.dtype, shape: torch.Size, device: str
) -> torch.Tensor:
    """Return this rank's live tensor if type, shape and device match, else a new one."""
    if own is not None and (own.dtype, own.shape, own.device.type) == (dtype, shape, device):
        return own
    return torch.empty(shape, dtype=dtype, device=device)
