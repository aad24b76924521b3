"""Describes a dataset in a few numbers, by which ranks find that theirs differ.

Ranks share out indices, so an index must mean the same example on all of them. It does not where a
script splits its data at random without a seed, or lists a folder in the order of the file system.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import stat
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fcntl import F_GETFL, fcntl
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from hvd_elastic.model.sharding import attribute_of
from hvd_elastic.worker.input_source import Source

_ENTRIES, _ROWS, _EXAMPLES = 1024, 8, 3
"""Entries of a list, rows of an array and examples that are sampled, evenly spaced: so the time
does not grow with the dataset (10 ms with a million paths). In another order almost all differ."""
_NUMBERS = 1 << 16
"""Most numbers of a row or an example that are compared."""
_PARTS = 64
"""Most datasets of which another one consists, and most parts of an example, that are compared."""
_DEPTH = 5
_READ_S = 5.0
"""Longest time to wait for the examples, which are read while the script makes its model."""
_END_S = 10.0
"""Longest time to wait for what a process that has taken too long holds, such as a shared lock."""
_TOLERANCE = 0.05
"""Least relative difference of two arrays of an example: another image differs by more, and one
that another version of a library decodes by less."""
_EXAMPLES_FIELD = "examples"
ALIKE = (
    "An index has to mean the same example on all ranks; else some are trained on twice, others "
    "never, and some of the test set. Seed what is drawn when the data set is made "
    "(random_split(..., generator=torch.Generator().manual_seed(0))), sort what os.listdir() or "
    "glob() returns, and bring the same files to all hosts (copyclust)"
)
"""What to do where datasets differ."""
_FORK = multiprocessing.get_context("fork")


class DataDigest:
    """Fields of a dataset that ranks compare, by name.

    Attributes:
        fields: checksums of what the dataset holds for each example in lists and arrays of
            integers and texts (indices of a subset, names of files, targets), by the name of the
            attribute.
    """

    def __init__(self, dataset: Any, examples: int) -> None:
        self.fields: dict[str, int] = {}
        self._sketches: dict[str, Any] = {}
        self.words = f"the {type(dataset).__name__} of {examples} examples"
        self._examples = examples
        # Its shards are known by their sizes, and examples before its place may be gone.
        self._is_read_in_order = any(
            attribute_of(dataset, name) for name in ("blocks", "ordered", "endless")
        )
        self._reading: tuple[Any, Connection, float] | None = None
        for name, value in _per_example(dataset, examples, "", _DEPTH):
            if isinstance(value, np.ndarray):
                self._sketches[name] = [_sketch(value)]
            else:
                self.fields[name] = zlib.crc32(repr(value).encode("utf-8", "surrogatepass"))

    def read_examples(self, source: Source) -> None:
        """Begin to read a few examples, in a process of its own: that may open files, or count."""
        if self._is_read_in_order:
            return
        receive, send = _FORK.Pipe(duplex=False)
        count = min(_EXAMPLES, self._examples)
        indices = sorted({self._examples * (2 * n + 1) // (2 * count) for n in range(count)})
        with suppress(OSError):  # no process or no memory left: nothing is compared
            process = _FORK.Process(target=_read, args=(source, indices, send), daemon=True)
            process.start()
            self._reading = process, receive, time.monotonic() + _READ_S
        send.close()

    def described(self) -> dict[str, Any]:
        """Return all fields, for :func:`difference`; plain data."""
        if self._reading is not None:
            process, receive, until = self._reading
            self._reading = None
            with suppress(EOFError, OSError):
                if receive.poll(max(0.0, until - time.monotonic())):
                    self._sketches[_EXAMPLES_FIELD] = json.loads(receive.recv_bytes())
            process.terminate()
            process.join(_END_S)
            process.kill()
            process.join()
        return {"len()": self._examples, **self.fields, **self._sketches}


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the name of the first field in which two datasets differ; "": none is known.

    A field that only one of them has is left out: reading its examples may have taken too long.
    """
    for name, mine in one.items():
        theirs = other.get(name, mine)
        if not isinstance(mine, list) or not isinstance(theirs, list):
            if mine != theirs:
                return name
        elif any(not _alike(a, b) for a, b in zip(mine, theirs, strict=False) if a and b):
            return name
    return ""


def _alike(one: list[Any], other: list[Any]) -> bool:
    """Return whether two examples are the same, but for rounding; see :func:`_sketch`."""
    (exact, sums), (other_exact, other_sums) = one, other
    return exact == other_exact and not any(
        abs(a - b) > _TOLERANCE * max(p, q) ** 0.5
        for (a, p), (b, q) in zip(sums, other_sums, strict=True)
    )


# -- what a dataset holds for each example ----------------------------------------------------


def _per_example(value: Any, examples: int, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield names and samples of what has an entry for each example, in datasets in it too."""
    if depth == 0:
        return
    if isinstance(value, np.ndarray) or _is_tensor(value):
        if len(value.shape) and value.shape[0] == examples:
            yield name, _rows(value)
    elif isinstance(value, (list, tuple)) and len(value) == examples > 1:
        step = -(-examples // _ENTRIES)
        entries = _entries(value[::step])
        if entries is not None:
            yield name or "entries", entries
        elif examples <= _PARTS:
            yield from _parts(value, examples, name, depth)
    elif isinstance(value, (list, tuple, dict)):
        yield from _parts(value, examples, name, depth)
    elif (
        hasattr(type(value), "__getitem__")
        and hasattr(type(value), "__dict__")
        and name.count(".") < _DEPTH
    ):
        with suppress(Exception):  # whatever the script's __len__ raises
            examples = len(value)
            for key, attribute in vars(value).items():
                path = f"{name}.{key}" if name else key
                yield from _per_example(attribute, examples, path, depth - 1)


def _parts(
    value: Sequence[Any] | Mapping[Any, Any], examples: int, name: str, depth: int
) -> Iterator[tuple[str, Any]]:
    if len(value) <= _PARTS:
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _per_example(part, examples, f"{name}[{key!r}]", depth - 1)


def _is_tensor(value: Any) -> bool:
    return type(value).__module__ == "torch" and hasattr(value, "untyped_storage")


def _rows(value: Any) -> Any:
    """Return a sample of an array: a list of its integers or texts, or some of its rows."""
    is_exact = len(value.shape) == 1 and "float" not in str(value.dtype)
    sampled = value[:: -(-value.shape[0] // (_ENTRIES if is_exact else _ROWS))]
    if _is_tensor(value):
        sampled = sampled.detach().cpu().float() if not is_exact else sampled.cpu()
    array = np.asarray(sampled)
    return _entries(array.tolist()) if is_exact else array


def _entries(values: Sequence[Any]) -> list[Any] | None:
    """Return plain entries, with names of files relative to their folder; None: they are others."""
    texts: list[str] = []

    def plain(entry: Any) -> Any:
        if isinstance(entry, (tuple, list)) and len(entry) <= _PARTS:
            return [plain(each) for each in entry]
        if isinstance(entry, (str, PurePath)):
            texts.append(str(entry))
            return str(entry)
        if isinstance(entry, (bool, int, bytes, np.integer, np.bool_)):
            return entry if isinstance(entry, bytes) else int(entry)
        return None

    entries = [plain(each) for each in values]
    if not entries or entries[0] is None or entries[0] == []:
        return None
    paths = [text for text in texts if "/" in text]
    common = os.path.commonprefix([min(paths), max(paths)]) if paths else ""  # noqa: RUF071
    folder = common[: common.rfind("/") + 1]

    def relative(entry: Any) -> Any:
        if isinstance(entry, list):
            return [relative(each) for each in entry]
        return entry.removeprefix(folder) if isinstance(entry, str) else entry

    return [relative(each) for each in entries] if folder else entries


# -- examples ----------------------------------------------------------------------------------


def _read(source: Source, indices: Sequence[int], send: Connection) -> None:
    """Send what is compared of some examples; None: reading one twice gives something else."""
    found: list[list[Any] | None] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # gives back what it holds
    _take_own_files(send.fileno())
    with suppress(Exception):  # whatever the script's dataset raises, it will again in training
        source.start(0, 1)
        for index in indices:
            once, again = (_sketch(source.make(0, [index])) for _ in range(2))
            found.append(once if once == again else None)
    send.send_bytes(json.dumps(found).encode())


def _take_own_files(kept: int) -> None:
    """Leave the parent's places in files, and its connections, as they are.

    A child shares them: what it read there the script would not find again.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for file in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the folder that was listed
            kind = os.fstat(file).st_mode
            if stat.S_ISREG(kind):
                own, place = null, os.lseek(file, 0, os.SEEK_CUR)
                with suppress(OSError):  # no right to open it again: it cannot be read
                    own = os.open(f"/proc/self/fd/{file}", fcntl(file, F_GETFL) & os.O_ACCMODE)
                    os.lseek(own, place, os.SEEK_SET)
                os.dup2(own, file)
            elif (stat.S_ISSOCK(kind) or stat.S_ISFIFO(kind)) and file != kept:
                os.dup2(null, file)
    for output in (1, 2):  # the script prints what its dataset has to say when it trains
        os.dup2(null, output)


def _sketch(example: Any) -> list[Any]:
    """Return a checksum of an example's integers and texts, and sums for each array of numbers.

    Processors and versions of libraries decode the same image a little differently, so arrays are
    compared as parameters are (:mod:`hvd_elastic.worker.checks.replica_check`), by a sum with
    random signs, beside which is the sum of squares.
    """
    exact: list[Any] = []
    sums: list[list[float]] = []

    def visit(value: Any) -> None:
        if len(exact) >= _PARTS:
            return
        if isinstance(value, Mapping):
            for key, each in value.items():
                exact.append(str(key))
                visit(each)
        elif isinstance(value, (list, tuple)):
            exact.append(len(value))
            for each in value:
                visit(each)
        elif isinstance(value, (str, PurePath)):
            exact.append(str(value).rpartition("/")[2])  # a file may be in another folder
        elif isinstance(value, (bool, int, bytes)) or value is None:
            exact.append(value)
        elif isinstance(value, float) or hasattr(type(value), "__array__"):
            with suppress(Exception):  # a tensor of a GPU, or of a type that NumPy lacks
                visit_array(np.asarray(value))

    def visit_array(array: np.ndarray) -> None:
        flat = array.reshape(-1)[:_NUMBERS]
        exact.append(array.shape)
        if array.dtype.kind in "iub" and array.dtype != np.uint8:  # others may be images
            exact.append(zlib.crc32(flat.astype(np.int64).tobytes()))
        elif array.dtype.kind in "fu":
            numbers = np.nan_to_num(flat.astype(np.float64))
            signed = numbers @ np.resize(_signs(), len(numbers))
            sums.append([round(float(signed), 6), round(float(numbers @ numbers), 6)])

    visit(example)
    return [zlib.crc32(repr(exact).encode("utf-8", "surrogatepass")), sums]


@cache
def _signs() -> np.ndarray:
    bits = np.random.PCG64(1).random_raw(4096) & np.uint64(1)  # the same in any NumPy
    return bits.astype(np.float64) * 2 - 1
