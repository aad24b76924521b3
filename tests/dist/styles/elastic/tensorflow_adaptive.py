"""A tf.function with Adam and a batch that adapts, held at one size: steps of several passes."""

import keras
import numpy as np
import tensorflow as tf

import hvd_elastic.tensorflow as hvd

EPOCHS = 5
BATCH = 12
hvd.init()
keras.config.set_floatx("float64")
keras.utils.set_random_seed(0)
random = np.random.default_rng(0)
inputs, targets = random.normal(size=(48, 4)), random.normal(size=(48, 1))
layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((4,)), *layers])
optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
optimizer = hvd.DistributedOptimizer(optimizer)
bounds = {"max_batch_size": BATCH, "atomic_batch_size_bounds": (2, 4)}
dataset = hvd.dataset((inputs, targets), BATCH, shuffle=True, **bounds)


@tf.function(reduce_retracing=True)
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


@hvd.run
def train(state):
    for epoch in hvd.epochs(EPOCHS):
        for x, y in dataset:
            state.commit(loss=train_step(x, y))
        state.epochs += 1


train(hvd.State(model=model, optimizer=optimizer, epochs=0))
