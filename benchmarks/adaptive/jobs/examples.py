"""A job that counts the examples that one batch size needs.

The learning rate is scaled from that of the initial batch by the optimizer's default rule.
"""

from __future__ import annotations

import copy
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from benchmarks.adaptive.examples import PROBLEMS, Look
from benchmarks.adaptive.jobs.training import begin, loader_with_plan, ranks, train_until
from benchmarks.adaptive.workloads import digits, digits_network
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.worker import context

CHARACTERS, CONTEXT, WIDTH = 1_000_000, 64, 64
HELD_OUT = 256
"""Number of held-out windows of text on which the loss is evaluated."""


@dataclass(frozen=True)
class Training:
    """Model, data and settings of a training.

    Attributes:
        model: model with fresh weights.
        inner: optimizer of the model.
        examples: training examples.
        loss: loss of the model's outputs.
        judge: returns the loss that has to reach the level, or this rank's part of it.
        warm_up: steps at the initial batch size until the full learning rate.
        longest: norm to which gradients are clipped.
    """

    model: nn.Module
    inner: torch.optim.Optimizer
    examples: TensorDataset
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    judge: Callable[[], torch.Tensor]
    warm_up: int = 0
    longest: float = math.inf


class Writer(nn.Module):
    """The transformer of ``scripts/examples/characters_adaptive.py``, at half its width."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            *(WIDTH, 4, 4 * WIDTH), dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return scores for the next character at each position."""
        seen = self.characters(codes) + self.places.weight
        scores: torch.Tensor = self.head(self.layers(seen, self.mask, is_causal=True))
        return scores


def characters() -> tuple[TensorDataset, TensorDataset]:
    """Return windows of the source code of Python's standard library, and held-out ones."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CHARACTERS:
            break
    codes = torch.frombuffer(bytearray(text[:CHARACTERS]), dtype=torch.uint8).long()
    count = (len(codes) - 1) // CONTEXT
    inputs = codes[: count * CONTEXT].reshape(count, CONTEXT)
    targets = codes[1 : count * CONTEXT + 1].reshape(count, CONTEXT)
    cut = int(0.95 * count)
    held_out = slice(cut, cut + HELD_OUT)
    learned = TensorDataset(inputs[:cut], targets[:cut])
    return learned, TensorDataset(inputs[held_out], targets[held_out])


def make(problem: str, rate: float) -> Training:
    """Return a new training of a problem."""
    if problem == "digits":
        examples, _ = digits()
        # The sizes of scripts/examples/digits_adaptive.py.
        model = digits_network(16, 64)
        sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

        def judge_all() -> torch.Tensor:
            # Uses batch norm over all examples: running statistics lag after few large steps.
            images, labels = examples.tensors
            return F.cross_entropy(copy.deepcopy(model)(images), labels)

        return Training(model, sgd, examples, F.cross_entropy, judge_all)
    examples, held_out = characters()
    engine = context.current().worker.communicator
    writer = Writer()

    def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def judge_share() -> torch.Tensor:
        inputs, targets = (each[engine.rank :: engine.size] for each in held_out.tensors)
        return loss(writer(inputs), targets)

    adam = torch.optim.Adam(writer.parameters(), lr=rate)
    # Warm-up and clipping are those of the example script.
    return Training(writer, adam, examples, loss, judge_share, warm_up=100, longest=1.0)


def train(name: str, batch: int, seed: int, most: float) -> dict[str, Any]:
    """Train until the loss reaches the level, evaluating it from time to time."""
    begin(seed)
    problem, training = PROBLEMS[name], make(name, PROBLEMS[name].rate)
    optimizer: Any = hvd.DistributedOptimizer(training.inner, training.model)
    loader = loader_with_plan(training.examples, BatchPlan(batch), problem.initial, seed)
    start = 0.05 if training.warm_up else 1.0
    warm_up = hvd.follow_progress(LinearLR(optimizer, start, total_iters=training.warm_up or 1))
    every = max(1, problem.look_examples // batch)
    curve: list[Look] = []
    own = 0

    def look() -> bool:
        """Evaluate the loss; return whether training ends, the same on all ranks."""
        with torch.no_grad():
            told = torch.stack([training.judge(), torch.tensor(float(own))])
        value, share = hvd.allreduce(told, "look").tolist()
        used = share * ranks()
        curve.append((used, value, loader.planner.metrics().get("noise_scale")))
        return value <= problem.level or not math.isfinite(value) or used >= most

    def over(step: int) -> bool:
        return step % every == 0 and look()

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal own
        own += len(inputs)
        return training.loss(training.model(inputs), targets)

    def clip() -> None:
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(training.model.parameters(), training.longest)

    train_until(over, loader, training.model, optimizer, loss, before_step=clip, schedule=warm_up)
    row = {"problem": name, "batch": batch, "seed": seed, "level": problem.level}
    return {**row, "curve": curve}


def rows(name: str, batch: str, most: str, seeds: str) -> list[dict[str, Any]]:
    """Return the course of each training until its level is reached or ``most`` examples used."""
    return [train(name, int(batch), seed, float(most)) for seed in range(int(seeds))]
