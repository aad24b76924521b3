"""Horovod's collectives on TensorFlow tensors, which the Horovod communicator is built on."""

from __future__ import annotations

import contextlib
import functools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvd_elastic.communicator.interface import FLAGS_NAME, IN_FLIGHT, Collectives
from hvd_elastic.communicator.ring import load_horovod
from hvd_elastic.tensorflow.variables import LiveVariable

_Received: TypeAlias = Callable[[tf.Tensor], tf.Tensor]
_THREADS = 8
"""Most collectives in flight outside of graphs: each blocks a thread. More than the buckets of the
state that are sent at the same time."""
_MESSAGE = re.compile(r"^(?:\{\{.*?\}\}|\[_Derived_\]|Graph execution error:|\s)*")


def to_reduce(value: tf.Tensor, *, average: bool) -> tuple[tf.Tensor, _Received]:
    """Return a tensor that Horovod can reduce, and what turns the result back.

    As with PyTorch, types of less than 32 bits are added up in float32, truth values and whole
    numbers add up to an int64, and their mean is a float64.
    """
    result = value.dtype
    if result.is_complex:
        parts = tf.stack([tf.math.real(value), tf.math.imag(value)])
        return parts, lambda reduced: tf.complex(reduced[0], reduced[1])
    if not result.is_floating:
        result = tf.float64 if average else tf.int64
    kind = result if result.size >= 4 else tf.float32
    return tf.cast(value, kind), lambda reduced: tf.cast(reduced, result)


def to_gather(value: tf.Tensor) -> tuple[tf.Tensor, _Received]:
    """Return a tensor that Horovod can gather, and what turns the result back.

    A number is a row.
    """
    if not value.shape.rank:
        value = tf.reshape(value, [1])
    if value.dtype.is_complex:
        parts = tf.stack([tf.math.real(value), tf.math.imag(value)], -1)
        return parts, lambda gathered: tf.complex(gathered[..., 0], gathered[..., 1])
    if value.dtype == tf.bfloat16:
        return tf.bitcast(value, tf.uint16), lambda bits: tf.bitcast(bits, tf.bfloat16)
    return value, lambda gathered: gathered


def reason_of(error: tf.errors.OpError) -> str:
    """Return Horovod's message, which TensorFlow shows with the place in the graph around it."""
    lines = [_MESSAGE.sub("", line) for line in str(error.message).splitlines()]
    for line in lines:
        if line.startswith("Mismatched"):
            return line.partition(" [[{{")[0].partition(" [Op:")[0]
    told = [line for line in lines if "orovod" in line or "gloo" in line or "onnection" in line]
    return (told or [line for line in lines if line] or ["a reduction has failed"])[-1]


@tf.autograph.experimental.do_not_convert
def reduce_in_graph(tensor: tf.Tensor, name: str, *, average: bool = False) -> tf.Tensor:
    """Return the sum, or average, of a tensor over the ranks that there are when a graph runs."""
    if tf.executing_eagerly():
        return _graph_of_reduction(name, average, tensor.dtype)(tensor)
    horovod = load_horovod("tensorflow")
    kind = horovod.Average if average else horovod.Sum
    return horovod.mpi_ops._allreduce(tensor, node_name(name), kind, ignore_name_scope=True)


@functools.cache
def _graph_of_reduction(name: str, average: bool, kind: tf.DType) -> Callable[..., Any]:
    """Return a reduction as a graph of its own: without one, Horovod is not told its name."""

    def run(tensor: tf.Tensor) -> tf.Tensor:
        return reduce_in_graph(tensor, name, average=average)

    function = tf.function(run, input_signature=[tf.TensorSpec(None, kind)], autograph=False)
    return function.get_concrete_function()


class TensorFlowCollectives(Collectives):
    """Horovod's collectives on TensorFlow tensors, outside of graphs.

    Horovod knows an operation by the name of its node, and outside of graphs TensorFlow names all
    nodes of a kind alike. So each collective is a small graph of its own, traced once for each name
    and type, which runs in a thread.
    """

    framework = "TensorFlow"

    def __init__(self) -> None:
        self.horovod = load_horovod("tensorflow")
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="collective")
        self._graphs: dict[tuple[Any, ...], Any] = {}
        from horovod.common.exceptions import HorovodInternalError

        self._failure = HorovodInternalError

    def warm(self) -> None:
        """Have the collectives of a join traced and built; without ranks Horovod refuses them."""
        number, size = np.zeros(1, np.uint8), np.zeros(1, np.int32)
        begun = [
            self.begin("broadcast", number, "hvd_elastic.bytes", root_rank=0),
            self.begin("allgather", number.astype(np.int64), "hvd_elastic.lacking"),
            self.begin("allreduce", tf.zeros(1), FLAGS_NAME, op=self.horovod.Average),
        ]
        for each in range(IN_FLIGHT):
            begun += [
                self.begin("broadcast", number, f"hvd_elastic.state.{each}", root_rank=0),
                self.begin("alltoall", number, f"hvd_elastic.share.{each}", size),
            ]
        for refused in begun:
            refused.exception()

    def from_numpy(self, array: np.ndarray) -> tf.Tensor:
        return tf.convert_to_tensor(array)

    def to_numpy(self, tensor: tf.Tensor) -> np.ndarray:
        array: np.ndarray = tensor.numpy()
        return array

    @contextlib.contextmanager
    def as_bytes(
        self, tensors: Sequence[Any], *, receives: bool
    ) -> Iterator[list[list[np.ndarray]]]:
        """Yield the bytes of variables and arrays in host memory, or new memory for variables."""
        own = [
            np.empty(each.shape, each.dtype)
            if receives and isinstance(each, LiveVariable)
            else each.view()
            for each in tensors
        ]
        flat = [each.reshape(-1).view(np.uint8) for each in own if each.size]
        yield [flat] if flat else []
        for tensor, values in zip(tensors, own, strict=True):
            if receives and isinstance(tensor, LiveVariable):
                tensor.variable.assign(values)

    def join(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(pieces))

    def begin(self, kind: str, tensor: Any, name: str, *more: Any, **options: Any) -> Future[Any]:
        given = [*map(tf.convert_to_tensor, (tensor, *more))]
        graph = self._graph(kind, name, *(each.dtype for each in given), **options)
        return self._pool.submit(graph, *given)

    def synchronize(self, handle: Future[Any]) -> Any:
        try:
            return handle.result()
        except tf.errors.OpError as error:
            raise self._failure(reason_of(error)) from error

    def barrier(self) -> None:
        begun = self.begin("allreduce", tf.zeros(1), "hvd_elastic.barrier", op=self.horovod.Sum)
        self.synchronize(begun)

    def _graph(self, kind: str, name: str, *types: tf.DType, **options: int) -> Callable[..., Any]:
        key = (kind, name, types, *options.values())
        if key not in self._graphs:
            calls, node = self.horovod.mpi_ops, node_name(name)
            operation = calls._allreduce if kind == "allreduce" else getattr(calls, kind)

            def run(*tensors: tf.Tensor) -> tf.Tensor:
                found = operation(*tensors, name=node, ignore_name_scope=True, **options)
                return found[0] if isinstance(found, tuple) else found  # without received sizes

            signature = [tf.TensorSpec(None, dtype) for dtype in types]
            function = tf.function(run, input_signature=signature, autograph=False)
            self._graphs[key] = function.get_concrete_function()
        return self._graphs[key]


def node_name(name: str) -> str:
    """Return a valid name of a node, different for different names."""
    if re.fullmatch(r"[A-Za-z0-9.][A-Za-z0-9_.-]*", name):
        return name
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.{zlib.crc32(name.encode())}".lstrip("_-")
