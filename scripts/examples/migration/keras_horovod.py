import horovod.tensorflow.keras as hvd
import keras
import tensorflow as tf
from keras_task import load, make_loss, make_model, parse_arguments, test_accuracy

args = parse_arguments()
hvd.init()
images, labels = load(args.data, "train")
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shard(hvd.size(), hvd.rank())
dataset = dataset.shuffle(len(images), seed=0).batch(args.batch_size // hvd.size())
model = make_model()
optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer, make_loss(), metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.backup / "{epoch}.keras"))
verbose = 2 if hvd.rank() == 0 else 0
model.fit(dataset, epochs=args.epochs, callbacks=callbacks, shuffle=False, verbose=verbose)
if hvd.rank() == 0:
    print(f"test accuracy {test_accuracy(model, args.data):.4f}")
