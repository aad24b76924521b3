import keras
from keras_task import load, make_loss, make_model, parse_arguments, test_accuracy

import hvd_elastic.keras as hvd

args = parse_arguments()
hvd.init()
dataset = hvd.dataset(load(args.data, "train"), args.batch_size, shuffle=True)
model = make_model()
optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer, make_loss(), metrics=["accuracy"])
model.fit(dataset, epochs=args.epochs, callbacks=[hvd.ElasticCallback()], shuffle=False, verbose=2)
if hvd.rank() == 0:
    print(f"test accuracy {test_accuracy(model, args.data):.4f}")
