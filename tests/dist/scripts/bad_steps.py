"""Trains 200 steps of which 30 have gradients that are not finite, and notes what each has changed.

Run it: ``bad_steps.py torch|tensorflow data|layer|scale|rank FOLDER``. The reason is in an example,
in a layer of all ranks, in the factor of the loss of all ranks, or in that of one of three.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

STEPS, BATCH = 200, 9
framework, kind, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
random = np.random.default_rng([*kind.encode()])
bad = {int(step) for step in random.choice(np.arange(1, STEPS, 2), 30, replace=False)}
values = {step: float(random.choice([math.nan, math.inf, -math.inf])) for step in bad}
guilty = {step: int(random.integers(3)) for step in bad}
inputs = random.normal(size=(STEPS * BATCH, 6)).astype(np.float32)
targets = inputs.sum(1, keepdims=True)
if kind == "data":
    for step in bad:
        inputs[step * BATCH + int(random.integers(BATCH))] = values[step]


def factors(step: int, rank: int) -> tuple[float, float]:
    """Return the factors on what a layer returns and on the loss."""
    value = values.get(step, 1.0)
    on_loss = kind == "scale" or (kind == "rank" and guilty.get(step) == rank)
    return (value if kind == "layer" else 1.0), (value if on_loss else 1.0)


def train_torch() -> None:
    import torch

    import hvd_elastic.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    parts = [torch.nn.Linear(6, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 1)]
    model = torch.nn.Sequential(*parts)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    data = torch.utils.data.TensorDataset(torch.tensor(inputs), torch.tensor(targets))
    loader: Any = hvd.DataLoader(data, BATCH)

    @hvd.run
    def train(state: Any) -> None:
        for _ in hvd.epochs(1):
            for number, (a, b) in enumerate(loader, state.done):
                on_layer, on_loss = factors(number, hvd.rank())
                optimizer.zero_grad()
                outputs = parts[2](on_layer * torch.relu(parts[1](parts[0](a))))
                (on_loss * torch.nn.functional.mse_loss(outputs, b)).backward()
                before = [each.detach().clone() for each in model.parameters()]
                optimizer.step()
                pairs = zip(before, model.parameters(), strict=True)
                state.changed.append(not all(map(torch.equal, *zip(*pairs, strict=True))))
                state.done += 1
                time.sleep(0.05)
        end(state, hvd.rank(), [each.detach().numpy() for each in model.parameters()])

    train(hvd.State(model=model, optimizer=optimizer, changed=[], done=0))


def train_tensorflow() -> None:
    import keras
    import tensorflow as tf

    import hvd_elastic.tensorflow as hvd

    hvd.init()
    keras.utils.set_random_seed(0)
    layers = keras.layers
    first = keras.Sequential([keras.Input((6,)), layers.Dense(30), layers.BatchNormalization()])
    head = keras.Sequential([keras.Input((30,)), layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    variables = [*first.trainable_variables, *head.trainable_variables]
    optimizer.build(variables)
    dataset: Any = hvd.dataset((inputs, targets), BATCH)

    @tf.function(reduce_retracing=True)
    def take_step(a: Any, b: Any, on_layer: Any, on_loss: Any) -> None:
        with tf.GradientTape() as tape:
            outputs = head(on_layer * tf.nn.relu(first(a, training=True)), training=True)
            loss = on_loss * tf.reduce_mean(tf.square(outputs - b))
        optimizer.apply(tape.gradient(loss, variables), variables)

    @hvd.run
    def train(state: Any) -> None:
        for _ in hvd.epochs(1):
            for number, (a, b) in enumerate(dataset, state.done):
                before = [each.numpy() for each in variables]
                take_step(a, b, *map(tf.constant, factors(number, hvd.rank())))
                pairs = zip(before, variables, strict=True)
                state.changed.append(not all(np.array_equal(x, y.numpy()) for x, y in pairs))
                state.done += 1
                time.sleep(0.05)
        end(state, hvd.rank(), [each.numpy() for each in variables])

    train(hvd.State(first=first, head=head, optimizer=optimizer, changed=[], done=0))


def end(state: Any, rank: int, weights: list[Any]) -> None:
    """Write what was seen."""
    finite = all(np.isfinite(each).all() for each in weights)
    told = {"changed": list(state.changed), "bad": sorted(bad), "finite": bool(finite)}
    (folder / f"{framework}-{kind}-{rank}.json").write_text(json.dumps(told))


train_torch() if framework == "torch" else train_tensorflow()
