"""Trains a model on random data that stays the same, for ``hvd-elastic bench synthetic``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hvd_elastic.torch as hvd
from hvd_elastic.bench.step_timer import StepTimer
from hvd_elastic.errors import ScriptError

IMAGE, CLASSES = 224, 1000
TOKENS = 1024
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
Loss = Callable[[], torch.Tensor]


def make_resnet50(batch_size: int) -> tuple[nn.Module, Loss]:
    """Return ResNet-50, and its loss on random images."""
    from hvd_elastic.models.resnet import resnet50

    model = resnet50()
    images = torch.randn(batch_size, 3, IMAGE, IMAGE)
    labels = torch.randint(CLASSES, (batch_size,))
    return model, lambda: F.cross_entropy(model(images), labels)


def make_gpt2(batch_size: int) -> tuple[nn.Module, Loss]:
    """Return GPT-2 small, and its loss on random sequences of 1024 tokens."""
    from hvd_elastic.models.gpt2 import GPT2

    model = GPT2()
    tokens = torch.randint(50257, (batch_size, TOKENS + 1))
    return model, lambda: F.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    )


MODELS = {"resnet50": make_resnet50, "gpt2": make_gpt2}


class _Layer(torch.autograd.Function):
    """Gives a parameter a gradient after some time of the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, carry: torch.Tensor, parameter: torch.Tensor, seconds: float
    ) -> torch.Tensor:
        ctx.like, ctx.seconds = parameter, seconds
        return carry.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], torch.zeros_like(ctx.like), None


def emulated(model: nn.Module, seconds: float) -> Loss:
    """Return a loss whose passes take so long and compute nothing, as on a device.

    A third of the time is the forward pass. In the rest the gradients come one after the other,
    those of the last layer first.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    each_s = 2 / 3 * seconds / len(parameters)

    def loss() -> torch.Tensor:
        time.sleep(seconds / 3)
        carry = torch.zeros(())
        for parameter in parameters:
            carry = _Layer.apply(carry, parameter, each_s)  # type: ignore[no-untyped-call]
        return carry

    return loss


def made(name: str, batch_size: int) -> tuple[nn.Module, Loss]:
    """Return the model and loss that ``--model`` names."""
    if name in MODELS:
        return MODELS[name](batch_size)
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)(batch_size)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)):
        raise ScriptError(
            f"--model {name}: the function is called with the batch size and has to return a "
            "torch.nn.Module and a function without arguments that returns its loss"
        )
    return found


def refuse_too_large(args: argparse.Namespace, error: Exception) -> None:
    """Raise ScriptError with the largest batch, a power of two times smaller, that does fit."""
    size = args.batch_size // 2
    while size:
        torch.cuda.empty_cache()
        with contextlib.suppress(torch.OutOfMemoryError):
            _, loss = made(args.model, size)
            loss().backward()
            break
        size //= 2
    fits = f"--batch-size {size} does" if size else "neither does a single example"
    raise ScriptError(
        f"{args.model} with {args.batch_size} examples does not fit into the memory of "
        f"{torch.cuda.get_device_name()}; {fits}"
    ) from error


def main() -> None:
    """Train until the run is ended, and report the times of each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--emulate", type=float, help="time of the passes of a step")
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    device = hvd.device()
    on_gpu = device.type == "cuda"
    with device:
        model, loss = made(args.model, args.batch_size)
        if args.emulate is not None:
            loss = emulated(model, args.emulate)
        elif on_gpu:
            try:
                loss().backward()
            except torch.OutOfMemoryError as error:
                refuse_too_large(args, error)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    optimizer: Any = hvd.DistributedOptimizer(sgd, model)
    scaler = hvd.GradScaler(device.type, enabled=args.precision == "fp16")
    lower = torch.autocast(device.type, TYPES.get(args.precision), enabled=args.precision in TYPES)
    timer = StepTimer(args.seconds, torch.cuda.synchronize if on_gpu else None)
    parameters = sum(each.numel() for each in model.parameters())

    @hvd.run
    def train(state: hvd.State) -> None:
        while True:
            timer.begin(hvd.size())
            optimizer.zero_grad()
            with lower, device:
                value = loss()
            scaler.scale(value).backward()
            timer.mark("compute")
            optimizer.synchronize()
            timer.mark("exposed")
            scaler.step(optimizer)
            scaler.update()
            timer.mark("compute")
            figures = timer.end()
            state.commit(**figures, **({"bench_parameters": parameters} if figures else {}))

    train(hvd.State(model=model, optimizer=optimizer, scaler=scaler))


if __name__ == "__main__":
    main()
