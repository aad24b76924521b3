"""The workload under ``hvd-elastic run``, as ``model.fit`` of Keras."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

import hvd_elastic.keras as hvd
from benchmarks.peers import options

args = options.parse_arguments()
hvd.init()
keras.utils.set_random_seed(0)
if args.model == "tiny":
    layers = [keras.layers.Flatten(), keras.layers.Dense(10)]
else:
    layers = [
        keras.layers.Conv2D(16, 3, padding="same"),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
with np.load(args.data / "train.npz") as arrays:
    images, labels = arrays["images"].reshape(-1, 8, 8, 1), arrays["labels"]
dataset = hvd.dataset((images, labels), args.batch_size, shuffle=True)


class Steps(keras.callbacks.Callback):
    """Marks each step, and pads it."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Mark the step that has ended."""
        options.mark_step(hvd.size())
        time.sleep(args.step_time)


options.mark("ready")
model.fit(dataset, epochs=10**9, callbacks=[hvd.ElasticCallback(), Steps()], verbose=0)
