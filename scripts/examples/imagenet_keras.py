"""Train keras.applications.ResNet50 on shards of ImageNet by the published large-batch recipe.

- SGD with momentum, a rate of 0.1 for each 256 examples of the batch, five epochs of warm-up, and
  blocks that begin as the way round alone: Goyal et al., Accurate, large minibatch SGD, 2017;
  cosine decay and label smoothing: He et al., Bag of tricks for image classification, 2019.
- LARS for batches of more than 8192: You et al., Large batch training of convolutional networks,
  2017, with polynomial decay.
- With --max-batch-size the batch and its rate follow the gradient noise.

The shards are what datasets_prep/imagenet.py writes.
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
    parser.add_argument("--epochs", type=int, default=90, help="at the initial batch size")
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
    parser.add_argument("--max-batch-size", type=int, help="let the batch adapt, up to this size")
    parser.add_argument("--optimizer", choices=("sgd", "lars"), default="sgd")
    parser.add_argument("--lr", type=float, help="default of sgd: 0.1 x batch size / 256")
    parser.add_argument("--warmup", type=float, default=5, help="epochs until the full rate")
    parser.add_argument("--weight-decay", type=float, default=1e-4)
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
    most = args.max_batch_size or args.batch_size
    if not 1 <= args.batch_size <= most:
        parser.error(
            f"--batch-size {args.batch_size}: it must be from 1 to --max-batch-size {most}"
        )
    if args.lr is None and args.optimizer == "lars":
        parser.error("--optimizer lars: its rate does not follow from the batch size; give --lr")
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
if not classes:
    sys.exit(
        f"error: the index of {args.data / 'train'} names no classes; give it their names: python "
        f"datasets_prep/index_shards.py {args.data / 'train'} --classes FILE"
    )
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


@keras.saving.register_keras_serializable()
class Rate(keras.optimizers.schedules.LearningRateSchedule):
    """The rate at a step: warm-up, then cosine (SGD) or polynomial (LARS)."""

    def __init__(self, full, warm, last, polynomial):
        self.full, self.warm, self.last, self.polynomial = full, warm, last, polynomial

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        gone = tf.clip_by_value((step - self.warm) / max(1.0, self.last - self.warm), 0.0, 1.0)
        left = (1 - gone) ** 2 if self.polynomial else 0.5 * (1 + tf.cos(math.pi * gone))
        return self.full * tf.where(step < self.warm, (step + 1) / (self.warm + 1), left)

    def get_config(self):
        return vars(self)


@keras.saving.register_keras_serializable()
class LARS(keras.optimizers.SGD):
    """SGD with momentum and a rate for each layer, by the norms of its weights and gradient.

    You et al. 2017, algorithm 1. Vectors (biases, batch norm) take the rate as it is.
    """

    def __init__(self, learning_rate, momentum=0.9, decay=1e-4, trust=0.001, **options):
        super().__init__(learning_rate, momentum, **options)
        self.decay, self.trust = decay, trust

    def update_step(self, gradient, variable, learning_rate):
        if len(variable.shape) > 1:
            weights = tf.convert_to_tensor(variable)
            size = tf.norm(weights)
            ratio = self.trust * size / (tf.norm(gradient) + self.decay * size)
            ratio = tf.where(tf.math.is_finite(ratio) & (size > 0), ratio, 1.0)
            gradient = ratio * (gradient + self.decay * weights)
        super().update_step(gradient, variable, learning_rate)

    def get_config(self):
        return {**super().get_config(), "decay": self.decay, "trust": self.trust}


class Best(keras.callbacks.Callback):
    """Keeps the best model."""

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


lars = args.optimizer == "lars"
rate = hvd.follow_progress(Rate(args.lr, warm, last, lars))
if lars:
    optimizer = LARS(rate, decay=args.weight_decay)
else:
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, weight_decay=args.weight_decay)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
model.compile(hvd.DistributedOptimizer(optimizer), smoothed, jit_compile=False)
dataset = hvd.dataset(examples, args.batch_size, shuffle=True, max_batch_size=args.max_batch_size)
elastic = hvd.ElasticCallback(epochs=args.epochs, evaluate=evaluate, best=-1.0)
# A step of a large batch counts for less than its examples: at most three times as many passes.
passes = 3 * args.epochs if args.max_batch_size else args.epochs
model.fit(dataset, epochs=passes, callbacks=[elastic, Best()], verbose=0)
if hvd.rank() == 0:
    print(f"best top-1 accuracy {elastic.state.best:.4f} on {len(held_out)} pictures")
