"""Keras fit with a batch that adapts, held at one size: steps of several passes, with samples."""

import keras
import numpy as np

import hvd_elastic.keras as hvd

EPOCHS = 5
BATCH = 12
hvd.init()
keras.config.set_floatx("float64")
keras.utils.set_random_seed(0)
random = np.random.default_rng(0)
inputs, targets = random.normal(size=(48, 4)), random.normal(size=(48, 1))
layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((4,)), *layers])
optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, lr_rule="none")
model.compile(optimizer, "mse", metrics=["mae"])
bounds = {"max_batch_size": BATCH, "atomic_batch_size_bounds": (2, 4)}
dataset = hvd.dataset((inputs, targets), BATCH, shuffle=True, **bounds).prefetch(2)


class Log(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        assert logs["loss"] > 0


callbacks = [hvd.ElasticCallback(epochs=EPOCHS), Log()]
model.fit(dataset, epochs=2 * EPOCHS, callbacks=callbacks, verbose=0)
