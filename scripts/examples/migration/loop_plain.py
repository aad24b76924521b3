import keras
import tensorflow as tf
from keras_task import load, make_loss, make_model, parse_arguments, test_accuracy

args = parse_arguments()
images, labels = load(args.data, "train")
dataset = tf.data.Dataset.from_tensor_slices((images, labels))
dataset = dataset.shuffle(len(images), seed=0).batch(args.batch_size)
model, loss_of = make_model(), make_loss()
optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)


@tf.function(reduce_retracing=True)
def train_step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


def train():
    for _ in range(args.epochs):
        for images, labels in dataset:
            train_step(images, labels)


train()
print(f"test accuracy {test_accuracy(model, args.data):.4f}")
