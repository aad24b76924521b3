"""A small training job in TensorFlow that says what it holds; see ``probe.py``."""

import itertools
import random
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_elastic.keras
import hvd_elastic.tensorflow as hvd
from hvd_elastic.worker import context
from tests.dist.scripts.probe import Probe, host_mark, options

parser = options()
parser.add_argument("--style", choices=("fit", "loop"), required=True)
args = parser.parse_args()


def tensor_bytes(value):
    if not isinstance(value, (keras.Variable, tf.Variable)):
        return None
    array = value.numpy()
    return str((str(array.dtype), array.shape)).encode() + array.tobytes()


class Mean(keras.layers.Layer):
    """Keeps a mean that differs between ranks until the next generation."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(8,), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, 0))
        return inputs


probe = Probe(args, tensor_bytes)
hvd.init()
if args.double:
    keras.config.set_floatx("float64")
keras.utils.set_random_seed(args.seed)
layers = [Mean(), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
generator = np.random.default_rng(1)
inputs = generator.normal(size=(args.examples, 8)).astype(keras.config.floatx())
targets = generator.integers(3, size=args.examples)
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Augmented:
    """Examples with random noise of each kind, their index, and a hash of the host that read it."""

    def __len__(self):
        return args.examples

    def __getitem__(self, index):
        time.sleep(args.augment)
        noise = np.random.rand(8).astype(inputs.dtype) + random.random()
        return inputs[index] + 0.01 * noise, targets[index], index, host_mark()


dataset = hvd.dataset(
    (inputs, targets) if args.augment is None else Augmented(),
    args.batch_size,
    shuffle=True,
    max_batch_size=args.max_batch_size,
    unequal_shares=args.unequal_shares or None,
    seed_examples=args.augment is not None,
)


def tell_if_due(model, state):
    def whole():
        return [model.weights, optimizer.variables, state.batches]

    def same():
        return [model.trainable_variables, optimizer.variables, state.batches]

    if not len(context.current().step.passes) > 1:
        probe.tell_if_due(whole, same)


def take_step(model, state, x, step):
    """Take a step, or a pass of one, and tell before it what this rank holds."""
    if not context.current().worker.in_train:  # it is only traced
        return step()
    tell_if_due(model, state)
    result = step()
    if not context.current().step.accumulating:
        state.batches += 1
    probe.wait(len(x))
    return result


def loop(model):
    @tf.function(reduce_retracing=True)
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def train(state):
        for _ in hvd.epochs(args.epochs):
            for x, y, *read in dataset:
                if read:
                    probe.note_examples(x, *read)
                loss = take_step(model, state, x, lambda: train_step(x, y))  # noqa: B023
                state.commit(loss=loss)
            if hvd.allreduce(probe.sees_enough(), "enough", average=False) > 0:
                break

    def warmup():
        for batch in itertools.islice(dataset, 2):
            train_step(*batch[:2])

    hvd.run(train, warmup=warmup)(hvd.State(model=model, optimizer=optimizer, batches=0))


class Model(keras.Sequential):
    """Has ``fit`` tell what the rank holds before each step."""

    train_function: Any

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            super().make_train_function(force)
            train = self.train_function

            def step(batches):
                data = batches[0]
                return take_step(self, elastic.state, data[0], lambda: train([data]))

            self.train_function = step


class Enough(keras.callbacks.Callback):
    """Adds a metric, which ElasticCallback averages over the ranks."""

    def on_epoch_end(self, epoch, logs=None):
        logs["enough"] = probe.sees_enough()


class End(keras.callbacks.Callback):
    """Ends training on all ranks if one of them has seen enough."""

    def on_epoch_end(self, epoch, logs=None):
        if logs["enough"] > 0:
            self.model.stop_training = True


if args.style == "loop":
    model = keras.Sequential([keras.Input((8,)), *layers])
    loop(model)
else:
    model = Model([keras.Input((8,)), *layers])
    model.compile(optimizer, loss_of)
    elastic = hvd_elastic.keras.ElasticCallback(batches=0)
    model.fit(dataset, epochs=args.epochs, callbacks=[Enough(), elastic, End()], verbose=0)
if hvd.rank() == 0:
    arrays = {str(number): array for number, array in enumerate(model.get_weights()[1:])}
    np.savez(args.folder / "trained.npz", **arrays)
