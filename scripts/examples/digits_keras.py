"""Train a small network on handwritten digits with model.fit of Keras, elastically."""

import argparse
import time
from pathlib import Path

import keras
import numpy as np

import hvd_elastic.keras as hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", type=Path, required=True, help="folder of datasets_prep/digits.py")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--step-time", type=float, default=0.0, help="seconds to add to each step")
args = parser.parse_args()


def load(name):
    with np.load(args.data / f"{name}.npz") as arrays:
        return arrays["images"].transpose(0, 2, 3, 1), arrays["labels"]


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(args.step_time)  # stands for a larger model


hvd.init()
keras.utils.set_random_seed(0)
layers = keras.layers
model = keras.Sequential(
    [
        *(keras.Input((8, 8, 1)), layers.Conv2D(16, 3, padding="same")),
        *(layers.BatchNormalization(), layers.ReLU()),
        *(layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPool2D()),
        *(layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)),
    ]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr, momentum=0.9))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"])
dataset = hvd.dataset(load("train"), args.batch_size, shuffle=True)
model.fit(dataset, epochs=args.epochs, callbacks=[hvd.ElasticCallback(), Slow()], verbose=0)
accuracy = model.evaluate(*load("test"), verbose=0)[1]
hvd.report(test_accuracy=accuracy)
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.4f}")
