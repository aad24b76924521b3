"""Rows of a Ray Dataset by index, for the data loaders of a training.

The blocks stay in Ray's object store. On each host the actor of the training serves them to its
processes: a training process, or one of its loader processes, asks for the rows of a batch and gets
copies of just those, and needs no connection to Ray of its own.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from hvd_elastic.errors import DataError
from hvd_elastic.model.sharding import Blocks
from hvd_elastic.programs.accept_peers import accept_peers
from hvd_elastic.programs.peers import connect_own, peer_uid

PLACE_VARIABLE = "HVD_ELASTIC_RAY_ROWS"
"""Variable with the socket of the host's actor and the key for it."""

_WINDOW = 16
_WAITING = 128
"""Most processes that connect at the same moment."""
_ENDING_S = 10.0
"""How long a process whose host's actor is gone waits for its own end [s]: its host is lost, and an
error would be one of the script, which ends the run."""


@dataclass(frozen=True)
class StoredRows:
    """A data set in Ray's object store.

    Attributes:
        blocks: references to its blocks, Arrow tables, in order.
    """

    blocks: tuple[Any, ...]
    sizes: tuple[int, ...]


class Preparer:
    """An actor that carries out the transforms of data sets and owns their blocks.

    The owner of a block must outlive the training, so it is placed on the head node, with which the
    whole cluster would end.
    """

    def store(self, dataset: Any, options: Any) -> StoredRows:
        """Carry out a data set's transforms; return where its rows are.

        Args:
            dataset: a ``ray.data.Dataset``, or a function that returns one.
            options: ``ray.data.ExecutionOptions``; None: Ray's own.

        Raises:
            DataError: it has no rows, or a column of integers has nulls.
        """
        import ray

        made = dataset() if callable(dataset) else dataset
        if options is not None:
            made.context.execution_options = options
        # A resumed training must find every row at its index again.
        made.context.execution_options.preserve_order = True
        blocks = made.materialize().to_arrow_refs()
        examine = ray.remote(num_cpus=0)(_examine)
        found = ray.get([examine.remote(block) for block in blocks])
        sizes = [size for size, _ in found]
        if not sum(sizes):
            raise DataError("the data set has no rows")
        for _, column in found:
            if column:
                raise DataError(
                    f"column {column!r} of integers has nulls, with which Ray makes floats of them "
                    "all: fill them by map_batches(), or leave their rows out by filter()"
                )
        pairs = [pair for pair in zip(blocks, sizes, strict=True) if pair[1]]
        return StoredRows(tuple(block for block, _ in pairs), tuple(size for _, size in pairs))


def _examine(table: Any) -> tuple[int, str]:
    """Return the number of rows of a table, and the first column of integers with nulls."""
    import pyarrow as pa

    for name, column in zip(table.column_names, table.columns, strict=True):
        is_list = pa.types.is_list(column.type)
        kind = column.type.value_type if is_list else column.type
        parts = [chunk.flatten() if is_list else chunk for chunk in column.chunks]
        if pa.types.is_integer(kind) and any(part.null_count for part in parts):
            return table.num_rows, name
    return table.num_rows, ""


class RowServer:
    """Serves rows to the processes of this host over a socket, to those that have the key.

    Args:
        names: names of the data sets that will be offered.
    """

    def __init__(self, names: Collection[str]) -> None:
        key = secrets.token_hex(16)
        # Names that begin with a zero byte are not in the file system and end with the process.
        name = f"hvd-ray-{secrets.token_hex(8)}"
        self.variables = {PLACE_VARIABLE: f"{name}:{key}"}
        self._key = key.encode()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{name}")
        listener.listen(_WAITING)
        self._stored = {name: Future[StoredRows]() for name in names}
        arguments = (listener, self._admit, self._serve)
        threading.Thread(target=accept_peers, args=arguments, name="rows", daemon=True).start()

    def offer(self, name: str, stored: StoredRows | DataError) -> None:
        """Serve a data set, or say why there is none; until then, whoever asks for it waits."""
        if isinstance(stored, DataError):
            self._stored[name].set_exception(stored)
        else:
            self._stored[name].set_result(stored)

    def _admit(self, plain: socket.socket) -> Connection:
        if peer_uid(plain) != os.getuid():
            raise PermissionError("it is another user's")
        client = Connection(plain.detach())
        try:
            deliver_challenge(client, self._key)
            answer_challenge(client, self._key)
        except BaseException:
            client.close()
            raise
        return client

    def _serve(self, client: Connection) -> None:
        with contextlib.suppress(OSError, EOFError), client:
            while True:
                asked = client.recv()
                try:
                    answer: Any = self._answer(asked)
                except DataError as error:
                    answer = error
                except Exception as error:  # noqa: BLE001  (such as a lost block, told to who asked)
                    answer = DataError(f"data set {asked.name!r}: {error}")
                client.send(answer)

    def _answer(self, asked: _Ask) -> Any:
        if asked.name not in self._stored:
            names = ", ".join(self._stored) or "none"
            raise DataError(f"there is no data set {asked.name!r}; the trainer was given: {names}")
        stored = self._stored[asked.name].result()

        import ray

        match asked:
            case _AskSizes():
                # A first read takes imports, for which the others would wait once a worker joins.
                _take(ray.get(stored.blocks[0]), [0])
                return stored.sizes
            case _AskRows(rows=rows):
                tables = ray.get([stored.blocks[block] for block in rows])
                return [_take(*pair) for pair in zip(tables, rows.values(), strict=True)]
            case _AskAhead(blocks=blocks):
                refs = [stored.blocks[block] for block in dict.fromkeys(blocks)]
                ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=True)
                return None


@dataclass(frozen=True)
class _AskSizes:
    """Asks for the sizes of the blocks of a data set."""

    name: str


@dataclass(frozen=True)
class _AskRows:
    """Asks for rows by block."""

    name: str
    rows: dict[int, list[int]]


@dataclass(frozen=True)
class _AskAhead:
    """Asks for blocks to be brought to this host, from which rows will be read."""

    name: str
    blocks: tuple[int, ...]


_Ask = _AskSizes | _AskRows | _AskAhead


def _take(table: Any, rows: list[int]) -> dict[str, Any]:
    """Return rows of an Arrow table as an array for each column."""
    from ray.data.block import BlockAccessor

    taken = BlockAccessor.for_block(table).take(rows)
    columns = BlockAccessor.for_block(taken).to_numpy()
    return columns if isinstance(columns, dict) else {"data": columns}


class RayDataset:
    """A map-style data set of the rows of a Ray Dataset that the trainer was given.

    It waits until the transforms have been carried out. Use it with
    :class:`hvd_elastic.torch.DataLoader`, with loader processes too.

    Args:
        name: name of the data set in ``ElasticTrainer(datasets={name: …})``.
        transform: called with every row, a dictionary by column; for what must be done anew in each
            epoch.
        shuffle_window: blocks that an epoch's order mixes at a time, >= 1; only about two windows
            of blocks have to fit into a node's object store. It must stay the same for a run.

    Attributes:
        blocks: sizes of the blocks and the window, by which the loader shuffles.

    Raises:
        DataError: the process is not one of an ``ElasticTrainer``, or there is no such data set.
    """

    def __init__(
        self,
        name: str = "train",
        transform: Callable[[dict[str, Any]], Any] | None = None,
        *,
        shuffle_window: int = _WINDOW,
    ) -> None:
        if shuffle_window < 1:
            raise DataError(f"shuffle_window is {shuffle_window}, it must be 1 or more")
        self.name = name
        self.transform = transform
        sizes = _ask(_AskSizes(name))
        self.blocks = Blocks(sizes, shuffle_window)
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several rows in this order; the host's actor is asked once."""
        wanted: dict[int, list[int]] = {}
        places: list[tuple[int, int]] = []
        for index in indices:
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of {len(self)}")
            index %= len(self)
            block = bisect.bisect_right(self._ends, index)
            rows = wanted.setdefault(block, [])
            places.append((block, len(rows)))
            rows.append(index - self._ends[block] + self.blocks.sizes[block])
        answer = _ask(_AskRows(self.name, wanted))
        columns = dict(zip(wanted, answer, strict=True))
        found = [{key: of[row] for key, of in columns[block].items()} for block, row in places]
        return found if self.transform is None else [self.transform(row) for row in found]

    def prefetch_blocks(self, blocks: Sequence[int]) -> None:
        """Have blocks brought to this host that will be read; the loader calls it."""
        _ask(_AskAhead(self.name, tuple(blocks)))


class _Link(threading.local):
    """This thread's connection to the actor of its host.

    Attributes:
        user: process and variable that it was opened for; a forked process opens another.
    """

    user: tuple[int, str] | None = None
    server: Connection | None = None


_link = _Link()


def _ask(asked: _Ask) -> Any:
    """Return the answer of this host's actor.

    Raises:
        DataError: there is none; says why.
        StrangerError: another user's process has taken its name.
    """
    place = os.environ.get(PLACE_VARIABLE, "")
    name, _, key = place.partition(":")
    if not key:
        raise DataError(
            "RayDataset reads what hvd_elastic.ray.ElasticTrainer(datasets=…) was given, and this "
            "process is not one of such a training"
        )
    try:
        if _link.server is None or _link.user != (os.getpid(), place):
            server = Connection(connect_own(f"\0{name}").detach())
            answer_challenge(server, key.encode())
            deliver_challenge(server, key.encode())
            _link.server = server
            _link.user = (os.getpid(), place)
        _link.server.send(asked)
        answer = _link.server.recv()
    except (OSError, EOFError) as error:
        _link.server = None
        time.sleep(_ENDING_S)
        raise DataError(
            f"data set {asked.name!r}: the actor of this host, which serves it, is gone"
        ) from error
    if isinstance(answer, DataError):
        raise answer
    return answer
