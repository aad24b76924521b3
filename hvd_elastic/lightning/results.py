"""Metrics that ``self.log`` collects over an epoch, the same on all ranks.

Sums of the training batches are added up over the ranks in each step, beside the backward pass and
before the optimizer's step, so that a rank that dies takes nothing with it, and a step that is
repeated counts once. Those of a validation are reduced where they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvd_elastic.lightning.library import part
from hvd_elastic.training import context

_ResultCollection: Any = part("trainer.connectors.logger_connector.result")._ResultCollection
_ONCE = "on_train_epoch_end"
"""Hook whose values are computed once an epoch, on each rank."""


class EvaluationResults(_ResultCollection):
    """Metrics of a validation: those of an epoch are reduced whether or not the script asks."""

    def _get_cache(self, metric: Any, on_step: bool) -> Any:
        sync = metric.meta.sync
        asked = sync.should
        if not on_step:
            sync.should = self._is_to_be_reduced(metric)
        try:
            return _ResultCollection._get_cache(metric, on_step)
        finally:
            sync.should = asked

    def _is_to_be_reduced(self, metric: Any) -> bool:
        return True


class TrainingResults(EvaluationResults):
    """Metrics of the training batches of an epoch."""

    def __init__(self) -> None:
        super().__init__(training=True)
        self._told: dict[str, tuple[Any, Any]] = {}
        """Sum, and number of examples, of all ranks, by key; the rest is this rank's own."""
        self._begun: tuple[list[str], Any] | None = None
        """Keys, and handle, of the reduction in flight."""

    def _is_to_be_reduced(self, metric: Any) -> bool:
        return not _is_summed(metric)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Reset metrics, as the library does at the beginning of an epoch."""
        super().reset(metrics, fx)
        for key, metric in self.items():
            if metric.has_reset:
                self._told.pop(key, None)

    # -- sums over the ranks ---------------------------------------------------------------

    def begin_sum(self) -> None:
        """Begin to add up over the ranks what was logged since the last time; once a step."""
        communicator = context.current().worker.communicator
        keys = sorted(key for key, metric in self.items() if _is_summed(metric))
        if not keys or self._begun is not None:
            return
        handle = None
        if communicator.size > 1:
            handle = communicator.sum_async(self._untold(keys), "user.lightning.sums")
        self._begun = keys, handle

    def end_sum(self) -> None:
        """Wait for :meth:`begin_sum`, and take over the sums of all ranks."""
        if self._begun is None:
            return
        (keys, handle), self._begun = self._begun, None
        if handle is not None:
            told = context.current().worker.communicator.wait(handle).tolist()
            for number, key in enumerate(keys):
                metric, (value, count) = self[key], self._told.get(key, (0.0, 0))
                metric.value = torch.full_like(metric.value, float(value) + told[2 * number])
                if metric.meta.is_mean_reduction:
                    total = round(float(count) + told[2 * number + 1])
                    metric.cumulated_batch_size = torch.full_like(
                        metric.cumulated_batch_size, total
                    )
                metric._computed = None
        for key in keys:
            self._told[key] = _sums(self[key])

    def _untold(self, keys: list[str]) -> torch.Tensor:
        """Return sum and number of examples of each key, as far as they are this rank's own."""
        rows = []
        for key in keys:
            value, count = _sums(self[key])
            before, counted = self._told.get(key, (0.0, 0))
            rows += [value.double() - before, count - counted]
        return torch.stack([torch.as_tensor(row).double().reshape(()) for row in rows])

    # -- a part of the State ---------------------------------------------------------------

    def snapshot(self) -> Any:
        """Return what :meth:`roll_back` needs; shallow, since tensors are replaced."""
        return {key: dict(vars(metric)) for key, metric in self.items()}, dict(self._told)

    def roll_back(self, values: Any) -> None:
        """Go back to an earlier :meth:`snapshot`."""
        metrics, told = values
        for key in self.keys() - metrics.keys():
            del self[key]
        for key, attributes in metrics.items():
            vars(self[key]).update(attributes)
        self._told, self._begun, self.batch = dict(told), None, None

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all ranks, with what the script has said of each."""
        found = {}
        for key, metric in self.items():
            if metric.is_tensor and not metric.has_reset:
                meta = metric.meta
                found[key] = {
                    "said": {
                        name: getattr(meta, name)
                        for name in (
                            *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch"),
                            *("enable_graph", "add_dataloader_idx", "metric_attribute"),
                        )
                    }
                    | {
                        "reduce_fx": meta.reduce_fx.__name__,
                        "sync_dist": meta.sync.should,
                        "rank_zero_only": meta.sync.rank_zero_only,
                    },
                    "sums": [each.detach().clone() for each in _sums(metric)],
                    "last": metric._forward_cache,
                }
        return found

    def load_state_dict(self, state: Mapping[str, Any], reduce: Any) -> None:
        """Take over the sums of another rank; ``reduce``: reduces a tensor over the ranks."""
        for key in self.keys() - state.keys():
            self[key].reset()
        for key, entry in state.items():
            said = {**entry["said"], "reduce_fx": getattr(torch, entry["said"]["reduce_fx"])}
            if key not in self:
                self.log(value=torch.zeros(()), batch_size=1, sync_dist_fn=reduce, **said)
            metric = self[key]
            value, count = entry["sums"]
            metric.value = value.to(metric.value)
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = count.to(metric.cumulated_batch_size)
            metric._forward_cache, metric._computed, metric.has_reset = entry["last"], None, False
        self._told = {key: _sums(self[key]) for key in state if _is_summed(self[key])}
        self._begun = None


def _is_summed(metric: Any) -> bool:
    """Return whether a metric is a sum over the batches that ranks add up in each step."""
    meta = metric.meta
    adds = metric.is_tensor and (meta.is_mean_reduction or meta.is_sum_reduction)
    return adds and meta.on_epoch and meta.fx != _ONCE and not meta.sync.rank_zero_only


def _sums(metric: Any) -> tuple[Any, Any]:
    """Return sum and number of examples."""
    zero = torch.zeros((), dtype=torch.int64)
    return metric.value, metric.cumulated_batch_size if metric.meta.is_mean_reduction else zero
