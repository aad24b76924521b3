import keras
import tensorflow as tf
from keras_task import load, make_loss, make_model, parse_arguments, test_accuracy

import hvd_elastic.tensorflow as hvd

args = parse_arguments()
hvd.init()
dataset = hvd.dataset(load(args.data, "train"), args.batch_size, shuffle=True)
model, loss_of = make_model(), make_loss()
optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)


@tf.function(reduce_retracing=True)
def train_step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


@hvd.run
def train(state):
    for _ in hvd.epochs(args.epochs):
        for images, labels in dataset:
            state.commit(loss=train_step(images, labels))


train(hvd.State(model=model, optimizer=optimizer))
if hvd.rank() == 0:
    print(f"test accuracy {test_accuracy(model, args.data):.4f}")
