"""Counters of a Trainer and what its callbacks remember, as one object of the State."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.trainer_callback import PrinterCallback, ProgressCallback

from hvd_elastic.script.loop_parts import Place
from hvd_elastic.torch.attributes import Attributes, numbered

_SHOWING = (ProgressCallback, PrinterCallback)
"""Callbacks whose attributes are of this process."""
_OF_PROCESS = frozenset(
    {
        *("is_world_process_zero", "is_local_process_zero", "log_history"),  # of TrainerState
        *("train_dataset", "eval_dataset", "model_preparation_time"),
        *("is_in_train", "push_in_progress"),
    }
)


class LoopState(Place):
    """Counters, control and callbacks of a Trainer, and its own plain attributes.

    Ranks decide alike by what callbacks remember, such as the patience of EarlyStoppingCallback, so
    a worker that joins needs it, and a part that is repeated begins with what it was before.

    Attributes:
        first: whether the evaluation before the first step is due.
        check: whether an evaluation or a checkpoint is due.
        last: whether the epoch's steps are over.
        epochs: number of epochs that are over.
        norm, rate: gradient norm and learning rate of the last step.
        flos: operations of all ranks that the Trainer has not been told of.
        slots: number of each checkpoint folder that is kept in the run folder, by name.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.first = self.due = bool(trainer.args.eval_on_start)
        self.check = self.last = False
        self.epochs = 0
        self.norm: Any = None
        self.rate: float | None = None
        self.flos: Any = 0.0
        self.slots: dict[str, int] = {}
        self._trainer = trainer
        things = {"trainer": trainer}
        computes = getattr(trainer.compute_metrics, "__self__", trainer.compute_metrics)
        if isinstance(getattr(computes, "__dict__", None), dict):  # it may add batches up
            things["compute_metrics"] = computes
        self._things = numbered(trainer.callback_handler.callbacks, _SHOWING) | things
        self._attributes = Attributes(self._named, lambda _, name: name in _OF_PROCESS)

    # -- on this rank ----------------------------------------------------------------------

    def snapshot(self) -> Any:
        """Return what :meth:`roll_back` needs; called after each step."""
        return self._place(), self._attributes.snapshot(), len(self._trainer.state.log_history)

    def roll_back(self, values: Any) -> None:
        """Go back to an earlier :meth:`snapshot`."""
        place, attributes, logged = values
        self._go_to(place)
        self._attributes.roll_back(attributes)
        del self._trainer.state.log_history[logged:]

    # -- for other ranks, and for checkpoints ----------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values: what has changed since training began."""
        place = self._place()
        for name in ("norm", "flos"):  # tensors on this rank
            if place[name] is not None:
                place[name] = float(place[name])
        changed = self._attributes.state_dict()
        return {"place": place, "changed": changed, "logged": list(self._trainer.state.log_history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` has returned on another rank."""
        self._go_to(state["place"])
        self._attributes.load_state_dict(state["changed"])
        self._trainer.state.log_history[:] = state["logged"]

    def _named(self) -> dict[str, Any]:
        return self._things | {"state": self._trainer.state, "control": self._trainer.control}

    def _place(self) -> dict[str, Any]:
        place = {name: value for name, value in vars(self).items() if name[0] != "_"}
        return {**place, "slots": dict(self.slots)}

    def _go_to(self, place: Mapping[str, Any]) -> None:
        vars(self).update({**place, "slots": dict(place["slots"])})
