"""Counters of Lightning's loops and what callbacks remember, as one object of the State."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from hvd_elastic.lightning.library import part
from hvd_elastic.lightning.sums import Sums
from hvd_elastic.script.loop_parts import Place
from hvd_elastic.torch.attributes import Attributes, numbered

_Loop: Any = part("loops.loop")._Loop
_BaseProgress: Any = part("loops.progress")._BaseProgress
_OWN = (part("callbacks").ProgressBar, part("callbacks").Timer)
"""Callbacks whose attributes are of this process, such as times."""
_CSVLogger: Any = part("loggers").CSVLogger
_TensorBoardLogger: Any = part("loggers").TensorBoardLogger
_OF_PROCESS = ("training", "_last_time_checked")
"""Attributes that are of this process."""
_CONNECTED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class LoopState(Place):
    """Counters, callbacks, attributes of the module, and metrics, in the form of Lightning 2.

    Ranks decide alike by what callbacks remember, such as the patience of EarlyStopping, so a
    worker that joins needs it, and a part that is repeated begins with what it was before.

    Attributes:
        check: whether a validation is due.
        last: whether the epoch's batches are over.
    """

    def __init__(self, fit_loop: Any, sums: Sums) -> None:
        super().__init__()
        self.check = self.last = False
        self._trainer = trainer = fit_loop.trainer
        self._sums = sums
        self._counters = list(_counters(fit_loop, ""))
        things = numbered(trainer.callbacks, _OWN) | {"module": trainer.lightning_module}
        self._attributes = Attributes(lambda: things, _is_of_process, always={"dirpath"})
        self._modules = dict(trainer.lightning_module.named_modules())

    # -- on this rank ----------------------------------------------------------------------

    def snapshot(self) -> Any:
        """Return what :meth:`roll_back` needs; called after each step."""
        connector = self._trainer._logger_connector
        return (
            self._place(),
            [getattr(item, name) for _, item, name in self._counters],
            self._attributes.snapshot(),
            self._evaluating(),
            [dict(getattr(connector, name)) for name in _CONNECTED],
            (connector._first_loop_iter, connector._current_fx),
            dict(self._trainer.strategy.slots),
            self._sums.snapshot(),
        )

    def roll_back(self, values: Any) -> None:
        """Go back to an earlier :meth:`snapshot`."""
        place, counts, remembered, evaluating, metrics, first, slots, sums = values
        connector = self._trainer._logger_connector
        self._go_to(place)
        for (_, item, name), value in zip(self._counters, counts, strict=True):
            setattr(item, name, value)
        self._attributes.roll_back(remembered)
        self._evaluate(evaluating)
        for name, found in zip(_CONNECTED, metrics, strict=True):
            setattr(connector, name, dict(found))
        connector._first_loop_iter, connector._current_fx = first
        self._trainer.strategy.slots = dict(slots)
        self._sums.roll_back(sums)
        toggled = self._trainer.lightning_module._param_requires_grad_state
        for parameter, trains in toggled.items():  # toggle_optimizer() was interrupted
            parameter.requires_grad = trains
        toggled.clear()

    # -- for other ranks, and for checkpoints ----------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values: of callbacks what has changed since training began."""
        connector = self._trainer._logger_connector
        return {
            "place": list(self._place()),
            "counters": {key: getattr(item, name) for key, item, name in self._counters},
            "remembered": self._attributes.state_dict(),
            "evaluating": self._evaluating(),
            "metrics": {name: dict(getattr(connector, name)) for name in _CONNECTED},
            "first": [connector._first_loop_iter, connector._current_fx],
            "slots": dict(self._trainer.strategy.slots),
            "versions": [version_of(each) for each in self._trainer.loggers],
            "sums": self._sums.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` has returned on another rank."""
        connector = self._trainer._logger_connector
        self._go_to(state["place"])
        for key, item, name in self._counters:
            setattr(item, name, state["counters"].get(key, getattr(item, name)))
        self._attributes.load_state_dict(state["remembered"])
        self._evaluate(state["evaluating"])
        for name in _CONNECTED:
            setattr(connector, name, dict(state["metrics"][name]))
        connector._first_loop_iter, connector._current_fx = state["first"]
        self._trainer.strategy.slots = dict(state["slots"])
        take_versions(self._trainer.loggers, state["versions"])
        self._sums.load_state_dict(state["sums"], self._trainer.strategy.reduce)

    def _place(self) -> tuple[int, ...]:
        trainer = self._trainer
        said = trainer.should_stop, trainer.accumulate_grad_batches
        return self.begun, self.due, self.check, self.last, *said

    def _go_to(self, place: Any) -> None:
        trainer = self._trainer
        self.begun, self.due, self.check, self.last, *said = place
        trainer.should_stop, trainer.accumulate_grad_batches = said

    def _evaluating(self) -> list[str]:
        """Return the names of the modules in eval mode, such as a frozen batch normalisation."""
        return [name for name, module in self._modules.items() if not module.training]

    def _evaluate(self, names: Iterable[str]) -> None:
        evaluating = set(names)
        for name, module in self._modules.items():
            module.training = name not in evaluating


def _counters(item: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
    """Yield key, object and attribute of each counter of a loop and of those inside it."""
    for name, value in list(vars(item).items()):
        if isinstance(value, _Loop) or is_dataclass(value):
            yield from _counters(value, f"{prefix}{name}.")
        elif name == "_batches_that_stepped" or (
            isinstance(item, _BaseProgress) and name in {each.name for each in fields(item)}
        ):
            yield f"{prefix}{name}", item, name


def version_of(logger: Any) -> dict[str, Any]:
    """Return what a logger has chosen for the run: the number of a folder, or an id."""
    if isinstance(logger, (_CSVLogger, _TensorBoardLogger)):
        return {"_version": logger.version}
    return {name: vars(logger)[name] for name in ("_run_id",) if vars(logger).get(name)}


def take_versions(loggers: Iterable[Any], versions: Iterable[Mapping[str, Any]]) -> None:
    """Have loggers continue where those of another rank write; see :func:`version_of`."""
    for logger, version in zip(loggers, versions, strict=True):
        vars(logger).update(version)


def _is_of_process(item: Any, name: str) -> bool:
    return name in _OF_PROCESS or (name[0] == "_" and isinstance(item, torch.nn.Module))
