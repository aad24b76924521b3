"""A ``tf.data.Dataset`` of this rank's share, each example exactly once while the world changes.

:mod:`hvd_elastic.input.data_order` decides which examples a rank reads. What the script makes of
the dataset (``map``, ``prefetch``) is a pipeline of TensorFlow, which reads ahead of training. So
the batches that come out of it are counted, and not those that go in; where this rank's place
changes, the pipeline is begun again from there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset
from tensorflow.python.util import nest

from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import as_whole
from hvd_elastic.input.data_order import DataOrder, Place
from hvd_elastic.input.forked import WorkerStart
from hvd_elastic.input.indexed import Arrays, IndexedSource, collated
from hvd_elastic.input.loader import OrderedLoader
from hvd_elastic.input.loader_arguments import examples_of, order_for
from hvd_elastic.input.shared import SharedReading
from hvd_elastic.input.skipped import shortened, whole
from hvd_elastic.script.horovod_names import explain_arguments
from hvd_elastic.worker import context as training
from hvd_elastic.worker.debugging.uncaught import show_instead
from hvd_elastic.worker.input_source import Skipped
from hvd_elastic.worker.worker import Worker

_KEEPS_BATCHES = (
    "as_numpy_iterator cardinality element_spec fingerprint map options prefetch with_options"
)
"""Methods of a dataset after which a batch that comes out is one that went in."""


@explain_arguments
def dataset(
    source: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    max_batch_size: int | None = None,
    atomic_batch_size_bounds: tuple[int, int | None] | None = None,
    accumulation: bool = True,
    unequal_shares: bool | None = None,
    seed_examples: bool = False,
    pad: float | None = None,
) -> tf.data.Dataset:
    """Return a ``tf.data.Dataset`` of this rank's share of every global batch.

    Each example is read once an epoch, whatever joins or leaves. Iterate over it inside
    ``hvd.epochs()``, once an epoch, or give it to ``model.fit``. ``map``, ``prefetch`` and
    ``with_options`` after it work as always; what would change the batches (``batch``, ``shuffle``,
    ``repeat``, ``filter``) is refused. Outside of training it gives two batches of the first
    examples, to build and trace a model with.

    Args:
        source: arrays with a common first dimension, as an array, tuple or dict; or an object with
            ``__len__`` and ``__getitem__`` that returns an example, an array or a tuple or dict of
            them. All ranks must see the same examples at the same indices. If it has ``blocks``, as
            a :class:`hvd_elastic.data.ShardDataset` has, an epoch is random within a few at a time.
        batch_size: examples in a step over all ranks together, >= 1.
        shuffle: whether each epoch has a new random order drawn from ``seed``; False: 0, 1, 2, ...
        seed: seed of the order, >= 0, the same on all ranks.
        drop_last: leave out the last step of an epoch if it would be smaller than ``batch_size``.
        max_batch_size: largest global batch to adapt to, >= batch_size; None: the batch is fixed.
            Then a batch that comes out is one pass of a step, and ``optimizer.apply`` changes
            nothing until the last pass.
        atomic_batch_size_bounds: fewest and most examples in one pass on one rank; None as the
            upper bound means no bound.
        accumulation: whether a share may be computed in several passes.
        unequal_shares: whether slow ranks get fewer examples of a step; None: if the batch adapts.
        seed_examples: seed the random numbers of Python and NumPy for each example of ``source``,
            by ``seed``, the epoch and its index, so that it does not depend on the process that
            reads it. It is always so where input hosts read for the ranks.
        pad: value that fills examples of unequal length up to the longest of their batch, along all
            dimensions; None: all examples have the same shapes. For a source that returns examples.

    Raises:
        ScriptError: the source cannot be read by index, is empty, or is batched already;
            batch_size or seed is out of range; the bounds of the batch contradict each other.
    """
    seed = as_whole(seed)
    source_here = DatasetSource(source, seed, pad)
    order = order_for(
        "hvd.dataset",
        source,
        batch_size,
        source_here.examples,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        max_batch_size=max_batch_size,
        atomic_batch_size_bounds=atomic_batch_size_bounds,
        accumulation=accumulation,
        unequal_shares=unequal_shares,
    )
    reading = SharedReading(source_here, 0, always=seed_examples)
    shares = _Shares(order, source_here, reading, padded=pad is not None)
    # Not from_generator, whose first batch takes some 10 ms of each change of the world.
    made = tf.data.Dataset.counter().scan(np.int64(0), shares.next_in_graph)
    return ElasticDataset(made.prefetch(1), shares)


class DatasetSource(IndexedSource):
    """Reads the source that the script has given to ``hvd.dataset``, arrays or an object.

    Raises:
        ScriptError: the source cannot be read by index.
    """

    def __init__(self, source: Any, seed: int = 0, pad: float | None = None) -> None:
        if Arrays.is_source(source):
            if pad is not None:
                raise ScriptError(
                    f"hvd.dataset(arrays, pad={pad}): examples of an array have one shape; leave "
                    "pad out"
                )
            arrays = Arrays(source)
            super().__init__(arrays, len(arrays), arrays.collate, seed)
        elif isinstance(source, keras.utils.PyDataset):
            raise ScriptError(
                f"hvd.dataset({type(source).__name__}): a PyDataset (Sequence) of Keras gives "
                "batches, and hvd.dataset makes them, a share for each rank. Give it an object "
                "whose __getitem__ returns one example, or arrays"
            )
        else:
            instead = (
                "hvd.dataset arrays, or an object with __len__ and __getitem__; map and prefetch "
                "may follow: hvd.dataset((images, labels), 64).map(augment)"
            )
            examples = examples_of(source, isinstance(source, tf.data.Dataset), instead)
            super().__init__(source, examples, partial(collated, pad=pad), seed)
        self._started = WorkerStart(None)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def start(self, number: int, count: int) -> None:
        self._started(number)
        # The threads of TensorFlow do not exist in a forked process: an operation would wait for
        # ever. These two are what all operations on tensors go through.
        pywrap_tfe.TFE_Py_FastPathExecute = _no_operations
        pywrap_tfe.TFE_Py_Execute = _no_operations


def _no_operations(*_: Any) -> NoReturn:
    raise ScriptError(
        "the source of hvd.dataset computes with TensorFlow, which processes of input hosts "
        "cannot; read and transform there with NumPy or Pillow, and compute with TensorFlow in "
        "hvd.dataset(...).map(...)"
    )


class _Shares(OrderedLoader):
    """The batches of this rank, as the source of a pipeline."""

    def __init__(
        self,
        order: DataOrder,
        source: DatasetSource,
        shared: SharedReading,
        *,
        padded: bool = False,
    ) -> None:
        super().__init__(order, shared)
        self._source = source
        self._is_shared = False
        first, _ = whole(source.read([0]))
        fields = nest.flatten_with_joined_string_paths(first)
        self._fields = [(name, _spec(name, batch, padded=padded)) for name, batch in fields]
        self._signature = tf.nest.pack_sequence_as(first, [spec for _, spec in self._fields])
        self._reading: Iterator[tuple[Any, list[int]]] | None = None
        """Batches of the present pipeline, with their indices."""
        self._read_indices: list[tuple[list[int], Sequence[Skipped]]] = []
        self._turn = 1
        """Number of the present pipeline; a thread of an earlier one may still ask for a batch."""
        self._turn_lock = threading.Lock()
        self._pipeline: Iterator[Any] | None = None
        self._next_place: Place | None = None

    @tf.autograph.experimental.do_not_convert
    def next_in_graph(self, turn: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the turn of a pipeline, 0 at first, and its next batch."""
        specs = tf.nest.flatten(self._signature)
        kinds = [tf.int64, *(spec.dtype for spec in specs)]
        turn, *read = tf.numpy_function(self.next_batch, [turn], kinds)
        flat = [tf.ensure_shape(each, spec.shape) for each, spec in zip(read, specs, strict=True)]
        return tf.ensure_shape(turn, ()), tf.nest.pack_sequence_as(self._signature, flat)

    def next_batch(self, turn: np.int64) -> list[Any]:
        """Return the turn of a pipeline and its next batch, flat; StopIteration: it is over."""
        if self._reading is None:
            error = _refusal("A pipeline of your own, or a tf.distribute strategy,")
            show_instead(error)
            raise error
        with self._turn_lock:
            if turn not in (0, self._turn):
                raise StopIteration
            try:
                batch, indices = next(self._reading)
            except ScriptError as error:
                show_instead(error)
                raise
            batch, skipped = whole(batch)
            self._read_indices.append((indices, skipped))
            flat = tf.nest.flatten(batch)
            self._check_types(flat)
            return [np.int64(self._turn), *flat]

    def _check_types(self, flat: list[np.ndarray]) -> None:
        """Raise ScriptError, which names the field, for values that are not as in example 0."""
        for (name, spec), array in zip(self._fields, flat, strict=True):
            fits = spec.shape.is_compatible_with(array.shape)
            if not fits or tf.as_dtype(array.dtype) != spec.dtype:
                error = ScriptError(
                    f"hvd.dataset(source): {_named(name)} is {array.dtype.name} of shape "
                    f"{array.shape[1:]} in an example, and {spec.dtype.name} of shape "
                    f"{tuple(spec.shape[1:])} in example 0. All examples need the same types and "
                    "shapes; hvd.dataset(..., pad=0) pads examples of unequal length"
                )
                show_instead(error)
                raise error

    def loop(
        self, begin: Callable[[], Iterator[Any]], enough: Callable[[], bool] | None
    ) -> Generator[Any, None, None]:
        """Yield what the script's pipeline, which ``begin`` begins, makes of this source."""
        context = self._context()
        averagers = context.worker.averagers

        def read(step: Place, following: Place, *, is_first: bool) -> tuple[Any, Any]:
            self._order.prefetch(step)
            if is_first:
                self._go_to(context.worker, step, begin)
            if self._is_shared:
                self._shared.follow_hosts(context.worker)
            self._next_place = None
            assert self._pipeline is not None
            batch = next(self._pipeline)
            self._next_place = following
            indices, skipped = self._read_indices.pop(0)
            return shortened(batch, skipped), indices if context.worker.audit else None

        try:
            for batch in self._order.loop(context, read, enough):
                averagers.prepare()
                yield batch
                averagers.collect()
        except GeneratorExit:
            averagers.collect(collectives=False)
            raise
        finally:
            self._end_pipeline()

    def _go_to(self, worker: Worker, step: Place, begin: Callable[[], Iterator[Any]]) -> None:
        """Begin the pipeline again, unless the step's batches come out of it next."""
        is_shared = self._shared.is_used(worker)
        same = is_shared == self._is_shared and self._next_place == step
        if self._pipeline is not None and same:
            return
        self._end_pipeline()
        self._is_shared = is_shared
        order = self._order.indices(step, worker.progress)
        if is_shared:
            self._shared.begin_passes(worker, step, order)
            self._reading = iter(self._shared.next, None)  # it raises StopIteration at the end
        else:
            self._reading = ((self._source.read(indices), indices) for indices in order)
        self._pipeline = begin()

    def _end_pipeline(self) -> None:
        """Have the pipeline read nothing more, and be removed by a thread of its own.

        The removal may wait for the thread of TensorFlow that tunes the pipeline and has missed
        its end: one in twelve did, for half of the time that the pipeline had lived. All ranks
        would wait for that.
        """
        with self._turn_lock:
            self._turn += 1
            self._read_indices = []
        over, self._pipeline, self._next_place = [self._pipeline], None, None
        if over[0] is not None:
            threading.Thread(target=over.clear, name="hvd_elastic-pipeline", daemon=True).start()


def _named(name: str) -> str:
    return f"field {name}" if name else "an example"


def _spec(name: str, batch: np.ndarray, *, padded: bool) -> tf.TensorSpec:
    """Return the type and shape of a field of a batch; the last of its dimensions are known."""
    kind = batch.dtype
    strings = kind.kind != "O" or all(isinstance(each, (str, bytes)) for each in batch.flat)
    try:
        known = tf.as_dtype(kind) if strings else None
    except TypeError:
        known = None
    if known is None:
        raise ScriptError(
            f"hvd.dataset(source): {_named(name)} is of type {kind}, which TensorFlow has no "
            "tensors of; convert it to numbers or texts"
        )
    inner = batch.shape[1:]
    if padded and inner:
        inner = (None,) * max(1, len(inner) - 1) + inner[1:][-1:]
    return tf.TensorSpec((None, *inner), known)


class ElasticDataset(UnaryUnchangedStructureDataset):
    """A dataset of TensorFlow that gives this rank's batches of the epoch when it is iterated."""

    latest: ElasticDataset | None = None
    """The one that was made last."""
    as_input: Callable[[ElasticDataset], Iterator[Any]] | None = None
    """Makes an iterator for a loop that belongs to another library, while it trains."""

    def __init__(self, made: tf.data.Dataset, shares: _Shares) -> None:
        self._shares = shares
        ElasticDataset.latest = self
        super().__init__(made, made._variant_tensor)

    def __iter__(self) -> Iterator[Any]:
        if not (training.is_initialized() and training.current().worker.in_train):
            return self.examples()
        if ElasticDataset.as_input is not None:
            return ElasticDataset.as_input(self)
        return self.batches()

    def batches(self, enough: Callable[[], bool] | None = None) -> Generator[Any, None, None]:
        """Yield the remaining batches of the current epoch; see :meth:`Loader.batches`."""
        return self._shares.loop(super().__iter__, enough)

    def examples(self) -> Iterator[Any]:
        """Yield a batch of the first examples, and one of half of them; then refuse to continue."""
        shares = self._shares
        most = min(shares._order.batch_size, shares._order.examples)
        for count in (most, max(1, most // 2)):
            indices = list(range(count))
            shares._end_pipeline()  # of the examples before, or of a loop that was left by an error
            shares._reading = iter([(shares._source.read(indices), indices)])
            yield next(super().__iter__())
        raise ScriptError(
            "the dataset of hvd.dataset is iterated outside of training, where this worker has no "
            "rank. To look at the data before (adapt of a layer, evaluate), give the arrays or the "
            "source itself. To train, put the loop into a function under @hvd.run, `def "
            "train(state): ...`, and call it: train(hvd.State(model=model, optimizer=optimizer)); "
            "or give the dataset to model.fit(dataset, callbacks=[hvd.ElasticCallback()])"
        )

    def __len__(self) -> int:
        return len(self._shares)

    @property
    def position(self) -> int:
        return self._shares.position

    def steps_left(self) -> int:
        return self._shares.steps_left()

    def cardinality(self) -> tf.Tensor:
        """Return the number of steps of a whole epoch; if the batch adapts, the most passes.

        Keras never continues after so many, nor, if it is unknown, after those of its first epoch.
        """
        order = self._shares._order
        most = order.examples if order.planner.adapts else order.steps_from(0, 1)
        return tf.constant(most, tf.int64)

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: Any = None,
        deterministic: bool | None = None,
        **options: Any,
    ) -> ElasticDataset:
        """See :meth:`tf.data.Dataset.map`; batches keep their order, since they are counted."""
        keep_order = None if num_parallel_calls is None else True
        made = super().map(map_func, num_parallel_calls, keep_order, **options)
        return ElasticDataset(made, self._shares)

    def prefetch(self, *args: Any, **options: Any) -> ElasticDataset:
        return ElasticDataset(super().prefetch(*args, **options), self._shares)

    def with_options(self, options: tf.data.Options, name: str | None = None) -> ElasticDataset:
        """See :meth:`tf.data.Dataset.with_options`; batches keep their order as in :meth:`map`."""
        keep_order = tf.data.Options()
        keep_order.deterministic = True
        made = super().with_options(options.merge(keep_order), name)
        return ElasticDataset(made, self._shares)


def _refusal(what: str) -> ScriptError:
    return ScriptError(
        f"{what} after hvd.dataset(...), whose batches are this rank's shares of the steps: "
        "it would change them. Shuffle, and set the batch, by hvd.dataset(source, batch_size, "
        "shuffle=True); leave examples out in the source; map, prefetch and with_options may "
        "follow it"
    )


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise _refusal(f"{name}()")

    return refuse


for _name in {*dir(tf.data.Dataset)} - {*_KEEPS_BATCHES.split()}:
    if not _name.startswith("_"):
        setattr(ElasticDataset, _name, _refused(_name))
