"""The module that a training script with ``model.fit`` of Keras 3 imports.

Outline of a script::

    import hvd_elastic.keras as hvd

    hvd.init()
    model = keras.Sequential([keras.Input((8, 8, 1)), ...])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    dataset = hvd.dataset((images, labels), batch_size=64, shuffle=True)
    model.fit(dataset, epochs=10, callbacks=[hvd.ElasticCallback()])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_elastic.frameworks import check_keras_backend, check_tensorflow
from hvd_elastic.worker.debugging.uncaught import tell_uncaught

tell_uncaught()
check_tensorflow()
check_keras_backend()

from hvd_elastic.keras.callback import ElasticCallback
from hvd_elastic.script.horovod_names import missing_name
from hvd_elastic.tensorflow import (
    DistributedOptimizer,
    allgather,
    allreduce,
    dataset,
    evaluate,
    export,
    follow_progress,
    init,
    load_model,
    local_rank,
    rank,
    report,
    save,
    size,
    stop,
)

__all__ = [
    "DistributedOptimizer",
    "ElasticCallback",
    "allgather",
    "allreduce",
    "dataset",
    "evaluate",
    "export",
    "follow_progress",
    "init",
    "load_model",
    "local_rank",
    "rank",
    "report",
    "save",
    "size",
    "stop",
]

if not TYPE_CHECKING:  # else mypy would take any name for one of this module
    __getattr__ = missing_name(__name__)
