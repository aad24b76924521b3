"""Train a small transformer to write Python, with model.fit of Keras and a batch that adapts.

Its text is on every machine: the sources of Python's own standard library. Where the hosts of a run
have different releases of Python, give all of them the same file with --text.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import keras
import numpy as np
from keras import layers

import hvd_elastic.keras as hvd

parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
parser.add_argument("--text", type=Path, help="file to learn from (default: standard library)")
parser.add_argument("--characters", type=int, default=1_000_000, help="how many of it")
parser.add_argument("--context", type=int, default=64, help="characters that are looked at")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3, help="at the initial batch size")
parser.add_argument("--batch-size", type=int, default=32, help="initial")
parser.add_argument("--max-batch-size", type=int, default=512)
parser.add_argument("--lr", type=float, default=1e-3, help="for the initial batch size")
parser.add_argument("--warmup", type=int, default=100, help="steps until the full learning rate")
parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
args = parser.parse_args()


def read_text():
    if args.text is not None:
        return args.text.read_bytes()[: args.characters]
    found = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= args.characters:
            break
    return found[: args.characters]


class Windows:
    """Pieces of the text, each with the same piece one character on."""

    def __init__(self, text):
        self.codes = np.frombuffer(text, np.uint8).astype(np.int32)

    def __len__(self):
        return (len(self.codes) - 1) // args.context

    def __getitem__(self, index):
        piece = self.codes[index * args.context :][: args.context + 1]
        return piece[:-1], piece[1:]


@keras.saving.register_keras_serializable()
class Places(layers.Layer):
    """Adds what is learnt for each place in a piece."""

    def build(self, shape):
        self.places = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, inputs):
        return inputs + self.places


def make_writer():
    """Return a transformer that sees nothing of what comes after a character."""
    codes = keras.Input((args.context,), dtype="int32")
    seen = Places()(layers.Embedding(256, args.width)(codes))
    for _ in range(args.layers):
        norm = layers.LayerNormalization()(seen)
        heads = layers.MultiHeadAttention(4, args.width // 4)
        seen = seen + heads(norm, norm, use_causal_mask=True)
        wide = layers.Dense(4 * args.width, "gelu")(layers.LayerNormalization()(seen))
        seen = seen + layers.Dense(args.width)(wide)
    return keras.Model(codes, layers.Dense(256)(seen))


def write(model, count):
    codes = list(b"def ")
    random = np.random.default_rng(0)
    while len(codes) < count:
        seen = codes[-args.context :]
        padded = np.zeros((1, args.context), np.int32)
        padded[0, : len(seen)] = seen
        scores = np.asarray(model.predict_on_batch(padded)[0, len(seen) - 1], np.float64)
        chances = np.exp(scores - scores.max())
        codes.append(int(random.choice(256, p=chances / chances.sum())))
    return bytes(codes).decode(errors="replace")


hvd.init()
keras.utils.set_random_seed(0)
text = read_text()
cut = int(0.95 * len(text))
model = make_writer()
warmup = keras.optimizers.schedules.PolynomialDecay(0.05 * args.lr, args.warmup, args.lr)
optimizer = keras.optimizers.Adam(hvd.follow_progress(warmup), global_clipnorm=1.0)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(optimizer), loss)
dataset = hvd.dataset(
    Windows(text[:cut]), args.batch_size, shuffle=True, max_batch_size=args.max_batch_size
)
# A step of a large batch counts for less than its examples: at most three times as many passes.
elastic = hvd.ElasticCallback(epochs=args.epochs)
history = model.fit(dataset, epochs=3 * args.epochs, callbacks=[elastic], verbose=0)
if hvd.rank() == 0:
    for number, value in enumerate(history.history["loss"]):
        print(f"pass {number}: loss {value:.3f}")

held_out = Windows(text[cut:])
inputs, targets = zip(*(held_out[i] for i in range(min(len(held_out), 256))), strict=True)
scores = model.predict_on_batch(np.stack(inputs))
bits = float(loss(np.stack(targets), scores)) / math.log(2)
hvd.report(bits_per_character=bits)
if hvd.rank() == 0:
    print(f"{bits:.2f} bits per character of text it has not seen")
    if args.sample:
        print(write(model, args.sample))
