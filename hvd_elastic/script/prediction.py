"""Batch prediction on all ranks, for every frontend: what ``hvd.predict`` shares.

A prediction is one pass over the examples whose outputs are missing, without training: so hosts
join and leave between two batches, a batch that fails is repeated, and each example is used once.
The outputs of a batch are gathered in the order of the examples, and rank 0 saves them as a file,
which the leader fetches. ``hvd-elastic predict`` tells the script what to predict through an
environment variable, and puts the files together.
"""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.sharding import attribute_of
from hvd_elastic.records.outputs import TOTAL_FILE, output_name
from hvd_elastic.script.collectives import script_collective
from hvd_elastic.script.run import epochs, run
from hvd_elastic.script.saving import save_file
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context

VARIABLE = "HVD_ELASTIC_PREDICTION"
"""Environment variable that holds the :class:`Prediction` as JSON."""
OUTPUTS = "outputs"
"""Name of the array of a model that returns one."""
_KINDS = "biuf"
"""Kinds of numpy types that can be gathered: truth values, integers, floating-point numbers."""


class Prediction(msgspec.Struct, frozen=True):
    """A prediction that ``hvd-elastic predict`` asks of the script.

    Attributes:
        checkpoint: file with the weights, on at least one of the hosts; empty: the script's own.
        data: folder or URL of the dataset, on every host; empty: the script's own.
        done: ranges of examples, [begin, end), whose outputs are there already, in order.
    """

    checkpoint: str = ""
    data: str = ""
    done: tuple[tuple[int, int], ...] = ()


def asked_prediction() -> Prediction:
    """Return what this script is to predict; by default, everything with the weights it has."""
    text = os.environ.get(VARIABLE)
    return Prediction() if text is None else msgspec.json.decode(text, type=Prediction)


def _data_of(data: Any, asked: Prediction) -> Any:
    """Return the dataset: ``data``, or what it makes of the folder that was asked for.

    Raises:
        ScriptError: it is a function, and no folder was given.
    """
    if hasattr(data, "__getitem__") or not callable(data):
        return data
    if not asked.data:
        raise ScriptError(
            "hvd.predict(model, data): data is a function of a folder, and none was given. Start "
            "the script with: hvd-elastic predict --data FOLDER ... -- python predict.py"
        )
    return data(asked.data)


class Missing:
    """The examples of a dataset whose outputs are missing, as a dataset.

    Args:
        dataset: dataset, read by index.
        examples: its length.
        done: ranges of examples that are there already, in order.
    """

    def __init__(self, dataset: Any, examples: int, done: Sequence[tuple[int, int]]) -> None:
        self._dataset = dataset
        self.examples = examples
        edges = [0, *(edge for pair in done for edge in pair), examples]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        self._gaps = [range(begin, end) for begin, end in gaps if begin < end]
        self._ends = list(accumulate(map(len, self._gaps)))
        if attribute_of(dataset, "__getitems__"):
            self.__getitems__ = self._at_once

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, position: int) -> Any:
        return self._dataset[self.index(position)]

    def _at_once(self, positions: Sequence[int]) -> Any:
        return self._dataset.__getitems__([self.index(position) for position in positions])

    def index(self, position: int) -> int:
        """Return the index in the whole dataset of a position among the missing examples."""
        number = bisect_right(self._ends, position)
        return self._gaps[number][position - self._ends[number]]

    def files(self, begin: int, end: int, batch_size: int) -> Iterator[tuple[int, int, int]]:
        """Yield the files for positions [begin, end): first position, and range of indices.

        A file ends where the indices have a gap, and at every multiple of ``batch_size``, so that a
        batch that is repeated among other ranks gives the same files.

        >>> list(Missing(range(9), 9, [(2, 4)]).files(0, 7, 4))
        [(0, 0, 2), (2, 4, 8), (6, 8, 9)]
        """
        while begin < end:
            first = self.index(begin)
            gap = next(gap for gap in self._gaps if first in gap)
            count = min(end - begin, gap.stop - first, batch_size - first % batch_size)
            yield begin, first, first + count
            begin += count


def _named_outputs(outputs: Any, to_array: Callable[[Any], np.ndarray]) -> dict[str, np.ndarray]:
    """Return a model's outputs for a batch as arrays by name.

    Raises:
        ScriptError: they are neither one tensor nor a dict of tensors.
    """
    named = outputs if isinstance(outputs, Mapping) else {OUTPUTS: outputs}
    try:
        return {str(name): np.ascontiguousarray(to_array(each)) for name, each in named.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ScriptError(
            f"hvd.predict: the model gives a {type(outputs).__name__}; give forward=, a function "
            "of a batch that returns one tensor, or a dict of tensors by name"
        ) from error


def predict(
    model: Any,
    data: Any,
    *,
    forward: Callable[[Any], Any] | None = None,
    batch_size: int = 256,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> None:
    """Compute the outputs of a model for all examples of a dataset, on all hosts together.

    It is the whole work of a script that ``hvd-elastic predict`` starts: it loads the weights, and
    saves the outputs of every batch as a file. Hosts may join, leave and die meanwhile; each
    example counts once.

    Args:
        model: model on this rank's device (with PyTorch ``hvd.device()``); with TensorFlow built.
        data: map-style dataset (with TensorFlow what ``hvd.dataset`` takes), or a function that
            makes one of the folder given with ``--data``.
        forward: returns the outputs of a batch on the model's device: one tensor, or a dict of
            tensors by name, each with a row for each example. By default the model is given the
            batch, or its first part where the dataset gives several (inputs and label).
        batch_size: examples of a batch over all ranks together, and of a file of outputs, >= 1.
        num_workers, collate_fn: as in PyTorch's loader.

    Raises:
        ScriptError: the data cannot be read by index, or outputs do not have one row for each
            example.
        CheckpointError: no host has the weights, or they are of another model.
    """
    ctx, asked = context.current(), asked_prediction()
    given = _data_of(data, asked)
    here = ctx.worker.frontend.inference(model, given, "hvd.predict", num_workers, collate_fn)
    missing = Missing(here.dataset, here.examples, asked.done)
    batches = here.shared(missing, batch_size)
    compute = forward or (lambda batch: here.outputs(_inputs_of(batch)))

    def go(_: Any) -> None:
        if asked.checkpoint and not ctx.worker.progress.step:  # later workers get the state
            here.load_model(asked.checkpoint, model, share=True)
        _save_total(ctx, missing)
        for _ in epochs(1):
            for batch in batches:
                outputs = _named_outputs(compute(here.given(batch)), here.array)
                _save_batch(ctx, outputs, missing, batch_size)

    with here.evaluating():
        run(go)(here.state(model=model))


def _inputs_of(batch: Any) -> Any:
    """Return the inputs of a model: the batch, or its first part (inputs and label)."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def _save_total(ctx: Context, missing: Missing) -> None:
    """Save the number of examples of the whole dataset."""
    text = msgspec.json.encode({"examples": missing.examples})
    save_file(ctx.worker, TOTAL_FILE, lambda file: file.write(text))


def _save_batch(
    ctx: Context, outputs: Mapping[str, np.ndarray], missing: Missing, batch_size: int
) -> None:
    """Gather the outputs of the batch in flight from all ranks, and save them on rank 0.

    Raises:
        ScriptError: an output does not have one row for each example, or is of a type that cannot
            be saved.
        CheckpointError: rank 0's host cannot store them.
    """
    (part,) = ctx.step.passes
    begin = ctx.worker.progress.position
    whole = {}
    if part.skipped:
        raise ScriptError(
            f"hvd.predict: example {missing.index(part.skipped[0])} of the data set cannot be "
            'decoded, so it has no output; leave on_error="skip" out, and the error names it'
        )
    with script_collective("predict", OUTPUTS) as communicator:
        for name, array in outputs.items():
            if array.ndim == 0 or len(array) != part.examples or array.dtype.kind not in _KINDS:
                raise ScriptError(
                    f"hvd.predict: output {name!r} has the shape {array.shape} and type "
                    f"{array.dtype} for a batch of {part.examples} examples; it must be numbers "
                    "with one row for each example"
                )
            own = array[:0] if part.padding else array
            whole[name] = np.asarray(communicator.gather(own, f"user.predict.{name}"))
    if ctx.worker.rank:
        return
    for start, first, end in missing.files(begin, begin + part.step_examples, batch_size):
        rows = slice(start - begin, start - begin + end - first)
        buffer = io.BytesIO()
        np.savez(buffer, **{name: array[rows] for name, array in whole.items()})  # type: ignore[arg-type]
        content = buffer.getvalue()
        save_file(ctx.worker, output_name(first, end), partial(_write, content))


def _write(content: bytes, file: HashingWriter) -> None:
    file.write(content)
