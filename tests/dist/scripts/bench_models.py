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


def greedy_net(batch_size: int) -> tuple[Any, Any]:
    """Each example asks for 0.35 of the free memory, and does not write to it."""
    import psutil
    import torch

    model = torch.nn.Linear(1, 1)
    each = int(0.35 * psutil.virtual_memory().available)

    def loss() -> Any:
        scratch = torch.empty(batch_size * each, dtype=torch.uint8)
        return model(torch.ones(1, 1)).sum() + 0 * len(scratch)

    return model, loss
