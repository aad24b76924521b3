import keras
import tensorflow as tf
from keras_task import load, make_loss, make_model, parse_arguments, test_accuracy

args = parse_arguments()
strategy = tf.distribute.MultiWorkerMirroredStrategy()  # the hosts are in TF_CONFIG
chief = strategy.cluster_resolver.task_id in (None, 0)
images, labels = load(args.data, "train")
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).with_options(options)
dataset = dataset.shuffle(len(images), seed=0).batch(args.batch_size)
with strategy.scope():
    model = make_model()
    optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
    model.compile(optimizer, make_loss(), metrics=["accuracy"])
backup = keras.callbacks.BackupAndRestore(args.backup)
model.fit(dataset, epochs=args.epochs, callbacks=[backup], shuffle=False, verbose=2 if chief else 0)
if chief:
    print(f"test accuracy {test_accuracy(model, args.data):.4f}")
