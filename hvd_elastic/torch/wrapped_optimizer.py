"""What of an optimizer can be wrapped, and how its ``step`` is replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.compression import Compression

NO_CLOSURE = (
    "optimizer.step(closure): the gradients are averaged before a step is taken, so they have to "
    "be there; call backward() before step(). Optimizers that need a closure (LBFGS) cannot be used"
)


def check_optimizer(call: str, optimizer: Any, model: Any, compression: Any) -> None:
    """Raise ScriptError if an optimizer cannot be wrapped; ``call``: by what, for messages."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ScriptError(
            f"{call}() wraps a torch.optim optimizer, not a {type(optimizer).__name__}"
        )
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ScriptError(
            f"{call}(optimizer, model): model is the torch.nn.Module whose parameters "
            f"messages are to name, not a {type(model).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ScriptError(NO_CLOSURE)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ScriptError(
            f"{call}() cannot wrap SparseAdam, which refuses dense gradients: sparse "
            "ones are made dense to be averaged. Use Adam, AdamW or SGD for the embeddings"
        )
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    if any(map(torch.nn.parameter.is_lazy, parameters)):
        raise ScriptError(
            f"{call}() was given a parameter of a lazy module, which has no shape "
            "yet; call the model once before, with inputs like in training"
        )
    if hasattr(optimizer, "synchronize"):
        raise ScriptError(
            f"{call}() was given an optimizer whose gradients are averaged already, "
            "by an earlier call or by horovod.torch; give it the one of torch.optim, once"
        )
    if not isinstance(compression, Compression):
        raise ScriptError(
            f"{call}(compression={compression!r}): use none, fp16 or bf16 of "
            "hvd.Compression of hvd_elastic.torch, such as hvd.Compression.bf16"
        )


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """Have ``optimizer.step()`` call a function with the optimizer and the arguments."""
    # Schedulers expect ``step`` to be a bound method, and set an attribute on its function.
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def leave_as_it_is(optimizer: torch.optim.Optimizer) -> None:
    """End a call of ``step`` that takes no step."""
    # Otherwise a scheduler stepped after this warns that no optimizer step was taken.
    optimizer._opt_called = True  # type: ignore[attr-defined]


def refuse_other_scaler() -> None:
    """Raise ScriptError if a scaler of PyTorch takes the step, also at a single rank."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller, frame = frame.f_locals.get("self"), frame.f_back
        if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
            if hasattr(caller, "forget"):  # ours
                return
            raise ScriptError(
                "torch.amp.GradScaler unscales the gradients of this rank before they are "
                "averaged, and ranks take and skip different steps: use hvd.GradScaler(), with "
                "the same methods"
            )
