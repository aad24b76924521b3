"""The part of a script's ``State`` that all frontends share: its values, and how ranks get them."""

from __future__ import annotations

import base64
import json
import pickle
from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from hvd_elastic.checkpoint.header import PLAIN, decode_values
from hvd_elastic.checkpoint.stream import Content, has_not_finite
from hvd_elastic.communicator.interface import Communicator, RingRank
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.script.helper_copies import HelperCopies
from hvd_elastic.script.spread import Content as Pieces
from hvd_elastic.script.spread import spread
from hvd_elastic.worker import context
from hvd_elastic.worker.frontend import State
from hvd_elastic.worker.progress import Progress

SCALER = "_grad_scaler"
"""Beginning of the names of gradient scalers, which become part of the state by themselves. Older
releases stored one of them only, also where the script had given it to ``State(...)``."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is a dict of plain values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def _why(error: Exception) -> str:
    return f": {error}" if isinstance(error, ScriptError) else ""


class _Everything(Container[int]):
    """Contains the key of every tensor, so that every one is sent from its live memory."""

    def __contains__(self, key: object) -> bool:
        return True


class ScriptState(State):
    """Base class of each frontend's ``State``: objects kept by reference, and plain values.

    Args:
        model: the model, or None.
        optimizer: the optimizer, or None.
        values: other values.

    Raises:
        ScriptError: a name is taken, or a value is neither an object nor plain; names it.

    Attributes:
        plain_kinds, object_kinds: what plain data is, and what objects have, for messages.
    """

    _pickler: type[pickle.Pickler] = pickle.Pickler
    """Copies the framework's tensors fast."""
    _content_kind: type[Any]
    """The framework's Content, called with values, addresses and ``copy_own``."""
    plain_kinds = "numbers, strings, lists, dicts, tensors"
    object_kinds = "state_dict() and load_state_dict()"

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        self._objects: dict[str, Any] = {}
        self._plain: dict[str, Any] = {}
        for name, value in {"model": model, "optimizer": optimizer, **values}.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ScriptError(
                    f"State(): {name!r} cannot be the name of a value, choose another"
                )
            if self._is_object(name, value):
                self._objects[name] = value
            elif value is not None or name in values:
                self._plain[name] = value
        self._checked: dict[str, type] = {}
        for name, value in self._plain.items():
            self._check_plain(f"State(): {name!r}", name, value)
        self._helpers = HelperCopies(self._pickler)
        self._context = context.current()
        self._build()
        self._not_finite = self._find_not_finite()
        self._saved = self.take_snapshot()
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
            self._check_plain(f"state.{name}", name, value)
            self._plain[name] = value

    def _check_plain(self, place: str, name: str, value: Any) -> None:
        """Raise ScriptError for a value that no rank could receive; ``place``: for the message.

        Of values that take long to look at, the first of each type is checked.
        """
        kind = type(value)
        if kind in PLAIN or self._checked.get(name) is kind:
            return
        try:
            self._try_plain(value)
        except Exception as error:  # frameworks raise many kinds, all meaning the same here
            raise ScriptError(
                f"{place} is a {kind.__name__}, which is neither plain data ({self.plain_kinds}) "
                f"nor an object with {self.object_kinds} that was given to State(...). Turn it "
                f"into one of them{_why(error)}"
            ) from error
        self._checked[name] = kind

    def commit(self, **metrics: Any) -> None:
        """Add numbers (``loss=loss``) to the run's metrics; without our loader, end the step.

        A tensor is read only when metrics are due. With our own loader nothing else happens: the
        state is saved when the loop body ends. In a script without our loader, the step ends here
        and the world may change here: call it once a step, at the end of the loop body, and keep
        the position in the data as one of the state's values.
        """
        self._context.worker.averagers.collect()
        self._context.commit(metrics)

    # -- for the library -------------------------------------------------------------------

    def keep(self, name: str, item: Any) -> None:
        if all(item is not each for each in self._objects.values()):  # the script may have done so
            self._objects[name] = item

    def named_objects(self) -> dict[str, Any]:
        """Return the objects that are kept by reference, by name."""
        return dict(self._objects)

    def save_values(self, snapshot: Any = None, *, tensors: bool = False) -> None:
        if snapshot is None:
            self._helpers.body_ends()
        self._saved = snapshot or self.take_snapshot(tensors=tensors)

    def step_begins(self) -> None:
        self._helpers.refuse_changed(self._objects, self._context.worker.frontend.takes_step)

    def roll_back(self) -> None:
        self._saved.restore(self._plain, self._objects)

    def keep_moving(self) -> None:
        pass

    def undo_moving(self) -> None:
        pass

    def module_versions(self) -> int:
        return 0  # not every framework counts changes

    def content(self, *, copy_own: bool = True) -> Content:
        made: Content = self._content_kind(self._values(), self._shared(), copy_own=copy_own)
        made.weights = self._weights()
        return made

    def _live_content(self) -> Any:
        """Return the Content of all of the state, with ``tensors``: those of its stream."""
        values = {**self._values(), "left_out": self._left_out()}
        return self._content_kind(values, _Everything(), copy_own=False)

    def sync(
        self,
        communicator: Communicator,
        root_rank: RingRank,
        progress: Progress,
        has_state: Callable[[Progress], bool] = lambda _: False,
    ) -> Progress:
        # The structure is sent as plain data. Tensors are sent in a few large messages, from live
        # tensors and, where shapes agree, into live tensors.
        own, generators = self._live_content(), self._context.worker.generators
        if communicator.rank == root_rank:
            known = self._known(own)
            header: dict[str, Any] = {
                "values": own.values,
                "opaque": base64.b64encode(own.encode_opaque()).decode("ascii"),
                "tensors": [
                    (info.name, info.dtype, info.shape, self._device(tensor))
                    for info, tensor in zip(own.stream, own.tensors, strict=True)
                ],
                "known": known,
                "progress": progress.as_state(),
                "generators": generators.offered(),
            }
            communicator.broadcast_bytes(json.dumps(header).encode(), root_rank)
            every = generators.all_bits
            agreed = spread(own.tensors, known, True, communicator, root_rank, self._pieces, every)
            generators.settle(agreed if communicator.size > 1 else 0)
            return progress
        header = json.loads(communicator.broadcast_bytes(b"", root_rank))
        theirs = Progress.from_dict(header["progress"])
        has = has_state(theirs)
        live = dict(zip((info.name for info in own.stream), own.tensors, strict=True))
        # A rank that took no step of its own where the others took some has no moments of one.
        has = has and all(name in live for name, *_ in header["tensors"])
        tensors = {
            name: self._fitting(live.get(name), dtype, tuple(shape), device)
            for name, dtype, shape, device in header["tensors"]
        }
        ordered = list(tensors.values())
        agreed = generators.agree(header["generators"], take=not has)
        generators.settle(
            spread(ordered, header["known"], has, communicator, root_rank, self._pieces, agreed)
        )
        opaque = self._decode_opaque(base64.b64decode(header["opaque"]))
        self._set_values(decode_values(header["values"], tensors, opaque), f"rank {root_rank}")
        return theirs

    def load(self, payload: dict[str, Any], path: str) -> Progress:
        missing = self._objects.keys() - payload["objects"].keys()
        different = missing | (payload["objects"].keys() - self._objects.keys())
        if not all(name.startswith(SCALER) for name in different):
            raise CheckpointError(
                f"checkpoint {path} holds {sorted(payload['objects'])}, this script's State has "
                f"{sorted(self._objects)}. Resume with the script that wrote it."
            )
        for name in sorted(missing):
            self._context.worker.warn(
                f"checkpoint {path} has no state of a gradient scaler ({name}): it begins as the "
                "script has made it"
            )
        initial = self._values()["objects"] if missing else {}
        payload = {**payload, "objects": {**initial, **payload["objects"]}}
        # All checks come before anything is overwritten.
        for name, item in self._objects.items():
            found = payload["objects"][name]
            own = self._tensors_of(item)
            if own is None:
                continue
            for key in {**own, **found}:
                here, there = self._shape(own, key), self._shape(found, key)
                if here != there and not self._may_differ(item, key, own.get(key), found.get(key)):
                    raise CheckpointError(
                        f"checkpoint {path} is of another model: {name}.{key} is {there} in the "
                        f"checkpoint and {here} in this script. Resume with the script and options "
                        "that wrote it, or start a new run"
                    )
        self._set_values(payload, f"checkpoint {path}")
        return Progress.from_dict(payload["progress"])

    # -- for each framework ----------------------------------------------------------------

    @abstractmethod
    def _is_object(self, name: str, value: Any) -> bool:
        """Return whether a value is kept by reference; raise ScriptError if it is refused."""

    @abstractmethod
    def _try_plain(self, value: Any) -> None:
        """Raise an error of any kind if a value is not plain data."""

    def _build(self) -> None:
        """Create what objects create late, so that all ranks have the same from the beginning."""

    def _values(self) -> dict[str, Any]:
        """Return all of the state as nested values: ``objects`` and ``plain``, by name."""
        objects = {}
        for name, item in self._objects.items():
            tensors = self._tensors_of(item)
            objects[name] = item.state_dict() if tensors is None else tensors
        return {"objects": objects, "plain": self._plain}

    def _weights(self) -> Callable[[str], bool]:
        """Return a function that tells the names of weights, which have to be finite.

        These are the tensors of models that are trained, and those that are not parameters, such
        as the statistics of batch normalisation.
        """
        models = tuple(f"{name}." for name in self._models())
        others = self._not_finite | self._frozen()
        return lambda name: name.startswith(models) and name not in others

    def _find_not_finite(self) -> set[str]:
        """Return the names of constants of models that are not finite, such as a mask of -inf."""
        return {
            name
            for name, dtype, tensor in self._constants()
            if any(has_not_finite(dtype, piece()) for piece in self._pieces(tensor))
        }

    @abstractmethod
    def _models(self) -> Mapping[str, Any]:
        """Return the models among the objects, by name."""

    @abstractmethod
    def _constants(self) -> Iterator[tuple[str, str, Any]]:
        """Yield name in a checkpoint, type and tensor of what models hold besides parameters."""

    def _frozen(self) -> set[str]:
        """Return the names in a checkpoint of parameters that are not trained."""
        return set()

    def _shared(self) -> set[int]:
        """Return the addresses of the tensors that are the same on all ranks."""
        return self.lasting()

    @abstractmethod
    def _known(self, content: Any) -> list[bool]:
        """Return for each tensor whether it is the same on every rank that holds the state."""

    def _device(self, tensor: Any) -> str:
        """Return the kind of device that a tensor is on; "" where the framework decides it."""
        return ""

    @abstractmethod
    def _pieces(self, tensor: Any) -> Pieces:
        """Return functions that return the bytes of a tensor, piece by piece."""

    @abstractmethod
    def _fitting(self, own: Any, dtype: str, shape: tuple[int, ...], device: str) -> Any:
        """Return this rank's live tensor if it is like the root's, else a new one."""

    def _decode_opaque(self, data: bytes) -> Sequence[Any]:
        """Return the values that only the framework can represent; by default there are none."""
        return ()

    def _set_object(self, item: Any, values: Any) -> None:
        item.load_state_dict(values)

    @abstractmethod
    def _tensors_of(self, item: Any) -> Mapping[str, Any] | None:
        """Return the tensors that a checkpoint must have for an object; None: it has no model's."""

    def _may_differ(self, item: Any, key: str, here: Any, there: Any) -> bool:
        """Return whether a value may have another shape in a checkpoint than in this script."""
        return False

    def _left_out(self) -> Mapping[str, Any]:
        """Return what ranks that join get and checkpoints do not hold."""
        return {}

    def _shape(self, tensors: Mapping[str, Any], name: str) -> str:
        """Return the shape of one of an object's values, for a comparison and a message."""
        if name not in tensors:
            return "missing"
        shape = getattr(tensors[name], "shape", None)
        return "no tensor" if shape is None else str(tuple(shape))

    def _set_values(self, values: dict[str, Any], source: str) -> None:
        """Set the state to received values; ``source`` is for messages."""
        for name, item in self._objects.items():
            try:
                self._set_object(item, values["objects"][name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"the state of {name!r} from {source} does not fit this script: {error}"
                ) from error
        self._plain.update(values["plain"])
