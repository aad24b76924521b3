"""A loop of its own around a tf.function, with Adam, clipping and a value in the state."""

import keras
import numpy as np
import tensorflow as tf

EPOCHS = 5
BATCH = 12
keras.config.set_floatx("float64")
keras.utils.set_random_seed(0)
random = np.random.default_rng(0)
inputs, targets = random.normal(size=(48, 4)), random.normal(size=(48, 1))
layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((4,)), *layers])
optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
dataset = tf.data.Dataset.from_tensor_slices((inputs, targets)).shuffle(48).batch(BATCH)
dataset = dataset.prefetch(2)


@tf.function(reduce_retracing=True)
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


batches = 0
for epoch in range(EPOCHS):
    for x, y in dataset:
        loss = train_step(x, y)
        batches += 1
    epoch_loss = float(loss)
