"""A Spark DataFrame as a data set that workers read by index.

The driver collects the rows as Arrow batches, which each host gets as one file. Workers map it into
memory, so a row is read without a copy of the others. A row has the same number for all, which is
how a loader reads each of them once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from hvd_elastic.errors import ArgumentError, ScriptError
from hvd_elastic.programs.dial_back import FOLDER_VARIABLE

ROWS_FILE = "rows.arrow"
"""Name of the file in a host's folder."""
_NUMBERS = ("float", "double", "int", "bigint", "smallint", "tinyint", "boolean")
_NULLS = "{} of the DataFrame has nulls, which no tensor has: use dropna(), fillna() or filter()"
_VALID = {*_NUMBERS, *(f"array<{number}>" for number in _NUMBERS), "vector"}


def write_rows(frame: Any, file: BinaryIO) -> None:
    """Write the rows of a DataFrame to a file.

    Raises:
        ArgumentError: it has no rows, or a column that cannot be made a tensor; names it.
    """
    import pyarrow as pa

    names = [field.name for field in frame.schema]
    if several := sorted({name for name in names if names.count(name) > 1}):
        raise ArgumentError(
            f"the DataFrame has several columns named {several[0]!r}: rename or drop() all but one"
        )
    for field in frame.schema:
        kind = field.dataType.simpleString()
        if kind not in _VALID:
            raise ArgumentError(
                f"column {field.name!r} of the DataFrame is of type {kind}: valid are numbers, "
                "booleans, arrays of those, and vectors. Convert it, or leave it out with drop()"
            )
    try:
        if hasattr(frame, "toArrow"):
            table = frame.toArrow()
        else:  # Spark 3.5
            table = pa.Table.from_batches(frame._collect_as_arrow())
    except pa.ArrowInvalid as error:  # a vector that is null, whose parts must not be
        if "null" not in str(error):
            raise
        vectors = [f.name for f in frame.schema if f.dataType.simpleString() == "vector"]
        raise ArgumentError(_NULLS.format(f"column {' or '.join(map(repr, vectors))}")) from error
    if not len(table):
        raise ArgumentError("the DataFrame has no rows")
    for name in names:
        column = table.column(name)
        # A vector is dense or sparse, and what it does not need of both is null.
        if column.null_count or (pa.types.is_list(column.type) and _null_elements(column)):
            raise ArgumentError(_NULLS.format(f"column {name!r}"))
    with pa.ipc.new_file(pa.PythonFile(file, "w"), table.schema) as writer:
        writer.write_table(table.combine_chunks())  # one piece, so that readers map it as it is


def _null_elements(column: Any) -> int:
    return sum(chunk.flatten().null_count for chunk in column.chunks)


class Rows:
    """The rows of a DataFrame: a map-style data set of lists with an entry for each column."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._path = path
        # Copies nothing: columns are slices of the file, which is mapped into memory.
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self.columns = tuple(table.column_names)
        self._length = len(table)
        self._read = [_reader(table.column(name)) for name in self.columns]

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self._path,)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> list[Any]:
        if not -self._length <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        return [read(index % self._length) for read in self._read]


def _reader(column: Any) -> Callable[[int], Any]:
    """Return a function that reads the value of a row."""
    import numpy as np
    import pyarrow as pa

    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        whole = whole.chunk(0)
    if pa.types.is_list(whole.type):
        values, offsets = whole.values.to_numpy(zero_copy_only=False), whole.offsets.to_numpy()
        return lambda index: values[offsets[index] : offsets[index + 1]]
    if pa.types.is_struct(whole.type):  # a vector of pyspark.ml.linalg

        def vector(index: int) -> Any:
            value = whole[index].as_py()
            if value["type"] == 1:
                return np.asarray(value["values"])
            dense = np.zeros(value["size"])
            dense[value["indices"]] = value["values"]
            return dense

        return vector
    numbers = whole.to_numpy(zero_copy_only=False)
    return lambda index: numbers[index]


@functools.cache
def rows() -> Rows:
    """Return the rows of the DataFrame that ``_train_on_dataframe`` was given.

    Raises:
        ScriptError: this process was given none.

    >>> loader = hvd.DataLoader(rows(), batch_size=256, shuffle=True)      # doctest: +SKIP
    """
    path = Path(os.environ.get(FOLDER_VARIABLE, ""), ROWS_FILE)
    if FOLDER_VARIABLE not in os.environ or not path.is_file():
        raise ScriptError(
            "there is no DataFrame here: rows() is called in a function that is run by "
            "TorchDistributor(...)._train_on_dataframe(function, spark_dataframe)"
        )
    return Rows(path)


def _get_spark_partition_data_loader(
    num_samples: int, batch_size: int, num_workers: int = 1, prefetch_factor: int = 2
) -> Any:
    """Return a loader of this rank's rows, for functions with fixed ranks, as Spark's own.

    The rows are dealt out to the ranks in turn.

    Args:
        num_samples: number of examples in an epoch of this rank; beyond its rows it begins again.
        num_workers, prefetch_factor: as in PyTorch.

    Raises:
        ScriptError: the function is elastic, or was given no DataFrame.
    """
    from torch.utils.data import DataLoader, Subset

    if "RANK" not in os.environ:
        raise ScriptError(
            "a loader of one rank's rows cannot follow ranks that come and go: use "
            "hvd.DataLoader(hvd_elastic.spark.rows(), batch_size), whose batch size is that of "
            "all, or TorchDistributor(..., elastic=False)"
        )
    every: Any = rows()
    own = range(int(os.environ["RANK"]), len(every), int(os.environ["WORLD_SIZE"]))
    if not own:
        raise ScriptError(f"the DataFrame has {len(every)} rows, fewer than there are ranks")
    indices = [own[number % len(own)] for number in range(num_samples)]
    return DataLoader(
        Subset(every, indices),
        batch_size,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
    )
