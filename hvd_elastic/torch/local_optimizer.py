"""The optimizer of ranks that meet once a period: LocalSGD, DiLoCo and streaming DiLoCo."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.script.horovod_names import explain_arguments
from hvd_elastic.torch.compression import Compression
from hvd_elastic.torch.local_steps import LocalAverager
from hvd_elastic.torch.streaming import StreamingAverager
from hvd_elastic.torch.wrapped_optimizer import check_optimizer
from hvd_elastic.worker import context
from hvd_elastic.worker.planning.batch_bounds import require_whole


@explain_arguments
def LocalOptimizer(  # noqa: N802  (as DistributedOptimizer)
    inner: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    *,
    every: int,
    outer: torch.optim.Optimizer | None = None,
    compression: Compression = Compression.none,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
) -> torch.optim.Optimizer:
    """Have each rank take its steps alone, and the ranks meet once in ``every`` batches.

    Without ``outer`` they average their parameters then (LocalSGD). With it they average by how
    much each has moved them since the last time, and ``outer`` takes that for the gradient of one
    step (DiLoCo): a ``torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)``.

    A period of ``every`` batches is one step of training: hosts join and leave, and checkpoints are
    taken, between periods, and a failure repeats the period. With ``hvd.epochs`` the last period
    of an epoch is shorter. The result depends on the number of ranks, as the algorithm does.

    The state of ``inner``, such as Adam's moments, is each rank's own. A worker that joins takes
    over that of another rank, and checkpoints hold that of rank 0.

    Args:
        inner: optimizer of the steps that each rank takes alone.
        model: module whose parameter names are used in messages.
        every: batches in a period, >= 1.
        outer: optimizer of the same parameters; None: average the parameters.
        compression: ``hvd.Compression.fp16`` or ``hvd.Compression.bf16`` to send what is averaged
            in 16 bits.
        fragments: number of parts of the parameters that are averaged one after the other, each
            once in ``every`` batches (streaming DiLoCo). A failure repeats the batches since the
            last of them.
        delay: batches for which training continues while a part is being sent.
        mix: part of a rank's own parameters that it trains on with, from 0 to below 1. With 0 the
            batches of the delay are not learnt from where they change that part of the parameters.

    Returns:
        ``inner``, which belongs in the State: ``hvd.State(model=model, optimizer=optimizer)``.

    Raises:
        ScriptError: an optimizer cannot be used, the two have different parameters, or a number is
            out of its range.

    Source: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; Douillard et al.,
    DiLoCo: Distributed Low-Communication Training of Language Models, 2023, and Streaming DiLoCo
    with Overlapping Communication, 2025.
    """
    check_optimizer("LocalOptimizer", inner, model, compression)
    call = "LocalOptimizer"
    every = require_whole("every", every, 1, "batches after which the ranks meet", call)
    fragments = require_whole("fragments", fragments, 1, "parts averaged one after the other", call)
    delay = require_whole("delay", delay, 0, "batches for which training continues meanwhile", call)
    parameters = [each for group in inner.param_groups for each in group["params"]]
    if outer is None:
        groups = [{"params": list(group["params"])} for group in inner.param_groups]
        averaged: torch.optim.Optimizer = torch.optim.SGD(groups, lr=1.0)
    else:
        check_optimizer("LocalOptimizer", outer, model, compression)
        theirs = {id(each) for group in outer.param_groups for each in group["params"]}
        if outer is inner or theirs != {id(each) for each in parameters}:
            raise ScriptError(
                "LocalOptimizer(inner, outer=outer): give two optimizers of the same parameters, "
                "torch.optim.AdamW(model.parameters(), ...) and "
                "torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)"
            )
        averaged = outer
    names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    if outer is not None:
        context.current().keep("_outer", averaged)
    if fragments == 1 and not delay and not mix:
        averager = LocalAverager(inner, averaged, names, every, compression)
    else:
        trained = sum(each.requires_grad for each in parameters)
        _check_streaming(every, fragments, delay, mix, trained)
        apart = every // fragments
        averager = streaming = StreamingAverager(
            inner, averaged, names, apart, compression, parts=fragments, delay=delay, mix=mix
        )
        context.current().keep("_shared", streaming.shared)
    for each in (inner, averaged):
        each.synchronize = averager.keep_gradients  # type: ignore[attr-defined]
        each.no_sync = averager.no_sync  # type: ignore[attr-defined]
    inner.skip_synchronize = nullcontext  # type: ignore[attr-defined]
    return inner


def _check_streaming(every: int, fragments: int, delay: int, mix: Any, trained: int) -> None:
    if not isinstance(mix, int | float) or not 0 <= mix < 1:
        raise ScriptError(
            f"LocalOptimizer(mix={mix!r}): give a number from 0 to below 1, the part of a "
            "rank's own parameters in what it continues with, such as mix=0.5"
        )
    if fragments > trained:
        raise ScriptError(
            f"LocalOptimizer(fragments={fragments}): the optimizer trains {trained} parameters, "
            "and a fragment has at least one"
        )
    if every % fragments:
        raise ScriptError(
            f"LocalOptimizer(every={every}, fragments={fragments}): the fragments are averaged at "
            f"equal distances, so make every a multiple of {fragments}"
        )
    if delay >= every // fragments:
        raise ScriptError(
            f"LocalOptimizer(every={every}, fragments={fragments}, delay={delay}): a fragment is "
            f"used before the next one is sent, so the delay is less than "
            f"{every // fragments} batches"
        )
