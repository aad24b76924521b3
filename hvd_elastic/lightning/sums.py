"""Sums over an epoch, of ``self.log`` and of torchmetrics, that stay when a rank dies.

What each rank has added since the last step is added up over the ranks beside the backward pass,
and taken over before the optimizer's step, so that a step that is repeated counts once. States of
metrics that are no sums, such as a maximum or a list, are joined where an epoch ends.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_sum

from hvd_elastic.errors import ScriptError
from hvd_elastic.lightning.results import (
    TrainingResults,
    check_names,
    differing_names,
    is_summed,
    names_code,
)
from hvd_elastic.worker import context

_NAME = "user.lightning.sums"
_SMALL = 4096
"""Most elements of a state that is added up in each step."""


class _Left(int):
    """Number of updates of a metric that training has not updated since it began or validated.

    The next update, or a reset, makes it a plain number.
    """


class _Whole(int):
    """Number of updates of a metric that holds what all ranks have, until it is reset."""

    def __add__(self, more: int) -> _Whole:
        return _Whole(int(self) + more)


class Sums:
    """Metrics of the training batches, as a part of the State.

    Args:
        results: what ``self.log`` collects.
        modules: modules by name that are metrics of torchmetrics, or have them.
        device: device of the model; a metric may be on another one.
        gather: gathers bytes of all ranks.
        together: returns whether ranks call collectives together.
    """

    def __init__(
        self,
        results: TrainingResults,
        modules: Mapping[str, torch.nn.Module],
        device: torch.device,
        gather: Callable[[torch.Tensor], torch.Tensor],
        together: Callable[[], bool],
    ) -> None:
        self._results = results
        self._gather = gather
        self._together = together
        self._told: dict[str, torch.Tensor] = {}
        """Sums of all ranks by key; what a state has beyond them is this rank's own."""
        self._counts: dict[str, int] = {}
        """Number of updates of a metric when its sums were told; less: it was reset."""
        self._begun: Any = None
        self._names: list[str] | None = None
        """Of the states that are added up, with their sizes."""
        self._code = names_code([]).to(device)
        self._is_whole = False
        """Whether metrics of the training batches hold what all ranks have."""
        self._own = {
            name: each
            for prefix, module in modules.items()
            for name, each in module.named_modules(prefix=prefix)
            if isinstance(each, Metric)
        }
        for name, metric in self._own.items():
            metric.dist_sync_fn = partial(self._gathered, name)
            metric.distributed_available_fn = partial(self._is_gathered, metric)
            metric._update_count = _Left(metric._update_count)  # of the sanity check

    def _is_gathered(self, metric: Metric) -> bool:
        """Return whether a metric gathers the states of all ranks to compute its value."""
        is_whole = isinstance(metric._update_count, _Whole)
        return self._together() and self._is_whole and not is_whole

    def _gathered(self, name: str, own: Any, group: Any = None) -> list[Any]:
        """Return the values of all ranks, on the device of a tensor; tensors may differ in shape.

        Raises:
            ScriptError: another rank has those of another metric.
        """
        data = pickle.dumps((name, _moved(own, "cpu")))  # another rank may lack this GPU
        head = torch.tensor([len(data)])
        sizes = self._gather(head).tolist()
        every = self._gather(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        pieces = every.split(sizes)
        # They come from the other ranks of this run.
        found = [pickle.loads(piece.numpy().tobytes()) for piece in pieces]  # noqa: S301
        if any(other != name for other, _ in found):
            raise differing_names([name])
        device = own.device if isinstance(own, torch.Tensor) else "cpu"
        return [_moved(values, device) for _, values in found]

    # -- sums ------------------------------------------------------------------------------

    def _states(self) -> Iterator[tuple[str, Any, str]]:
        """Yield key, metric and name of each state that is added up, on all ranks alike."""
        for key, metric in self._results.items():
            if is_summed(metric) and not metric.has_reset:
                yield f"log.{key}", metric, "value"
                if metric.meta.is_mean_reduction:
                    yield f"log.{key}", metric, "cumulated_batch_size"
        for name, metric in self._own.items():
            if _is_of_training(metric):
                for state in metric._defaults:
                    if _adds(metric, state):
                        yield f"own.{name}", metric, state

    def _known_states(self) -> list[tuple[str, Any, str]]:
        """Return the states in the order of all ranks; forget the sums of metrics without values.

        Those were reset, as at the end of an epoch.
        """
        states = sorted(self._states(), key=lambda each: (each[0], each[2]))
        places = {f"{key}.{name}" for key, _, name in states}
        self._told = {place: total for place, total in self._told.items() if place in places}
        return states

    def begin_sum(self) -> None:
        """Begin to add up what this rank has added since the last time; once a step."""
        if self._begun is not None:
            return
        worker, states = context.current().worker, self._known_states()
        communicator, step = worker.communicator, worker.progress.step
        # Other ranks may have states, and wait. Not in each step: most scripts have none on any.
        if not states and (communicator.size == 1 or step & (step - 1)):
            return
        rows = []
        for key, metric, name in states:
            value = getattr(metric, name).detach().to(self._code).reshape(-1)
            before, counted = self._told.get(f"{key}.{name}"), self._counts.get(key, 0)
            if before is not None and _was_reset(metric, counted, value, before.to(value)):
                before = None
                del self._told[f"{key}.{name}"]
            rows.append(value.clone() if before is None else value - before.to(value))
        handle, is_checked = None, False
        if communicator.size > 1:
            names = [
                f"{key}.{name} {row.numel()}"
                for (key, _, name), row in zip(states, rows, strict=True)
            ]
            # Not in each step: to read the sums waits for the device.
            is_checked = names != self._names
            if is_checked:
                self._names, self._code = names, names_code(names).to(self._code)
            handle = communicator.sum_async(torch.cat([*rows, self._code]), _NAME)
        self._begun = states, handle, is_checked

    def finish_sum(self) -> None:
        """Wait for :meth:`begin_sum`, and take over the sums of all ranks.

        Raises:
            ScriptError: they have other metrics.
        """
        if self._begun is None:
            return
        (states, handle, is_checked), self._begun = self._begun, None
        if handle is not None:
            shown = sorted({_shown(key, metric) for key, metric, _ in states})
            try:
                added = context.current().worker.communicator.wait(handle)
            except ScriptError as error:  # they are not as long
                raise differing_names(shown) from error
            if is_checked:
                check_names(added[-len(self._code) :], shown)
            start = 0
            for key, metric, name in states:
                value = getattr(metric, name)
                piece = added[start : start + value.numel()]
                start += value.numel()
                before = self._told.get(f"{key}.{name}")
                total = piece if before is None else before.to(piece) + piece
                if not value.is_floating_point():
                    total = total.round()
                setattr(metric, name, total.reshape(value.shape).to(value))
                metric._computed = None
        for key, metric, name in states:
            value = getattr(metric, name).detach()
            self._told[f"{key}.{name}"] = value.to(self._code, copy=True).reshape(-1)
        self._counts = {key: metric._update_count for key, metric, _ in states}

    # -- what is no sum --------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have metrics of the training batches hold what all ranks have, in this block."""
        self.begin_sum()
        self.finish_sum()
        kinds = {
            name: [state for state in each._defaults if not _adds(each, state)]
            for name, each in self._own.items()
        }
        before = {
            name: {state: getattr(self._own[name], state) for state in states}
            for name, states in kinds.items()
            if states and _is_of_training(self._own[name])
        }
        counts = {name: self._own[name]._update_count for name in before}
        is_joined = self._together() and any(kinds.values())
        every = self._gathered("", before) if is_joined else []
        joined = set().union(*every)
        for name, metric in self._own.items():
            for state in kinds[name] if name in joined else ():
                parts = [each[name][state] for each in every if name in each]
                joins = _joined(metric._reductions[state], parts)
                setattr(metric, state, _moved(joins, metric.device))
                metric._computed = None
            if name in joined or _is_of_training(metric):
                metric._update_count = _Whole(max(metric._update_count, 1))
        self._is_whole = True
        yield
        self._is_whole = False
        for name, metric in self._own.items():
            if not isinstance(metric._update_count, _Whole):  # it was reset, or is of a validation
                metric._update_count = _Left(metric._update_count)
                continue
            metric._update_count = int(metric._update_count)
            if name in before and metric._update_count == counts[name]:  # else it continues
                for state, value in before[name].items():
                    setattr(metric, state, value)
                metric._computed = None
            elif name in joined - before.keys():  # only other ranks have updated it
                metric.reset()

    # -- a part of the State ---------------------------------------------------------------

    def snapshot(self) -> Any:
        """Return what :meth:`roll_back` needs."""
        own = {
            name: (
                {state: _copied(getattr(metric, state)) for state in metric._defaults},
                metric._update_count,
            )
            for name, metric in self._own.items()
        }
        return dict(self._told), dict(self._counts), own, self._results.snapshot()

    def roll_back(self, values: Any) -> None:
        """Go back to an earlier :meth:`snapshot`."""
        told, counts, own, results = values
        self._told, self._counts = dict(told), dict(counts)
        self._begun, self._is_whole = None, False
        for name, (states, count) in own.items():
            metric = self._own[name]
            for state, value in states.items():
                setattr(metric, state, _copied(value))
            metric._update_count, metric._computed = count, None
        self._results.roll_back(results)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all ranks."""
        self._known_states()
        counts = {key: max(count, 1) for key, count in self._counts.items()}
        told, results = dict(self._told), self._results.state_dict()
        return {"told": told, "counts": counts, "results": results}

    def load_state_dict(self, state: Mapping[str, Any], reduce: Any) -> None:
        """Take over the sums of all ranks; what is no sum starts again on this one."""
        self._results.load_state_dict(state["results"], reduce, self._own)
        self._told, self._counts = dict(state["told"]), dict(state["counts"])
        self._begun, self._is_whole = None, False
        for metric in self._own.values():
            metric.reset()
        metrics: dict[str, Any] = {f"own.{name}": each for name, each in self._own.items()}
        metrics |= {f"log.{key}": each for key, each in self._results.items()}
        for place, total in self._told.items():
            key, _, name = place.rpartition(".")
            found = metrics.get(key)
            if found is not None and hasattr(found, name):
                value = getattr(found, name)
                setattr(found, name, total.reshape(value.shape).to(value))
                found._update_count = self._counts.setdefault(key, 1)


def _is_of_training(metric: Metric) -> bool:
    """Return whether training has updated a metric since it was reset or validated."""
    return bool(metric._update_count) and not isinstance(metric._update_count, _Left)


def _was_reset(metric: Any, counted: int, value: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether a metric was reset after ``counted`` updates, with the sum ``before``."""
    if metric._update_count == counted:
        return not torch.equal(value, before)
    return bool(metric._update_count < counted)


def _shown(key: str, metric: Any) -> str:
    """Return the name of a metric for messages."""
    return str(metric.meta.name) if key.startswith("log.") else key.removeprefix("own.")


def _adds(metric: Any, state: str) -> bool:
    value = metric._defaults[state]
    is_sum = metric._reductions[state] is dim_zero_sum
    return is_sum and isinstance(value, torch.Tensor) and value.numel() <= _SMALL


def _joined(reduction: Any, parts: list[Any]) -> Any:
    """Return a state of all ranks from those of each."""
    if isinstance(parts[0], list):
        return [value for each in parts for value in each]
    if reduction is None:
        return torch.stack(parts)
    return dim_zero_cat(parts) if reduction is dim_zero_cat else reduction(torch.stack(parts))


def _moved(value: Any, device: Any) -> Any:
    """Return a tensor, or a container with the tensors in it, on a device."""
    return apply_to_collection(value, torch.Tensor, torch.Tensor.to, device)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else [*value]
