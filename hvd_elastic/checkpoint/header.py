"""Encodes and decodes the header of a checkpoint: its tensors, progress, and other values.

The concatenated shards of a checkpoint are one file in the safetensors format. It begins with the
length of a JSON object (8 bytes, little-endian) and that object, which lists every tensor with its
type, shape and position in the data that follows. Everything specific to this library is one entry
of its ``__metadata__``. docs/run-folder.md describes all fields.

Values that are not tensors (learning rates, counters, the structure of a ``state_dict``) are JSON
too; :func:`encode_values` represents Python types that JSON lacks. Values that only one framework
can represent are stored as bytes, in the tensor :data:`OPAQUE`.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_elastic.errors import ScriptError
from hvd_elastic.json_text import parse_json

OPAQUE = "__hvd_elastic__.opaque"
"""Name of the tensor with bytes that only the checkpoint's framework can read."""
RESERVED = frozenset({OPAQUE, "__metadata__"})  # not available as names of a script's tensors
LENGTH_BYTES = 8  # of the header's length, as defined by safetensors
_KEY = "hvd_elastic"  # of this library's entry in __metadata__

_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Names of types in numpy (or ml_dtypes) and in safetensors; other names are written unchanged."""
_NAMES = {there: here for here, there in _SAFETENSORS.items()}
_NUMPY = {name for name in _SAFETENSORS if not name.startswith(("bfloat", "float8"))}
_NUMPY.add("complex128")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint.

    Attributes:
        name: keys to it in the state, joined by dots, such as ``model.layers.0.weight``.
        dtype: name of its type in numpy or ml_dtypes, such as ``float32`` or ``bfloat16``.
        bytes: size of its data.

    >>> TensorInfo("w", "bfloat16", (2, 3), 12).array_dtype
    dtype('uint16')
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Return its numpy type; an unsigned integer of the same size if numpy lacks the type."""
        if self.dtype in _NUMPY:
            return np.dtype(self.dtype).newbyteorder("<")
        elements = math.prod(self.shape)
        return np.dtype(f"<u{self.bytes // elements if elements else 1}")


@dataclass(frozen=True)
class Header:
    """The header of a checkpoint: everything except the tensors' data.

    Attributes:
        tensors: descriptions of the tensors, in the order of their data.
        progress: point in training: ``step``, ``epoch``, ``position``, ``examples`` and others.
        frontend: name of the framework that wrote it, such as ``torch``.
        values: encoded values that are not tensors; see :func:`decode_values`.
    """

    tensors: tuple[TensorInfo, ...]
    progress: Mapping[str, Any]
    world: int
    frontend: str
    library: str
    values: Any = field(repr=False)

    def encode(self) -> bytes:
        """Return the beginning of the first shard, up to the data of the first tensor."""
        about = {
            "library": self.library,
            "frontend": self.frontend,
            "world": self.world,
            "progress": dict(self.progress),
            "values": self.values,
        }
        described: dict[str, Any] = {"__metadata__": {_KEY: _dump(about)}}
        at = 0
        for tensor in self.tensors:
            described[tensor.name] = {
                "dtype": _SAFETENSORS.get(tensor.dtype, tensor.dtype),
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.bytes],
            }
            at += tensor.bytes
        text = _dump(described).encode("ascii")
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

    @classmethod
    def decode(cls, text: bytes, data_bytes: int) -> Header:
        """Return the header that :meth:`encode` wrote after the length.

        Args:
            text: JSON object.
            data_bytes: length of the data that follows it.

        Raises:
            ValueError: the object is not a valid header, or describes data of another length.
        """
        described = parse_json(text)
        about = parse_json(described.pop("__metadata__")[_KEY])
        tensors = []
        at = 0
        for name, entry in described.items():
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            numbers = (begin, end, *shape)
            if not all(type(number) is int and number >= 0 for number in numbers) or begin != at:
                raise ValueError(f"tensor {name!r} has the shape {shape} at {begin} to {end}")
            tensor = TensorInfo(name, _NAMES.get(entry["dtype"], entry["dtype"]), shape, end - at)
            if math.prod(shape) * tensor.array_dtype.itemsize != tensor.bytes:
                raise ValueError(f"tensor {name!r} has {tensor.bytes} bytes for the shape {shape}")
            tensors.append(tensor)
            at = end
        if at != data_bytes:
            raise ValueError(f"it describes {at} bytes of data, and there are {data_bytes}")
        fields = {name: about[name] for name in ("progress", "world", "frontend", "library")}
        return cls(tuple(tensors), values=about["values"], **fields)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# -- values that are not tensors

# Types whose values need no framework to be encoded.
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_JSON_INTEGERS = range(-(2**63), 2**63)  # what other JSON readers can represent
_ABSENT = object()  # distinguishes a missing attribute from one that is None

Path = tuple[Any, ...]
Leaf = Callable[[Any, Path], Any]


def encode_values(value: Any, leaf: Leaf, path: Path = ()) -> Any:
    """Return nested dicts, lists, tuples, sets and plain values as JSON data.

    A type that JSON lacks becomes an object with one key that begins with ``$``. NumPy scalars
    become Python numbers, and subclasses of dict and tuple become dicts and tuples, except
    ``OrderedDict`` and ``Counter``.

    Args:
        leaf: returns the encoding of a value of the framework, :data:`NotImplemented` for others.
        path: keys that lead to ``value``.

    Raises:
        ScriptError: a value cannot be encoded; the message names its keys and type.

    >>> encode_values({"lr": 0.1, "betas": (0.9, 0.99)}, lambda value, path: NotImplemented)
    {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.99]}}
    """
    if type(value) in PLAIN:
        return _encode_plain(value)
    encoded = leaf(value, path)
    if encoded is not NotImplemented:
        return encoded
    if isinstance(value, dict):
        return _encode_dict(value, leaf, path)
    if isinstance(value, (list, tuple, set)):
        items = [encode_values(item, leaf, (*path, number)) for number, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {"$tuple" if isinstance(value, tuple) else "$set": items}
    if isinstance(value, np.generic) and type(value.item()) in PLAIN:
        return _encode_plain(value.item())
    raise ScriptError(
        f"{describe_place(path)} is a {type(value).__module__}.{type(value).__qualname__} and "
        "cannot be put into a checkpoint; use numbers, strings, tensors of the framework, or "
        "lists, tuples, sets and dicts of them"
    )


def unused_name(base: str, taken: Container[str]) -> str:
    """Return a name that is not taken: ``base``, or else with the first number that is free.

    >>> unused_name("w", {"w", "w~2"})
    'w~3'
    """
    others = (f"{base}~{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([base], others) if name not in taken)


def describe_place(path: Path) -> str:
    """Return the keys to a value as they are written in Python."""
    return "".join(f"[{key!r}]" for key in path) or "the value"


def _encode_plain(value: Any) -> Any:
    if type(value) is int and value not in _JSON_INTEGERS:
        return {"$int": hex(value)}
    if type(value) is float and not math.isfinite(value):
        return {"$float": repr(value)}
    if type(value) is complex:
        return {"$complex": [_encode_plain(value.real), _encode_plain(value.imag)]}
    if type(value) in (bytes, bytearray):
        return {f"${type(value).__name__}": base64.b64encode(value).decode("ascii")}
    return value


def _encode_dict(value: dict[Any, Any], leaf: Leaf, path: Path) -> Any:
    items = []
    for key, item in value.items():
        encoded = key
        if type(key) is not str:
            try:
                encoded = encode_values(key, leaf)
            except ScriptError as error:
                raise ScriptError(f"in a key of {describe_place(path)}: {error}") from error
        items.append([encoded, encode_values(item, leaf, (*path, key))])
    if isinstance(value, OrderedDict):
        # PyTorch keeps the versions of a model's layers in this attribute of a state_dict.
        metadata = getattr(value, "_metadata", _ABSENT)
        if metadata is _ABSENT:
            return {"$ordered": items}
        return {
            "$ordered": items,
            "metadata": encode_values(metadata, leaf, (*path, "_metadata")),
        }
    if isinstance(value, Counter):
        return {"$counter": items}
    if all(type(key) is str and not key.startswith("$") for key in value):
        return dict(items)
    return {"$dict": items}


def decode_values(encoded: Any, tensors: Mapping[str, Any], opaque: Sequence[Any]) -> Any:
    """Return the value that :func:`encode_values` encoded.

    Args:
        encoded: result of ``encode_values``.
        tensors: tensors by name, for ``{"$tensor": name}``.
        opaque: values of the framework by index, for ``{"$opaque": index}``.

    Raises:
        ValueError, TypeError, KeyError, IndexError: ``encoded`` is not such a result.
    """

    def decode(item: Any) -> Any:
        return decode_values(item, tensors, opaque)

    if isinstance(encoded, list):
        return [decode(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag = next(iter(encoded), "")
    if not tag.startswith("$"):
        return {key: decode(item) for key, item in encoded.items()}
    content = encoded[tag]
    match tag:
        case "$tensor":
            return tensors[content]
        case "$opaque":
            return opaque[content]
        case "$tuple":
            return tuple(decode(content))
        case "$set":
            return set(decode(content))
        case "$dict":
            return dict(decode(content))
        case "$counter":
            return Counter(dict(decode(content)))
        case "$ordered":
            ordered = OrderedDict(decode(content))
            if "metadata" in encoded:
                ordered._metadata = decode(encoded["metadata"])  # type: ignore[attr-defined]
            return ordered
        case "$int":
            return int(content, 16)
        case "$float":
            return float(content)
        case "$complex":
            return complex(*decode(content))
        case "$bytes":
            return base64.b64decode(content, validate=True)
        case "$bytearray":
            return bytearray(base64.b64decode(content, validate=True))
    raise ValueError(f"a value is tagged {tag!r}, which this version does not know")
