"""Train keras.applications.ResNet50 on shards of ImageNet by the published large-batch recipe.

SGD with momentum, a rate of 0.1 for each 256 examples of the batch, five epochs of warm-up, and
blocks that begin as the way round alone: Goyal et al., Accurate, large minibatch SGD, 2017; cosine
decay and label smoothing: He et al., Bag of tricks for image classification, 2019. The shards are
what datasets_prep/imagenet.py writes.
"""

import argparse
import math
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import hvd_elastic.keras as hvd
from hvd_elastic.data import CentreCrop, RandomCrop, ShardDataset


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train/ and val/")
    parser.add_argument("--image-size", type=int, default=224, help="pixels it is trained on")
    parser.add_argument("--crop", type=float, default=0.25, help="least share of a picture to see")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
    parser.add_argument("--lr", type=float, help="default: 0.1 x batch size / 256")
    parser.add_argument("--warmup", type=float, default=5, help="epochs until the full rate")
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--evaluate", metavar="RUN|FILE", help="only evaluate these weights")
    args = parser.parse_args()
    if not (args.data / "train" / "index.json").exists():
        parser.error(
            f"--data {args.data}: there are no shards in train/; they are written by: python "
            f"datasets_prep/imagenet.py --source PICTURES --out {args.data}"
        )
    if args.image_size < 32:
        parser.error(f"--image-size {args.image_size}: ResNet50 of Keras needs 32 or more")
    if args.lr is None:
        args.lr = 0.1 * args.batch_size / 256
    return args


def pixels(image):
    return np.asarray(image, np.uint8)


args = parse()
hvd.init()
keras.utils.set_random_seed(0)
if args.precision == "bfloat16":
    keras.config.set_dtype_policy("mixed_bfloat16")
examples = ShardDataset(
    args.data / "train", pixels, decode=RandomCrop(args.image_size, scale=(args.crop, 1))
)
held_out = ShardDataset(args.data / "val", pixels, decode=CentreCrop(args.image_size))
classes = len(examples.classes)
shape = (args.image_size, args.image_size, 3)
inputs = keras.Input(shape)
scaled = keras.layers.Normalization(
    mean=(123.7, 116.3, 103.5), variance=[each**2 for each in (58.4, 57.1, 57.4)]
)(inputs)
network = keras.applications.ResNet50(
    weights=None, classes=classes, input_shape=shape, classifier_activation=None
)
for layer in network.layers:
    if isinstance(layer, keras.layers.BatchNormalization):
        # The statistics of evaluation follow the last tens of steps, as in PyTorch. With Keras's
        # 0.99 they would still be the initial ones after a hundred steps.
        layer.momentum = 0.9
        if layer.name.endswith("_3_bn"):  # the last one of a block
            layer.gamma.assign(tf.zeros_like(layer.gamma))
outputs = keras.layers.Activation("linear", dtype="float32")(network(scaled))
model = keras.Model(inputs, outputs)
metrics = {
    "val_loss": tf.nn.sparse_softmax_cross_entropy_with_logits,
    "val_top1": lambda labels, logits: tf.math.in_top_k(labels, logits, 1),
    "val_top5": lambda labels, logits: tf.math.in_top_k(labels, logits, min(5, classes)),
}


def evaluate():
    """Means over all pictures of val/, the same on all ranks."""
    return hvd.evaluate(model, held_out, metrics, batch_size=min(args.batch_size, 64))


def told(found):
    return f"top-1 accuracy {found['val_top1']:.4f}, top-5 {found['val_top5']:.4f}"


if args.evaluate:
    import hvd_elastic.tensorflow as loops

    @loops.run
    def measure(_state):
        loops.load_model(args.evaluate, model, share=True)
        found = evaluate()
        if loops.rank() == 0:
            print(f"{told(found)}, loss {found['val_loss']:.4f} on {len(held_out)} pictures")

    measure(loops.State(model=model))
    sys.exit()


class Recipe(keras.callbacks.Callback):
    """Sets the rate of each step, and keeps the best model."""

    def on_train_batch_begin(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        if step < warm:
            rate = (step + 1) / (warm + 1)
        else:
            gone = min(1, (step - warm) / max(1, last - warm))
            rate = 0.5 * (1 + math.cos(math.pi * gone))
        self.model.optimizer.learning_rate = args.lr * rate

    def on_epoch_end(self, epoch, logs=None):
        if logs["val_top1"] > elastic.state.best:
            elastic.state.best = logs["val_top1"]
            hvd.save("best.keras", self.model)
        if hvd.rank() == 0:
            print(f"pass {epoch}: loss {logs['loss']:.3f}, {told(logs)}", flush=True)


steps_of_epoch = len(examples) / args.batch_size
last, warm = args.epochs * steps_of_epoch, args.warmup * steps_of_epoch


def smoothed(labels, logits):
    """Cross-entropy with label smoothing, of labels that are numbers."""
    wanted = tf.one_hot(tf.cast(tf.reshape(labels, [-1]), tf.int32), classes)
    wanted = wanted * (1 - args.label_smoothing) + args.label_smoothing / classes
    return tf.nn.softmax_cross_entropy_with_logits(wanted, logits)


optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr, momentum=0.9, weight_decay=1e-4))
optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
model.compile(optimizer, smoothed, jit_compile=False)
dataset = hvd.dataset(examples, args.batch_size, shuffle=True)
elastic = hvd.ElasticCallback(evaluate=evaluate, best=-1.0)
model.fit(dataset, epochs=args.epochs, callbacks=[elastic, Recipe()], verbose=0)
if hvd.rank() == 0:
    print(f"best top-1 accuracy {elastic.state.best:.4f} on {len(held_out)} pictures")
