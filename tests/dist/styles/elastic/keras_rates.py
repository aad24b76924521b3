"""Keras fit whose learning rate is changed between epochs and by batch, with a file of each."""

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
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.04, momentum=0.5))
model.compile(optimizer, "mse")
dataset = hvd.dataset((inputs, targets), BATCH, shuffle=True)


def scale(factor):
    optimizer.learning_rate = float(optimizer.learning_rate) * factor


class Rates(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        scale(1.5)

    def on_train_batch_begin(self, batch, logs=None):
        scale(0.98)

    def on_epoch_end(self, epoch, logs=None):
        elastic.state.epochs_ended += 1
        hvd.save(f"epoch-{epoch}", {"layers": model, "rate": float(optimizer.learning_rate)})


elastic = hvd.ElasticCallback(epochs_ended=0)
plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=9.0)
model.fit(dataset, epochs=EPOCHS, callbacks=[elastic, plateau, Rates()], verbose=0)
