import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras_task import load, make_loss, make_model, parse_arguments, test_accuracy

args = parse_arguments()
hvd.init()
images, labels = load(args.data, "train")
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shard(hvd.size(), hvd.rank())
dataset = dataset.shuffle(len(images), seed=0).batch(args.batch_size // hvd.size())
model, loss_of = make_model(), make_loss()
optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
optimizer.build(model.trainable_variables)


@tf.function(reduce_retracing=True)
def train_step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    optimizer.apply(gradients, model.trainable_variables)
    return loss


def train():
    first = True
    for _ in range(args.epochs):
        for images, labels in dataset:
            train_step(images, labels)
            if first:
                hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
                hvd.broadcast_variables([v.value for v in optimizer.variables], root_rank=0)
                first = False


train()
if hvd.rank() == 0:
    print(f"test accuracy {test_accuracy(model, args.data):.4f}")
