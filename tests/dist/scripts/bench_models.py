"""Small models of the tests of ``hvd-elastic bench synthetic``."""

from __future__ import annotations

from typing import Any


def torch_net(batch_size: int) -> tuple[Any, Any]:
    import torch

    model = torch.nn.Linear(16, 4)
    inputs = torch.randn(batch_size, 16)
    return model, lambda: model(inputs).square().mean()


def tensorflow_net(batch_size: int) -> tuple[Any, Any]:
    import keras
    import tensorflow as tf

    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)])
    inputs = tf.random.normal((batch_size, 16))
    return model, lambda: tf.reduce_mean(tf.square(model(inputs, training=True)))
