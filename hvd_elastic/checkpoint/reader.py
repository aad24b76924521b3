"""Reads checkpoints: their header, and their tensors as NumPy arrays or into a framework's memory.

Everything is read as data, JSON and bytes, so no code of a file is run. Each shard that is read is
compared with its SHA-256.

>>> load_arrays("nowhere/step-000000000100.json")
Traceback (most recent call last):
    ...
hvd_elastic.errors.CheckpointError: checkpoint nowhere/step-000000000100.json cannot be read: ...
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_elastic.checkpoint.header import (
    LENGTH_BYTES,
    OPAQUE,
    Header,
    TensorInfo,
    decode_values,
)
from hvd_elastic.checkpoint.manifests import parse_manifest
from hvd_elastic.checkpoint.shards import ShardInfo
from hvd_elastic.errors import CheckpointError
from hvd_elastic.frameworks import TITLES
from hvd_elastic.json_text import parse_json

Make = Callable[[TensorInfo], tuple[Any, Any]]
"""Function that returns a new tensor of a framework, and the buffer of its data."""
_DAMAGED = (
    *(RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError),
    *(RecursionError, MemoryError),
)
"""What is raised for content that is damaged, or made by others to do harm."""
_READ_BYTES = 4 << 20  # most bytes per read; skipped data is held in memory only in such pieces


def read_header(path: Path | str) -> Header:
    """Return the header of a checkpoint, which describes its tensors, without reading their data.

    Args:
        path: path of the manifest; the shards are in the same folder.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    with open_checkpoint(path) as reader:
        return reader.read_header()


def load_arrays(
    path: Path | str, names: Collection[str] | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Return tensors of a checkpoint by name, without the framework that wrote it.

    The bits of a type that NumPy lacks are returned as unsigned integers: ``bfloat16`` as
    ``uint16``.

    Args:
        path: path of the manifest; the shards are in the same folder.
        names: names of the tensors; None: all. Shards without any of them are not read.

    Raises:
        CheckpointError: as :func:`read_header`; or the checkpoint lacks one of the names.
    """
    arrays = {}
    with open_checkpoint(path) as reader:
        header = reader.read_header()
        there = [tensor.name for tensor in header.tensors if tensor.name != OPAQUE]
        wanted = set(there if names is None else names)
        missing = wanted - set(there)
        if missing:
            raise CheckpointError(f"checkpoint {path} has no tensor {min(missing)!r}")

        def place(tensor: TensorInfo) -> np.ndarray[Any, Any] | None:
            if tensor.name not in wanted:
                return None
            arrays[tensor.name] = np.empty(tensor.shape, tensor.array_dtype)
            return arrays[tensor.name].reshape(-1).view(np.uint8)

        reader.read_tensors(header, place)
    return arrays


def load_file(path: Path, make: Make) -> Any:
    """Return the values in a file that is the first shard of a checkpoint, and its only one.

    Args:
        make: returns a new tensor, and the buffer of its data.

    Raises:
        CheckpointError: it is another file, or damaged.
    """
    try:
        data = np.memmap(path, np.uint8, "r")
        size = int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
        body = data[LENGTH_BYTES + size :]
        header = Header.decode(data[LENGTH_BYTES : LENGTH_BYTES + size].tobytes(), len(body))
        tensors, at = {}, 0
        for info in header.tensors:
            tensors[info.name], buffer = make(info)
            buffer[:] = body[at : at + info.bytes]
            at += info.bytes
        return decode_values(header.values, tensors, ())
    except (*_DAMAGED, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be loaded, it is damaged or not a file of hvd.save: {error}"
        ) from error


@contextlib.contextmanager
def open_checkpoint(path: Path | str) -> Iterator[CheckpointReader]:
    """Open a checkpoint for reading; errors in its content are raised as CheckpointError."""
    path = Path(path)
    try:
        info = parse_manifest(parse_json(path.read_text(encoding="utf-8")), path.parent)
        with contextlib.closing(CheckpointReader(info.shards, path)) as reader:
            yield reader
    except _DAMAGED as why:
        said = str(why).strip().partition("\n")[0]
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded, it is damaged or not one of ours: {said}; use an "
            "older checkpoint of the same folder"
        ) from why
    except OSError as error:
        named = error.filename or path
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {named}: {error.strerror or error}"
        ) from error


class CheckpointReader:
    """Reads the bytes of all shards in order, and verifies each shard once it was read."""

    def __init__(self, shards: tuple[ShardInfo, ...], path: Path) -> None:
        self.shards = shards
        self._path = path
        self._following = iter(shards)
        self._shard = shards[0]
        self._file: Any = None
        self._left = 0
        self._next()

    def read_header(self) -> Header:
        """Read and return the header, which is at the beginning of the first shard."""
        size = int.from_bytes(self.read_bytes(LENGTH_BYTES), "little")
        here = self._shard.header - LENGTH_BYTES
        if size > here:
            raise ValueError(f"its header of {size} bytes does not end in {here}")
        data_bytes = sum(shard.bytes for shard in self.shards) - LENGTH_BYTES - size
        return Header.decode(self.read_bytes(size), data_bytes)

    def read_tensors(self, header: Header, place: Callable[[TensorInfo], Any]) -> None:
        """Read the tensors' data, which follows the header.

        Args:
            place: returns the buffer for a tensor's data; None to skip the tensor.
        """
        unwanted = 0
        for tensor in header.tensors:
            target = place(tensor)
            if target is None:
                unwanted += tensor.bytes
            else:
                self.skip(unwanted)
                self.fill(target)
                unwanted = 0
        self.skip(unwanted)
        self.verify_end()

    def load(
        self,
        frontend: str,
        make: Make,
        *,
        decode_opaque: Callable[[bytes], Sequence[Any]] = lambda _: (),
        name: str | None = None,
    ) -> dict[str, Any]:
        """Read and return what :meth:`~hvd_elastic.worker.frontend.State.load` takes.

        That is ``objects`` (name → values by name), ``plain`` (name → value) and ``progress``.

        Args:
            frontend: name of the framework that reads it, such as ``torch``.
            make: returns a new tensor, and the buffer of its data.
            decode_opaque: returns the values that only the framework can represent.
            name: return the state of this object alone, and read no other tensors.

        Raises:
            CheckpointError: another framework wrote it, or there is no object of that name.
        """
        header = self.read_header()
        if header.frontend != frontend:
            raise CheckpointError(
                f"checkpoint {self._path} was written by hvd_elastic.{header.frontend} and holds "
                f"values that {TITLES[frontend]} cannot take. Resume with the script that wrote it"
            )
        encoded = header.values
        if name is not None:
            encoded = named(name, encoded["objects"], self._path)
        wanted = _tensor_names(encoded)
        tensors: dict[str, Any] = {}
        opaque = bytearray()

        def place(info: TensorInfo) -> Any:
            if info.name == OPAQUE:
                opaque.extend(bytes(info.bytes))
                return opaque
            if info.name not in wanted:
                return None
            tensors[info.name], buffer = make(info)
            return buffer

        self.read_tensors(header, place)
        values = decode_values(encoded, tensors, decode_opaque(bytes(opaque)) if opaque else ())
        return values if name is not None else {**values, "progress": header.progress}

    def read_bytes(self, size: int) -> bytes:
        data = bytearray(size)
        self.fill(data)
        return bytes(data)

    def fill(self, target: Any) -> None:
        """Read the next bytes into a buffer."""
        view = memoryview(target)
        while view:
            self._open_next()
            size = self._file.readinto(view[: min(len(view), self._left, _READ_BYTES)])
            if not size:
                raise EOFError(f"{self._shard.path.name} is truncated")
            self._hash.update(view[:size])
            self._left -= size
            view = view[size:]

    def skip(self, size: int) -> None:
        """Skip the next bytes; shards that are skipped as a whole are not read."""
        while size:
            self._open_next()
            if self._left == self._shard.bytes <= size:
                size -= self._left
                self._next()
            else:
                some = min(size, self._left, _READ_BYTES)
                self.read_bytes(some)
                size -= some

    def verify_end(self) -> None:
        """Verify the last shard that was read, and that no data is left."""
        while self._file is not None:
            self._check()
            self._next()

    def close(self) -> None:
        """Close the current file."""
        if self._file is not None:
            self._file.close()

    def _open_next(self) -> None:
        while not self._left:
            self._check()
            self._next()
            if self._file is None:
                raise EOFError("its shards are shorter than what is in them")

    def _next(self) -> None:
        self.close()
        shard = next(self._following, None)
        self._file = None
        if shard is not None:
            self._shard = shard
            self._file = shard.path.open("rb", buffering=0)
            self._left = shard.bytes
            self._hash = hashlib.sha256()

    def _check(self) -> None:
        if self._left or self._hash.hexdigest() != self._shard.sha256:
            raise ValueError(f"{self._shard.path.name} is corrupted: its SHA-256 is another")


def named(name: str, objects: Mapping[str, Any], path: Path | str) -> Any:
    """Return an object of a checkpoint; raise CheckpointError that names those it has."""
    if name in objects:
        return objects[name]
    there = ", ".join(known for known in objects if not known.startswith("_"))
    raise CheckpointError(f"checkpoint {path} holds no {name!r}; it holds {there or 'no object'}")


def _tensor_names(encoded: Any) -> set[str]:
    """Return the names of the tensors that encoded values refer to."""
    names: set[str] = set()
    if isinstance(encoded, dict):
        if isinstance(name := encoded.get("$tensor"), str):
            names.add(name)
        encoded = [*encoded.values()]
    if isinstance(encoded, list):
        for item in encoded:
            if isinstance(item, (dict, list)):
                names |= _tensor_names(item)
    return names
