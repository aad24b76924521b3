"""Train a small network on handwritten digits in a loop of TensorFlow, elastically."""

import argparse
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import hvd_elastic.tensorflow as hvd

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
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
dataset = hvd.dataset(load("train"), args.batch_size, shuffle=True)


@tf.function(reduce_retracing=True)
def train_step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


@hvd.run
def train(state):
    for _ in hvd.epochs(args.epochs):
        for images, labels in dataset:
            loss = train_step(images, labels)
            time.sleep(args.step_time)  # stands for a larger model
            state.commit(loss=loss)


train(hvd.State(model=model, optimizer=optimizer))
images, labels = load("test")
accuracy = float(np.mean(np.argmax(model(images, training=False), 1) == labels))
hvd.report(test_accuracy=accuracy)
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.4f}")
