"""Evaluates a dataset on all ranks with exact counts, for every frontend: ``hvd.evaluate``.

The dataset is divided into batches at the same examples whatever the number of ranks, and each
rank computes a contiguous range of whole batches. No example is read twice, none is padding, and an
example is always computed in the same batch. The sums of the batches are added exactly, so the
result does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvd_elastic.communicator.interface import FIRST, Communicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import as_whole
from hvd_elastic.script.collectives import script_collective
from hvd_elastic.worker import context

_EXCHANGES = 64
"""Most exchanges of sums in an evaluation: each takes some milliseconds of every rank."""
_NAME = "evaluation"
"""Name of the collective, for messages."""


def evaluate(
    model: Any,
    dataset: Any,
    metrics: Mapping[str, Callable[[Any, Any], Any]],
    *,
    batch_size: int = 64,
    forward: Callable[[Any], tuple[Any, Any]] | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> dict[str, float]:
    """Return the mean of each metric over a dataset, computed by all ranks together.

    Each example is read once, by one rank, and all ranks return the same numbers. These do not
    depend on the number of ranks: the batches are the same, and their sums are added exactly. All
    ranks must call it: in the function under ``hvd.run`` between two steps, in the function given
    to ``ElasticCallback(evaluate=...)`` of ``model.fit`` (in a callback of your own it would not be
    repeated after a failure), or after training. Meanwhile the model is in evaluation mode, with
    rank 0's values of what is not trained (the running statistics of batch norm), as a checkpoint
    has them. Nothing of it is changed.

    Args:
        model: model of PyTorch, on one device; or one of Keras, or what is called with inputs.
        dataset: map-style dataset, with TensorFlow arrays or an object read by index as for
            ``hvd.dataset``, the same on all ranks; for other batches than (inputs, targets) give
            ``forward``.
        metrics: functions by name. Each returns one number for each example of a batch, of shape
            (examples,). It is called with the outputs and the targets; with TensorFlow, as those of
            Keras are (``keras.losses.sparse_categorical_crossentropy``), with the targets first.
        batch_size: examples in a forward pass of a rank, >= 1. The batches are divided over the
            ranks, so with fewer of them than ranks some have none.
        forward: returns (outputs, targets) of a batch, on the model's device, in place of
            ``model(inputs), targets``.
        num_workers, collate_fn: as in PyTorch's loader.

    Raises:
        ScriptError: an argument is not valid, a metric does not return one number for each example,
            or the dataset has other lengths on other ranks.

    >>> def correct(outputs, targets):      # doctest: +SKIP
    ...     return outputs.argmax(1) == targets
    >>> hvd.evaluate(model, test_set, {"accuracy": correct})      # doctest: +SKIP
    {'accuracy': 0.9762}
    """
    batch_size = as_whole(batch_size)
    _check(batch_size, metrics)
    worker = context.current().worker
    here = worker.frontend.inference(model, dataset, "hvd.evaluate", num_workers, collate_fn)
    worker.check_has_ranks("which examples this rank evaluates")

    def pair(batch: Any) -> tuple[Any, Any]:
        inputs, targets = _pair_of(batch)
        return here.outputs(inputs), targets

    def sums(batch: Any, examples: int) -> list[float]:
        outputs, targets = (forward or pair)(here.given(batch))
        found = {name: here.values(of, outputs, targets) for name, of in metrics.items()}
        return _sums(found, examples)

    differing, restore = here.untrained()
    try:
        with here.evaluating(), script_collective("evaluate", _NAME) as communicator:
            _check_same(communicator, here.examples, batch_size)
            if communicator.size > 1:
                communicator.broadcast(differing, FIRST)
            mine = batches_of(here.examples, batch_size, worker.rank, worker.size)
            batches, found = iter(here.batches(mine)), list[np.ndarray]()
            # Exchanged after every few batches, while the next one is computed: so a lost rank is
            # noticed soon, and a rank does not wait for a slower one to the end of its whole share.
            begun: Any = None
            most = -(-here.examples // batch_size)
            rounds = -(-most // worker.size)
            step = -(-rounds // _EXCHANGES)
            for first in range(0, rounds, step):
                rows = []
                for indices in mine[first : first + step]:
                    worker.refuse_aborted()
                    row = [indices.start, len(indices), *sums(next(batches), len(indices))]
                    rows.append(row)
                own = np.array(rows, dtype=np.float64).reshape(len(rows), 2 + len(metrics))
                if begun is not None:
                    found.append(np.asarray(communicator.wait(begun)))
                begun = communicator.gather_async(own, f"user.{_NAME}")
            found.append(np.asarray(communicator.wait(begun)))
    finally:
        restore()
    every = np.concatenate(found)
    assert every[:, 1].sum() == here.examples
    totals = every[:, 2:].T.tolist()
    return {name: math.fsum(t) / here.examples for name, t in zip(metrics, totals, strict=True)}


def _pair_of(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the targets of a batch.

    Raises:
        ScriptError: it is no pair.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    kind = type(batch).__name__
    described = f"{kind} of {len(batch)}" if isinstance(batch, (tuple, list)) else kind
    raise ScriptError(
        "hvd.evaluate: the data set gives batches that are no pair (inputs, targets) but a "
        f"{described}; give forward=, a function of such a batch that returns (outputs, targets)"
    )


def _check_same(communicator: Communicator, examples: int, batch_size: int) -> None:
    """Raise ScriptError unless all ranks cut the dataset into the same batches."""
    own = np.array([[examples, batch_size]])
    rows = np.asarray(communicator.gather(own, f"user.{_NAME}"))
    if (rows != rows[0]).any():
        rank = int(np.flatnonzero((rows != rows[0]).any(axis=1))[0])
        raise ScriptError(
            f"hvd.evaluate: the data set has {rows[0, 0]} examples in batches of {rows[0, 1]} on "
            f"rank 0, and {rows[rank, 0]} in batches of {rows[rank, 1]} on rank {rank}; both must "
            "be the same on all ranks. Check where each host reads it from"
        )


def batches_of(examples: int, batch_size: int, rank: int, size: int) -> list[range]:
    """Return the batches of a rank, as ranges of indices; empty if there are too few for all.

    >>> [batches_of(10, 4, rank, 2) for rank in range(2)]
    [[range(0, 4)], [range(4, 8), range(8, 10)]]
    """
    count = -(-examples // batch_size)
    first, stop = count * rank // size, count * (rank + 1) // size
    starts = range(first * batch_size, min(stop * batch_size, examples), batch_size)
    return [range(start, min(start + batch_size, examples)) for start in starts]


def _check(batch_size: int, metrics: Mapping[str, Any]) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ScriptError(
            f"hvd.evaluate(batch_size={batch_size!r}): it must be a whole number, 1 or more: the "
            "examples in one forward pass of a rank"
        )
    functions = isinstance(metrics, Mapping) and all(callable(each) for each in metrics.values())
    if not functions or not metrics:
        raise ScriptError(
            "hvd.evaluate(metrics=...): give a dict of at least one function, by name, such as "
            '{"loss": losses_of_a_batch}'
        )


def _sums(values: Mapping[str, Any], examples: int) -> list[float]:
    """Return the sum of each metric over a batch."""
    sums = []
    for name, found in values.items():
        array = np.asarray(found, dtype=np.float64)
        if array.shape != (examples,):
            shape = "one number" if array.ndim == 0 else f"values of shape {array.shape}"
            raise ScriptError(
                f"hvd.evaluate: metric {name!r} gave {shape} for a batch of {examples}; it must "
                f"give one number for each example, of shape ({examples},), so that each counts "
                'once: a loss with reduction="none", for example'
            )
        sums.append(math.fsum(array.tolist()))
    return sums
