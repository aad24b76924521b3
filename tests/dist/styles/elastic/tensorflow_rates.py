"""A loop of its own that changes the learning rate between epochs and in the body of the loop."""

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
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.04, momentum=0.5))
dataset = hvd.dataset((inputs, targets), BATCH, shuffle=True)
seen = tf.Variable(0, dtype=tf.int64)


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
        optimizer.learning_rate = float(optimizer.learning_rate) * 1.5
        for x, y in dataset:
            optimizer.learning_rate = float(optimizer.learning_rate) * 0.98
            seen.assign_add(1)
            state.commit(loss=train_step(x, y))
        optimizer.learning_rate = float(optimizer.learning_rate) * 0.5
        seen.assign_add(100)


train(hvd.State(model=model, optimizer=optimizer, seen=seen))
