"""Reads with the service of ``tf.data``, on another host; see ``emulated.py``.

``--serve`` runs the service: a dispatcher, and a worker.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers import emulated

SIZE = 64
"""Rows of a square matrix."""


def product(repetitions: Any) -> Any:
    """Multiply matrices so many times, in the processor time of one core."""
    start = tf.eye(SIZE)
    step = tf.fill((SIZE, SIZE), 1.0 / SIZE)
    return tf.while_loop(
        lambda number, _: number < repetitions,
        lambda number, value: (number + 1, tf.matmul(value, step)),
        (0, start),
    )[1]


def repetitions_of(transform_ms: float) -> int:
    """Return how many products take this processor time [ms] on a core of its own."""
    multiply = tf.function(product)
    count = 64
    while True:
        multiply(tf.constant(count))
        began = time.process_time()
        multiply(tf.constant(count))
        took_ms = 1000 * (time.process_time() - began)
        if took_ms > 200:
            return max(1, round(count * transform_ms / took_ms))
        count *= 2


def serve(address: str, port: int) -> None:
    """Serve until this process is ended."""
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
    config = service.WorkerConfig(
        dispatcher_address=f"localhost:{port}",
        worker_address=f"{address}:{port + 1}",
        port=port + 1,
    )
    worker = service.WorkerServer(config)
    print("serves", flush=True)
    threading.Event().wait()
    del worker, dispatcher


parser = emulated.parser()
parser.add_argument("--serve", action="store_true")
parser.add_argument("--address", required=True, help="of the service")
parser.add_argument("--port", type=int, default=5050)
parser.add_argument("--repetitions", type=int, default=0, help="of the product, for an example")
parser.add_argument("--calibrate", action="store_true", help="write the repetitions and end")
args = parser.parse_args()
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)


def transform(index: Any) -> Any:
    """Return the picture of an index; a Python function would not run on another host."""
    value = product(tf.constant(args.repetitions))
    never = tf.cast(value[0, 0] > 1.5, tf.uint8)  # needs the product
    return tf.fill(emulated.SHAPE, tf.cast(index % 256, tf.uint8) + never)


def batches() -> Any:
    """Return the batches of a block."""
    service = tf.data.experimental.service
    dataset = tf.data.Dataset.range(emulated.examples(args))
    # The input host has one core, so one picture is made at a time.
    dataset = dataset.map(transform).batch(args.batch)
    sharing = service.distribute("distributed_epoch", f"grpc://{args.address}:{args.port}")
    return dataset.apply(sharing).prefetch(tf.data.AUTOTUNE)


if args.serve:
    serve(args.address, args.port)
elif args.calibrate:
    args.result.write_text(str(repetitions_of(args.transform_ms)), encoding="utf-8")
else:
    found = []
    for _ in range(args.rounds):
        found.append(emulated.block(args, "free", emulated.free_batches(args)))
        found.append(emulated.block(args, "read", batches()))
    emulated.write(args, found)
