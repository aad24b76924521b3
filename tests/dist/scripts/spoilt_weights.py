"""Weights become NaN once a checkpoint is there, and the run fails once one has them.

After a resume it takes five steps. ``python spoilt_weights.py torch|keras HOME``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

home = Path(sys.argv[2])
steps = 0


def step_ended(spoil: Any, stop: Any) -> None:
    global steps
    steps += 1
    if (home / "died").exists():
        if steps == 5:
            stop("five steps")
        return
    (events,) = home.glob("runs/*/events.jsonl")
    lines = [line for line in events.read_text().splitlines() if '"kind":"checkpoint"' in line]
    kept = [json.loads(line)["not_finite"] for line in lines if line.endswith("}")]
    if any(kept):
        (home / "died").touch()
        raise RuntimeError("the loss is NaN")
    if kept:
        spoil()


def train_torch() -> None:
    import torch

    import hvd_elastic.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    x = torch.ones(64, 2)
    loader: Any = hvd.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 4)

    def spoil() -> None:
        with torch.no_grad():
            model.weight.fill_(torch.nan)

    @hvd.run
    def train(state: Any) -> None:
        for _ in hvd.epochs(100_000):
            for a, b in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(a), b).backward()
                optimizer.step()
                step_ended(spoil, hvd.stop)
        print("finite", bool(model.weight.isfinite().all()), flush=True)

    train(hvd.State(model=model, optimizer=optimizer))


def train_keras() -> None:
    import keras
    import numpy as np

    import hvd_elastic.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x = np.ones((64, 2), np.float32)

    class Spoil(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kernel = model.layers[0].kernel
            step_ended(lambda: kernel.assign(kernel * np.nan), hvd.stop)

    data = hvd.dataset((x, x.sum(1, keepdims=True)), 4)
    model.fit(data, epochs=100_000, verbose=0, callbacks=[hvd.ElasticCallback(), Spoil()])
    print("finite", bool(np.isfinite(model.layers[0].kernel.numpy()).all()), flush=True)


if __name__ == "__main__":
    {"torch": train_torch, "keras": train_keras}[sys.argv[1]]()
