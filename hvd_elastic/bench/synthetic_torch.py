"""Trains a model on random data that stays the same, for ``hvd-elastic bench synthetic``."""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hvd_elastic.torch as hvd
from hvd_elastic.bench.memory import refuse_too_large
from hvd_elastic.bench.step_timer import StepTimer
from hvd_elastic.errors import ScriptError

IMAGE, CLASSES = 224, 1000
TOKENS = 1024
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
Loss = Callable[[], torch.Tensor]


def make_resnet50(batch_size: int) -> tuple[nn.Module, Loss]:
    """Return ResNet-50, and its loss on random images."""
    from hvd_elastic.bench.models import resnet50

    model = resnet50()
    images = torch.randn(batch_size, 3, IMAGE, IMAGE)
    labels = torch.randint(CLASSES, (batch_size,))
    return model, lambda: F.cross_entropy(model(images), labels)


def make_gpt2(batch_size: int) -> tuple[nn.Module, Loss]:
    """Return GPT-2 small, and its loss on random sequences of 1024 tokens."""
    from hvd_elastic.bench.models import GPT2

    model = GPT2()
    tokens = torch.randint(50257, (batch_size, TOKENS + 1))
    return model, lambda: F.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    )


MODELS = {"resnet50": make_resnet50, "gpt2": make_gpt2}


class Device:
    """A device that computes beside the processor, emulated: its passes take time and no work.

    A third of the time is the forward pass. In the rest the gradients are done one after the other,
    those of the last layer first, at times that do not depend on what the processor does meanwhile:
    a real device has its work queued too.

    Args:
        model: model with the parameters that get gradients, which are 0.
        seconds: time of the passes of a step [s].
    """

    def __init__(self, model: nn.Module, seconds: float) -> None:
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._forward_s = seconds / 3
        self._each_s = (seconds - self._forward_s) / len(self._parameters)
        self._done_at = 0.0

    def loss(self) -> torch.Tensor:
        """Return a loss whose backward pass has the device compute the gradients."""
        self._done_at = time.perf_counter()
        self._wait(self._forward_s)
        carry = torch.zeros(())
        for parameter in self._parameters:
            carry = _Layer.apply(carry, parameter, self)  # type: ignore[no-untyped-call]
        return carry

    def compute_gradient(self) -> None:
        """Wait until the next gradient is done."""
        self._wait(self._each_s)

    def _wait(self, seconds: float) -> None:
        self._done_at += seconds
        time.sleep(max(0.0, self._done_at - time.perf_counter()))


class _Layer(torch.autograd.Function):
    """Gives a parameter a gradient when the device has computed it."""

    @staticmethod
    def forward(
        ctx: Any, carry: torch.Tensor, parameter: torch.Tensor, device: Device
    ) -> torch.Tensor:
        ctx.like, ctx.device = parameter, device
        return carry.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        ctx.device.compute_gradient()
        return gradients[0], torch.zeros_like(ctx.like), None


class UpdatedOnDevice(torch.optim.Optimizer):
    """An optimizer whose update is part of the emulated time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave the parameters as they are."""


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


def is_too_large(error: Exception) -> bool:
    """Return whether an error means that memory was short."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def main() -> None:
    """Train until the run is ended, and report the times of each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--ranks", type=int, default=1, help="most ranks on a host")
    parser.add_argument("--emulate", type=float, help="time of the passes of a step")
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    device = hvd.device()
    on_gpu = device.type == "cuda"
    lower = torch.autocast(device.type, TYPES.get(args.precision), enabled=args.precision in TYPES)

    def try_step(batch_size: int) -> None:
        if on_gpu:
            torch.cuda.empty_cache()
        with device:
            _, loss = made(args.model, batch_size)
            with lower:
                value = loss()
            value.backward()

    if args.emulate is None:
        ranks = None if on_gpu else args.ranks
        refuse_too_large(args.model, args.batch_size, try_step, is_too_large, ranks)
    with device:
        model, loss = made(args.model, args.batch_size if args.emulate is None else 1)
    sgd: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    if args.emulate is not None:
        loss, sgd = Device(model, args.emulate).loss, UpdatedOnDevice(model)
    optimizer: Any = hvd.DistributedOptimizer(sgd, model)
    scaler = hvd.GradScaler(device.type, enabled=args.precision == "fp16")
    timer = StepTimer(args.seconds, torch.cuda.synchronize if on_gpu else None)
    parameters = sum(each.numel() for each in model.parameters())

    @hvd.run
    def train(state: hvd.State) -> None:
        while True:
            timer.begin_step(hvd.size())
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
            figures = timer.end_step()
            state.commit(**figures, **({"bench_parameters": parameters} if figures else {}))

    train(hvd.State(model=model, optimizer=optimizer, scaler=scaler))


if __name__ == "__main__":
    main()
