import keras
import tensorflow as tf
from keras_task import load, make_loss, make_model, parse_arguments, test_accuracy

args = parse_arguments()
images, labels = load(args.data, "train")
dataset = tf.data.Dataset.from_tensor_slices((images, labels))
dataset = dataset.shuffle(len(images), seed=0).batch(args.batch_size)
model = make_model()
optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
model.compile(optimizer, make_loss(), metrics=["accuracy"])
model.fit(dataset, epochs=args.epochs, shuffle=False, verbose=2)
print(f"test accuracy {test_accuracy(model, args.data):.4f}")
