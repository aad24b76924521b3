"""The callback that makes ``model.fit`` elastic.

``fit`` cannot be entered in the middle, so it does not learn of a failure: the callback replaces
the model's training function by one that joins the next generation and repeats the batch.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_elastic.communicator.interface import GenerationBrokenError
from hvd_elastic.errors import ScriptError
from hvd_elastic.keras.checks import (
    check_call,
    check_model,
    first_layer,
    optimizers_of,
    takes_nothing,
)
from hvd_elastic.keras.monitors import Monitors
from hvd_elastic.script.run import stop
from hvd_elastic.script.saving import save_again
from hvd_elastic.script.session import Session
from hvd_elastic.tensorflow.data import ElasticDataset
from hvd_elastic.tensorflow.frontend import choose_optimizers, optimizers_watched, rehearse
from hvd_elastic.tensorflow.losses import losses_watched
from hvd_elastic.tensorflow.metrics import MetricSums
from hvd_elastic.tensorflow.state import State
from hvd_elastic.tensorflow.variables import (
    keep_values,
    variable_of,
)
from hvd_elastic.worker import context
from hvd_elastic.worker.metrics import average_over_ranks
from hvd_elastic.worker.planning.batch_bounds import require_whole
from hvd_elastic.worker.progress import AFTER_LOOP, Phase

_FOREVER = 1 << 62
_LITTLE_PROGRESS = 0.9  # of what the passes over the data would be worth without larger batches


class ElasticCallback(keras.callbacks.Callback):
    """Makes ``model.fit`` elastic; put it first in ``callbacks``.

    Hosts join and leave between two batches, a batch that fails is repeated, and a resumed run goes
    on in the epoch where it was. At the end of an epoch the metrics in ``logs`` are averaged over
    the ranks by examples, before the callbacks that follow see them (EarlyStopping,
    ReduceLROnPlateau, ModelCheckpoint).

    If the batch adapts (``max_batch_size`` of the dataset), Keras is given one pass of a step at a
    time, and the optimizer takes its step after the last one.

    Args:
        epochs: end when training has made the progress of so many passes over the data at the
            initial batch size; ``fit(epochs=...)`` is then the most passes. None: the number of
            passes is that of ``fit``.
        evaluate: called at the end of each epoch on all ranks, and again if a rank is lost in it.
            The metrics that it returns go into ``logs``, as :func:`hvd_elastic.keras.evaluate`
            gives them.
        values: further values of the state, as for :class:`hvd_elastic.tensorflow.State`.

    Attributes:
        state: the state, once ``fit`` has begun.
    """

    state: State
    _metrics: MetricSums
    _monitors: Monitors

    def __init__(
        self,
        *,
        epochs: int | None = None,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        **values: Any,
    ) -> None:
        super().__init__()
        if evaluate is not None and not callable(evaluate):
            raise ScriptError(
                f"ElasticCallback(evaluate={evaluate!r}): it must be a function that returns "
                "metrics by name, such as lambda: hvd.evaluate(model, (images, labels), metrics)"
            )
        if evaluate is not None and not takes_nothing(evaluate):
            raise ScriptError(
                "ElasticCallback(evaluate=...): it is called without arguments. Write "
                "lambda: hvd.evaluate(model, (images, labels), metrics)"
            )
        if epochs is not None:
            what = "the progress in passes over the data at the initial batch size that ends fit"
            epochs = require_whole("epochs", epochs, 1, what, "ElasticCallback")
        self._epochs = epochs
        self._evaluate = evaluate
        # An epoch of a worker that joins is short, and the dataset is shuffled by hvd.dataset.
        warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)
        warnings.filterwarnings("ignore", ".shuffle=True. was passed", UserWarning)
        self._values = values
        self._watch = contextlib.ExitStack()
        self._ctx = context.current()
        self._session = Session(self._ctx, "model.fit", self._repeat_tail)
        self._ended: tuple[int, int, dict[str, float]] = (-1, 0, {})
        """The epoch that Keras has ended last, examples of this rank in it, and their metrics."""
        self._averaged: dict[str, float] | None = None
        """What the ranks have made of these metrics; None: not yet."""
        self._failed: Exception | None = None
        """Failure of another rank after a step was taken, until the callbacks have followed it."""
        self._last: Any = None
        """Snapshot after the last batch of an epoch."""
        self._head: Any = None
        """Snapshot after all callbacks have ended an epoch and begun the next one."""
        self._examples = 0
        self._own: np.ndarray | None = None
        """Variables of this rank's metrics after the batches of the epoch; None: not yet."""
        self._arrays: dict[str, Any] = {}
        """Metrics of the epoch that are not one number."""
        self._kept: tuple[int, Callable[[], None]] | None = None
        """Examples before the step that has begun, and what sets the metrics back to that time."""
        self._train: Any = None
        self._batches: Batches | None = None
        self._data: Any = None
        """The last batch that the model was trained on."""
        self._began = self._is_over = False

    # -- what Keras calls ------------------------------------------------------------------

    def set_params(self, params: dict[str, Any]) -> None:
        """Have the progress bar do without the number of steps where it is but a bound."""
        if self._ctx.planner.adapts:
            params["steps"] = None
        super().set_params(params)

    def set_model(self, model: Any) -> None:
        """Check the model before Keras makes its training function."""
        super().set_model(model)
        check_model(model)
        model.jit_compile = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Have the step traced, and join the other ranks."""
        check_call(self.model)
        self.state = State(model=self.model, **optimizers_of(self.model), **self._values)
        self._monitors = Monitors(self)
        self.state.keep("_monitors", self._monitors)
        choose_optimizers(self.state)
        self._watch.enter_context(optimizers_watched(self.state))
        self._watch.enter_context(losses_watched(self._compiled_losses))
        self._train = self.model.train_function
        self._monitors.callbacks.append(_StopTogether(self.model))
        self._metrics = self._built_metrics()
        self.state.keep("_metric_sums", self._metrics)
        averagers: Any = self._ctx.worker.averagers
        next(iter(averagers)).metrics = self._metrics if self._metrics.size else None
        for averager in averagers:
            averager.find_layer = self._first_layer
        rehearse(self.state, self._trace)
        self._ctx.aim(self._epochs or self.params["epochs"], "epoch")
        self._session.join_ranks()
        progress = self._ctx.worker.progress
        done = progress.phase is Phase.DONE or self._is_enough()
        self.model._initial_epoch = _FOREVER if done else progress.epoch
        self.model.train_function = self._step

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to count the examples of this rank."""
        self._examples, self._own = 0, None
        self._metrics.begin_epoch(whole=self._ctx.worker.progress.position == 0)
        if not self._began and epoch != self._ctx.worker.progress.epoch:
            raise ScriptError(
                f"model.fit(initial_epoch={epoch}): a resumed run continues in the epoch "
                "where training stands by itself; leave initial_epoch out"
            )
        if not self._began:
            self._monitors.set_again()
        self._began = True
        ElasticDataset.as_input = self._input

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keep the state if no batch is left: in a short epoch Keras begins one that is not."""
        if self._batches is not None and self._batches.is_over:
            self._last = self.state.take_snapshot()

    def on_test_begin(self, logs: Any = None) -> None:
        """Keep the metrics of the epoch, before Keras resets them for validation data."""
        over = self._batches is not None and self._batches.is_over
        if self._own is None and (over or self.model.stop_training):
            self._own = self._metrics.own()

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        """Average the metrics, and turn the epoch."""
        if self._own is None:
            self._own = self._metrics.own()
        if self._batches is not None:
            self._batches.restart()  # a callback may have ended the epoch early
        numbers = {key: float(value) for key, value in logs.items() if np.ndim(value) == 0}
        self._ended, self._averaged = (epoch, self._examples, numbers), None
        self._arrays = {key: value for key, value in logs.items() if key not in numbers}
        self._ctx.worker.saves.again = {}
        self._ctx.rollback.tail_begins()
        failed, self._failed = self._failed, None
        if failed is not None:
            self._session.recover(failed, in_tail=True)
        averaged = self._finish_tail()
        logs.update(averaged | self._arrays)
        self._report(logs)
        if self._ctx.worker.progress.stopped or self._is_enough():
            self.model.stop_training = True

    def _report(self, logs: dict[str, Any]) -> None:
        """Record the metrics of an epoch; name those that are not one number."""
        several = [name for name, value in logs.items() if np.size(value) != 1]
        self._ctx.report({name: value for name, value in logs.items() if name not in several})
        if several and self._ctx.worker.progress.epoch == 1:
            self._ctx.worker.warn_once(
                f"the metrics {', '.join(several)} of model.fit are not recorded, since they are "
                "not one number each"
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Leave together with the other ranks."""
        self._watch.close()
        self._ctx.idle_check.training_ends()
        self._warn_of_little_progress()
        self.model.train_function, self.model._initial_epoch = self._train, None
        self._is_over = True
        self._monitors.restore_best_weights(self.model)
        self._head = self.state.take_snapshot()
        self._session.leave_ranks()

    def _is_enough(self) -> bool:
        done, enough = self._ctx.worker.progress.epoch, self._epochs
        return enough is not None and self._ctx.planner.is_enough(done, enough)

    def _warn_of_little_progress(self) -> None:
        """Warn if larger batches have made less progress than the passes that ``fit`` was given."""
        progress, passes = self._ctx.planner.progress_in("epoch"), self.params["epochs"]
        done = self._ctx.worker.progress.epoch
        ended = done < passes or self._is_enough()
        if progress is not None and not ended and progress < _LITTLE_PROGRESS * done:
            wanted = self._epochs or passes
            self._ctx.worker.warn_once(
                f"model.fit(epochs={passes}) ends after {done} passes over the data, with the "
                f"progress of {progress:.3g} at the initial batch size: a step of a larger batch "
                "is worth less than its share of examples. To train until the progress is that of "
                f"{wanted} passes: hvd.ElasticCallback(epochs={wanted}), and fit with more epochs, "
                "which are then the most passes"
            )

    # -- steps -----------------------------------------------------------------------------

    def _trace(self) -> None:
        """Have the step traced for batches of any size: two sizes generalise the shape."""
        if ElasticDataset.latest is not None:
            for batch in itertools.islice(ElasticDataset.latest.examples(), 2):
                self._train([batch])

    def _input(self, dataset: ElasticDataset) -> Batches:
        ElasticDataset.as_input = None  # for the one dataset of this epoch
        return Batches(dataset)

    def _step(self, batches: Any) -> Any:
        """Train on the next batch; in place of the model's training function."""
        assert isinstance(batches, Batches), "made by the dataset, see check_call"
        if batches is not self._batches:
            self._batches = batches
            self._head = self.state.take_snapshot()
        worker = self._ctx.worker
        if batches.is_over:
            self.state.save_values(self._last)  # without what callbacks did for a batch too many
            self.state.roll_back()
        done = worker.progress.step
        failed, self._failed = self._failed, None
        if failed is not None and not batches.is_over:
            self._ctx.rollback.body_ended(voided=False)
            self._recover(failed, batches)
        while worker.progress.step == done:
            if not self._ctx.step.accumulating:  # the step may fail after some of its passes
                metrics = map(variable_of, self.model.metrics_variables)
                self._kept = (self._examples, keep_values(metrics))
            try:
                data = next(batches)
                examples = self._ctx.step.passes[-1].examples  # a sparse tensor has no length
                self._data, skipped = data, worker.progress.skipped
                logs = self._train([data])
                try:
                    worker.averagers.collect()
                except GenerationBrokenError as error:
                    self._failed = error  # the step is taken, so the callbacks follow it first
                if not self._ctx.step.accumulating:
                    self._ctx.mark_consumed()
                self._examples += examples
                if worker.progress.skipped > skipped:
                    self._undo_metrics()
                if worker.progress.step > done:
                    self._kept = worker.saves.again = None  # no rank ends the last epoch again
                self._ctx.commit(_numbers(logs))
                batches.end_if_last()
                return logs
            except (GenerationBrokenError, tf.errors.OpError) as error:
                self._undo_metrics()
                self._recover(error, batches)
        # The others have taken the step, so the callbacks of this rank follow it too.
        self._metrics.all_told()
        return self.model.get_metrics_result()

    def _first_layer(self) -> str:
        with self.state.unchanged():
            return first_layer(self.model, self._data)

    def _undo_metrics(self) -> None:
        """Set metrics back to before the step that has begun: it failed, or is left out."""
        if self._kept is not None:
            self._examples, restore = self._kept
            restore()

    def _recover(self, error: Exception, batches: Batches) -> None:
        """Join the next generation, and read on from where training stands."""
        self._ctx.worker.in_train = False  # the loop that is closed has not ended the epoch
        batches.restart()
        self._session.recover(error)

    def _finish_tail(self) -> dict[str, float]:
        """Average the metrics over the ranks, evaluate, turn the epoch; again where it fails."""
        worker = self._ctx.worker
        while True:
            try:
                averaged = self._average()
                self._ctx.turn_epoch(worker.progress.epoch)
                return averaged
            except GenerationBrokenError as error:
                self._session.recover(error, in_tail=True)
                if worker.progress.phase not in AFTER_LOOP:
                    return self._ended[2]  # another rank has turned the epoch already

    def _repeat_tail(self) -> None:
        """End an epoch again together with others, some of which have not ended it before.

        The state has gone back to before the callbacks ended the epoch, as newcomers and others
        will have them do. Those of this rank have done so, and do not again; but what they saved
        is, since the rank that wrote it may be lost.
        """
        if self._ended[0] != self._ctx.worker.progress.epoch:
            return  # they have not: no batch is left, so Keras ends the epoch next
        self._finish_tail()
        if self._head is not None:
            self.state.save_values(self._head)
            self.state.roll_back()
        save_again(self._ctx.worker)
        if self._is_over:  # the weights are those of another rank, which has not come so far
            self._monitors.restore_best_weights(self.model)

    def _average(self) -> dict[str, float]:
        """Return the metrics of the epoch, averaged over the ranks, and those of an evaluation.

        They are the same on all ranks, also where only some have come so far before a failure.
        """
        self._ctx.rollback.collective_begins("the metrics of the epoch")
        _, examples, logs = self._ended
        communicator = self._ctx.worker.communicator
        logs = {**logs, **self._summed(logs)}
        found, known = average_over_ranks(communicator, examples, logs, self._averaged)
        if self._evaluate is not None and not known:
            more = self._evaluate()
            if not isinstance(more, Mapping):
                raise ScriptError(
                    f"ElasticCallback(evaluate=...) has returned a {type(more).__name__}, and has "
                    "to return metrics by name, as hvd.evaluate does; model.evaluate does so with "
                    "return_dict=True"
                )
            found |= {name: float(value) for name, value in more.items()}
        self._averaged = found
        return found

    def _built_metrics(self) -> MetricSums:
        """Return the model's metrics, which Keras builds when it traces a step."""
        model, latest = self.model, ElasticDataset.latest
        compiled = (model._compile_metrics, model._compile_loss)
        if latest is not None and not all(each is None or each.built for each in compiled):
            batch = next(latest.examples())
            try:
                model._symbolic_build(data_batch=batch)
            except (
                AttributeError,
                RuntimeError,
                TypeError,
                ValueError,
            ):  # a model that Keras cannot call symbolically is traced twice
                rehearse(self.state, lambda: self._train([batch]))
                model.make_train_function(force=True)
                self._train = model.train_function
        found = MetricSums(model.metrics)
        for metric in found.others:
            self._ctx.worker.warn_once(
                f"metric {metric.name!r}: {type(metric).__name__} sets its variables (assign), so "
                "they are no sums, which could be added up over the ranks: its value is the "
                "average of the ranks' values by examples, and depends on their number. If they "
                "are sums, change them by assign_add"
            )
        return found

    def _compiled_losses(self) -> list[Any]:
        compiled = self.model._compile_loss
        return [] if compiled is None else [each.loss for each in compiled._flat_losses or ()]

    def _summed(self, logs: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers in ``logs`` that are metrics, over the examples of all ranks."""
        metrics, communicator = self._metrics, self._ctx.worker.communicator
        own = self._own
        untold = np.zeros(tuple(metrics.sums.shape)) if own is None else metrics.untold(own)
        handle = communicator.sum_async(untold, "hvd_elastic.metric_sums")
        whole = communicator.wait(handle) + metrics.sums.numpy()
        if own is None:
            return {}  # another epoch has begun here, so these numbers are known

        def results() -> dict[str, Any]:
            found = self.model.get_metrics_result()
            return {key: tf.convert_to_tensor(value).numpy() for key, value in found.items()}

        mine, found = metrics.results(own, results), metrics.results(whole, results)
        same = [
            key
            for key, value in {**logs, **self._arrays}.items()
            if key in mine and np.allclose(mine[key], value, rtol=1e-5, equal_nan=True)
        ]  # a train_step may return other values under these names
        self._arrays.update((key, found[key]) for key in same if key in self._arrays)
        return {key: float(found[key]) for key in same if key in logs}


def _numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are numbers, those in dicts too, as Keras does after an epoch."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            found.update(_numbers(value))
        elif not tuple(np.shape(value)):
            found[name] = value
    return found


class Batches:
    """The batches of one epoch, as an iterator that Keras hands to the training function."""

    def __init__(self, dataset: ElasticDataset) -> None:
        self._dataset = dataset
        self._batches = dataset.batches()
        self.is_over = False
        """Whether the last batch of the epoch was trained on."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch; raise StopIteration where the epoch is over."""
        if self.is_over:
            raise StopIteration
        return next(self._batches)

    def end_if_last(self) -> None:
        """End the loop over the epoch after its last batch, which Keras counts for itself."""
        if not self._dataset.steps_left():
            next(self._batches, None)
            self.is_over = True

    def restart(self) -> None:
        """Begin again where training stands."""
        self._batches.close()
        self._batches = self._dataset.batches()


class _StopTogether(keras.callbacks.Callback):
    """Has all ranks end training where a callback of this one ends it after a batch.

    It comes last. Only this rank may have seen the reason, such as a loss that is not a number.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.set_model(model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.stop_training:
            self.model.stop_training = False
            stop(f"a callback of model.fit has set stop_training after batch {batch} of an epoch")
