"""Keras fit with momentum, a schedule by steps, validation data and a callback of its own."""

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
schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.9)
optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer, "mse", metrics=["mae"])
dataset = hvd.dataset((inputs, targets), BATCH, shuffle=True)
dataset = dataset.map(lambda x, y: (2 * x, y)).prefetch(2)


class Log(keras.callbacks.Callback):
    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        assert "loss" in logs

    def on_epoch_end(self, epoch, logs=None):
        assert "val_mae" in logs


callbacks = [hvd.ElasticCallback(), Log()]
model.fit(dataset, epochs=EPOCHS, callbacks=callbacks, validation_data=(inputs, targets), verbose=0)
