"""The state that a training run must not lose: model, optimizer and the user's own values.

Variables are not copied at a step. They change only after all gradients of a step are reduced, so
every survivor of a failure holds the state before or after the step in flight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from hvd_elastic.checkpoint.header import encode_values
from hvd_elastic.errors import ScriptError
from hvd_elastic.script.helper_copies import HelperCopies
from hvd_elastic.script.state import ScriptState, Stateful
from hvd_elastic.script.value_copies import ValueCopies
from hvd_elastic.tensorflow.content import TensorFlowContent, pieces_of, type_named
from hvd_elastic.tensorflow.schedule import counting_schedules
from hvd_elastic.tensorflow.variables import (
    VARIABLES,
    LiveVariable,
    assign,
    check_built,
    has_variables,
    keep_values,
    moving_of,
    rates_of,
    trainable_of,
    variable_of,
    variables_of,
)
from hvd_elastic.worker.checks.replica_check import parameters_of_check, sums_of
from hvd_elastic.worker.frontend import Schedule, TrainedSums


class State(ScriptState):
    """State that newcomers get, that survives failures, and that checkpoints hold.

    Args:
        model: a model of Keras that is built, or a ``tf.Module``; its live variables are sent.
        optimizer: an optimizer of Keras; if it is the only one, it is built for the variables of
            all models.
        values: other values, read and set as attributes. Models, optimizers, modules, variables,
            and objects with ``state_dict()`` and ``load_state_dict()`` are kept by reference; all
            others must be plain data (numbers, strings, lists, dicts, arrays). When a step, or the
            code between two epochs, is repeated after a failure, plain values, variables and
            objects that are not modules, and the learning rate are first restored.

    Raises:
        ScriptError: a value is neither, or a model is not built; names it.
    """

    _content_kind = TensorFlowContent
    plain_kinds = "numbers, strings, lists, dicts, arrays"
    object_kinds = "variables, or with state_dict() and load_state_dict()"
    _moving: list[tf.Variable] | None = None
    _undo_moving: Callable[[], None] | None = None

    def _is_object(self, name: str, value: Any) -> bool:
        if isinstance(value, tf.GradientTape):
            raise ScriptError(f"State({name}=...): a tape is of one step and has no state")
        return has_variables(value) or isinstance(value, Stateful)

    def _try_plain(self, value: Any) -> None:
        def leaf(item: Any, _: object) -> Any:
            is_array = isinstance(item, np.ndarray) and item.dtype != object
            return None if is_array else NotImplemented

        encode_values(value, leaf)

    def _build(self) -> None:
        models = {n: i for n, i in self._objects.items() if isinstance(i, keras.Layer)}
        for name, model in models.items():
            check_built(model, f"State({name}=...)")
        trainable = [v for item in models.values() for v in item.trainable_variables]
        optimizers = [item for item in self._objects.values() if isinstance(item, Optimizer)]
        if len(optimizers) == 1 and not optimizers[0].built and trainable:
            optimizers[0].build(trainable)  # of several each trains variables of its own

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Set everything that has changed in the block back at its end, for a rehearsal."""
        every: list[tf.Variable] = []
        for item in self._with_variables().values():
            every += variables_of(item).values()
            if isinstance(item, keras.Model):
                every += map(variable_of, [*item.variables, *item.metrics_variables])
        restore = keep_values(every)
        snapshot = self.take_snapshot()
        try:
            yield
        finally:
            snapshot.restore(self._plain, self._objects)
            restore()

    def keep_moving(self) -> None:
        if self._moving is None:
            self._moving = [*map(variable_of, moving_of(self._models().values()))]
        self._undo_moving = keep_values(self._moving)

    def undo_moving(self) -> None:
        if self._undo_moving is not None:
            self._undo_moving()

    # -- for the library -------------------------------------------------------------------

    def module_attributes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, item in self._with_variables().items():
            if isinstance(item, (keras.Layer, tf.Module)):
                yield name, vars(item)
            if isinstance(item, keras.Layer):
                layers = item._flatten_layers(include_self=False)
                yield from ((f"{name}.{layer.name}", vars(layer)) for layer in layers)

    def schedules(self) -> dict[str, Schedule]:
        return counting_schedules(self._objects.values())

    def take_snapshot(self, *, tensors: bool = False) -> Snapshot:
        variables = self._untrained(own=not tensors)
        return Snapshot(self._plain, self._objects, self._helpers, variables, always=tensors)

    def trained_sums(self, signs: np.ndarray, number: int | None) -> TrainedSums:
        lasting = self.lasting()
        named = [
            (f"{name}.{key}", variable)
            for name, item in self._with_variables().items()
            if not isinstance(item, Optimizer)
            for key, variable in variables_of(item).items()
            if id(variable) in lasting and variable.dtype.is_floating
        ]
        chosen = parameters_of_check(named, number)
        sums = [sums_of(LiveVariable(v).view().reshape(-1), signs, number) for _, v in chosen]
        epsilons = [float(np.array(tf.experimental.numpy.finfo(v.dtype).eps)) for _, v in chosen]
        names = [name for name, _ in chosen]
        return TrainedSums(names, np.array(sums).reshape(-1, 2), np.array(epsilons), len(named))

    def lasting(self) -> set[int]:
        found: set[int] = set()
        for item in self._with_variables().values():
            is_optimizer = isinstance(item, Optimizer)
            changing = variables_of(item).values() if is_optimizer else trainable_of(item)
            found |= {*map(id, changing)} - {*map(id, rates_of(item))}
        return found

    def trainable(self) -> set[int]:
        """Return the ids of the variables that an optimizer may train."""
        return {
            id(each)
            for item in self._with_variables().values()
            if not isinstance(item, Optimizer)
            for each in variables_of(item).values()
        }

    def waits_before_step(self) -> bool:
        return True  # the values that a checkpoint copies stay when variables change

    def _with_variables(self) -> dict[str, Any]:
        return {n: i for n, i in self._objects.items() if has_variables(i)}

    def _untrained(self, *, own: bool) -> list[tf.Variable]:
        """Return the variables that no optimizer changes.

        Args:
            own: only those that the script itself sets: learning rates, and variables that it has
                given to the State.
        """
        items = self._with_variables().values()
        rates = [rate for item in items for rate in rates_of(item)]
        others = [
            variable
            for item in items
            if not isinstance(item, Optimizer) and (isinstance(item, VARIABLES) or not own)
            for variable in variables_of(item).values()
        ]
        lasting = self.lasting() if others else ()  # to list the variables of a model takes long
        return rates + [variable for variable in others if id(variable) not in lasting]

    def _models(self) -> dict[str, Any]:
        others = (Optimizer, *VARIABLES)
        return {n: i for n, i in self._with_variables().items() if not isinstance(i, others)}

    def _constants(self) -> Iterator[tuple[str, str, LiveVariable]]:
        for name, item in self._models().items():
            trained = {*map(id, trainable_of(item))}
            for key, variable in variables_of(item).items():
                if id(variable) not in trained and variable.dtype.is_floating:
                    yield f"{name}.{key}", variable.dtype.name, LiveVariable(variable)

    def _known(self, content: Any) -> list[bool]:
        lasting = self.lasting()
        return [
            isinstance(tensor, LiveVariable) and id(tensor.variable) in lasting
            for tensor in content.tensors
        ]

    _pieces = staticmethod(pieces_of)

    def _fitting(self, own: Any, dtype: str, shape: tuple[int, ...], device: str) -> Any:
        kind = type_named(dtype)
        if isinstance(own, np.ndarray) and not own.flags.c_contiguous:
            own = None
        if own is not None and (own.dtype, own.shape) == (kind, shape):
            return own
        return np.empty(shape, kind)

    def _tensors_of(self, item: Any) -> dict[str, tf.Variable] | None:
        return variables_of(item) if has_variables(item) else None

    def _set_object(self, item: Any, values: Any) -> None:
        if has_variables(item):
            assign(variables_of(item), values)
        else:
            super()._set_object(item, values)


class Snapshot(ValueCopies):
    """Copy of a state at one point: plain values, objects, and the given variables."""

    def __init__(
        self,
        plain: dict[str, Any],
        objects: dict[str, Any],
        helpers: HelperCopies,
        variables: Any,
        *,
        always: bool,
    ) -> None:
        others = {name: item for name, item in objects.items() if not has_variables(item)}
        super().__init__(plain, others, helpers, always=always)
        self._restore_variables = keep_values(variables)

    def restore(self, plain: dict[str, Any], objects: Mapping[str, Any]) -> None:
        super().restore(plain, objects)
        self._restore_variables()

    def copy_tensor(self, present: Any, saved: Any) -> bool:
        if not (isinstance(saved, np.ndarray) and present.shape == saved.shape):
            return False
        present[...] = saved
        return True
