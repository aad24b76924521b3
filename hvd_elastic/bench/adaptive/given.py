"""Trainings whose batch plan is given, one after the other in the processes of one job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.torch import context

__all__ = ["begin", "loader_with_plan", "write_rank_0"]


def begin() -> None:
    """Forget the training before and keep the ranks, which take longer to start than to train."""
    context._context = None
    hvd.init()


def loader_with_plan(
    examples: TensorDataset, plan: BatchPlan, initial: int | None = None, seed: int = 0
) -> Any:
    """A loader that measures everything, and whose bounds leave room for one plan alone.

    Args:
        examples: the data set.
        plan: the one.
        initial: global batch size that the learning rate is for; that of the plan by default.
        seed: of the order.
    """
    atomic = plan.atomic_batch_size(context.current().engine.size)
    return hvd.DataLoader(
        examples,
        initial or plan.global_batch_size,
        shuffle=True,
        seed=seed,
        max_batch_size=plan.global_batch_size,
        atomic_batch_size_bounds=(atomic, atomic),
    )


def write_rank_0(out: Path, found: list[Mapping[str, Any]]) -> None:
    """For whoever started the job."""
    if context.current().engine.rank == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
