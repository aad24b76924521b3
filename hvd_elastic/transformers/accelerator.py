"""Accelerate's collectives over the ranks that train together now."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import recursively_apply

import hvd_elastic.torch as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.script.instances import instances_of
from hvd_elastic.worker import context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.worker import Worker

_NAME = "accelerate"
"""Name of the collectives, for messages."""


class ElasticAccelerator(Accelerator):
    """The Accelerator of a Trainer, whose collectives are those of hvd_elastic.

    For accelerate itself there is one process, so it wraps no model and calls no
    ``torch.distributed``. Each rank may give another number of rows.

    Attributes:
        loss_factor: factor on the loss of the pass that runs.
        rows: number of this rank's examples in a short batch that is evaluated; 0: the rank has
            none left, and computes one again for the sake of the collectives; None: as many as
            there are.
    """

    loss_factor: float = 1.0
    rows: int | None = None

    @property
    def is_main_process(self) -> bool:
        """Return whether this is rank 0; before there are ranks, each process works for itself.

        So each writes the files that it reads then, such as those of TRL's reference model.
        """
        worker = context.current().worker
        return not worker.has_ranks or worker.rank == 0

    is_local_main_process = is_main_process

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Compute the gradients of a pass, weighted by its part of the rank's share of the step."""
        super().backward(loss if self.loss_factor == 1.0 else loss * self.loss_factor, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """Return the rows of all ranks, in rank order; a number counts as a row."""
        if not together():
            return tensor
        return recursively_apply(
            lambda each: hvd.allgather(_row(each)[: 0 if self.rows == 0 else None], _NAME),
            tensor,
            error_on_other_type=True,
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all ranks, each example of an evaluation once; also of objects."""
        if not use_gather_object and _has_tensors_only(input_data):
            cut = recursively_apply(
                lambda each: each[: self.rows] if each.dim() else each, input_data
            )
            return self.gather(cut)
        if not together():
            return input_data
        own = [] if self.rows == 0 else [input_data]
        found = [each for of_rank in gather_objects(own) for each in of_rank]
        return [row for each in found for row in each] if isinstance(input_data, list) else found

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or the mean of the ranks."""
        if reduction not in ("sum", "mean", "none"):
            raise ScriptError(f"reduce(reduction={reduction!r}): use sum, mean or none")
        if not together() or reduction == "none":
            return tensor

        def reduced(own: torch.Tensor) -> torch.Tensor:
            every = hvd.allgather(own[None][: self.rows], _NAME)
            total = every.sum(0, dtype=every.dtype)
            return total / len(every) if reduction == "mean" else total

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Return the tensor as long in a dimension as the longest of all ranks."""
        if not together():
            return tensor

        def padded(own: torch.Tensor) -> torch.Tensor:
            if dim >= own.dim() or dim < -own.dim():
                return own
            length = own.shape[dim]
            longest = int(hvd.allgather(torch.tensor([length]), _NAME).max())
            shape = list(own.shape)
            shape[dim] = longest - length
            more = own.new_full(shape, pad_index)
            return torch.cat([more, own] if pad_first else [own, more], dim)

        return recursively_apply(padded, tensor, error_on_other_type=True)

    def wait_for_everyone(self) -> None:
        """Wait for the other ranks, between two steps."""
        self.gather(torch.zeros(1))


def together() -> bool:
    """Return whether several ranks train, so that each calls the same collectives."""
    worker = context.current().worker
    return worker.in_train and worker.has_ranks and worker.size > 1


def gather_objects(own: Any) -> list[Any]:
    """Return the objects of all ranks, in rank order."""
    if not together():
        return [own]
    data = pickle.dumps(own)
    sizes = hvd.allgather(torch.tensor([len(data)]), _NAME).tolist()
    every = hvd.allgather(torch.frombuffer(bytearray(data), dtype=torch.uint8), _NAME)
    # They come from the other ranks of this run.
    return [pickle.loads(each.numpy().tobytes()) for each in every.split(sizes)]  # noqa: S301


def follow_rank(worker: Worker) -> None:
    """Have accelerate, and with it Trainer, know this process's rank.

    Before it has one, it neither logs nor saves.
    """
    rank = worker.rank if worker.has_ranks else int(worker.mode is Mode.AGENT)
    shared = PartialState._shared_state
    shared["process_index"] = shared["local_process_index"] = rank


def make_elastic() -> None:
    """Have all Accelerators of this process use our collectives, those of the script's own too."""
    for each in instances_of(Accelerator):
        if not isinstance(each, ElasticAccelerator):
            each.__class__ = ElasticAccelerator


def _row(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() else tensor[None]


def _has_tensors_only(data: Any) -> bool:
    try:
        recursively_apply(lambda each: each, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
