"""What the scripts of Keras beside this one train: a small network on handwritten digits."""

import argparse
from pathlib import Path

import keras
import numpy as np
from keras import layers


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="of datasets_prep/digits.py")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--backup", type=Path, default="backup")
    return parser.parse_args()


def load(folder, name):
    with np.load(folder / f"{name}.npz") as arrays:
        return arrays["images"].transpose(0, 2, 3, 1), arrays["labels"]


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            *(keras.Input((8, 8, 1)), layers.Conv2D(16, 3, padding="same")),
            *(layers.BatchNormalization(), layers.ReLU()),
            *(layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPool2D()),
            *(layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)),
        ]
    )


def make_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def test_accuracy(model, folder):
    images, labels = load(folder, "test")
    return float(np.mean(np.argmax(model(images, training=False), 1) == labels))
