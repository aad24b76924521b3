"""Learning-rate schedules of Keras that follow progress instead of the optimizer's steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import keras

from hvd_elastic.errors import ScriptError
from hvd_elastic.worker.frontend import Schedule

LearningRate = TypeVar("LearningRate", bound=Any)

_FOLLOWS = "_hvd_elastic_follows_progress"
"""Attribute that marks schedules that follow progress."""


def follow_progress(schedule: LearningRate) -> LearningRate:
    """Adapt a schedule that was written for the initial batch size to an adaptive batch.

    It is then called with scale-invariant progress, in whole steps at the initial batch size, in
    place of the optimizer's count of steps (Johnson et al., AdaScale SGD, ICML 2020, section 3.2).
    With a fixed batch nothing changes.

    Args:
        schedule: a ``keras.optimizers.schedules.LearningRateSchedule``.

    Returns:
        The same object.

    Raises:
        ScriptError: it is another kind of object.
    """
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        raise ScriptError(
            f"follow_progress({type(schedule).__name__}): it takes a schedule of "
            "keras.optimizers.schedules, before the optimizer is made with it. Callbacks that set "
            "the learning rate, such as ReduceLROnPlateau, go by the epochs of fit as they are"
        )
    setattr(schedule, _FOLLOWS, True)
    return schedule


def follows_progress(optimizer: Any) -> bool:
    """Return whether an optimizer's learning rate follows progress."""
    return hasattr(getattr(optimizer, "_learning_rate", None), _FOLLOWS)


def counting_schedules(objects: Iterable[Any]) -> dict[str, Schedule]:
    """Return by name the schedule of the optimizer among some objects, if it counts its steps."""
    found, kind = {}, keras.optimizers.schedules.LearningRateSchedule
    for item in objects:
        schedule = getattr(item, "_learning_rate", None)
        if isinstance(schedule, kind) and not follows_progress(item):
            found["schedule"] = Schedule(int(item.iterations), type(schedule).__name__)
    return found
