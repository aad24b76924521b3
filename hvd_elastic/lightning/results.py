"""Metrics that ``self.log`` collects over an epoch, the same on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.lightning.library import part

_ResultCollection: Any = part("trainer.connectors.logger_connector.result")._ResultCollection
_ONCE = "on_train_epoch_end"
"""Hook whose values are computed once an epoch, on each rank."""
_SAID = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch"),
    *("enable_graph", "add_dataloader_idx", "metric_attribute"),
)
"""What the script has said of a value that it logs, and what a worker that joins has to know."""


class EvaluationResults(_ResultCollection):
    """Metrics of a validation: those of an epoch are reduced whether or not the script asks."""

    def log(self, *args: Any, sync_dist: bool = False, **options: Any) -> None:
        """Log a value; that of a step is not reduced, since ranks may differ by one batch."""
        super().log(*args, sync_dist=sync_dist and self.training, **options)

    def forget_cut(self) -> None:
        """Forget what a validation that was interrupted has logged, and where it was."""
        self.reset()
        self.batch = self.batch_size = self.dataloader_idx = None

    def metrics(self, on_step: bool) -> Any:
        """Return the values; reduces those of an epoch in the order of their names.

        A rank that joined has logged them in another order.
        """
        if not on_step:
            for _, metric in sorted(self.valid_items(), key=lambda item: item[0]):
                self._get_cache(metric, on_step)
        return super().metrics(on_step)

    def _get_cache(self, metric: Any, on_step: bool) -> Any:
        meta, sync = metric.meta, metric.meta.sync
        asked = sync.should
        try:
            if not on_step:
                sync.should = not self._is_told(metric)
                is_reduced = meta.on_epoch and metric.is_tensor and metric._computed is None
                if is_reduced and sync.should and not sync.rank_zero_only:
                    own = names_code([f"{meta.fx}.{meta.name}"])
                    check_names(sync.fn(own, reduce_op="sum"), [meta.name])
            return _ResultCollection._get_cache(metric, on_step)
        finally:
            sync.should = asked

    def _is_told(self, metric: Any) -> bool:
        """Return whether the value is that of all ranks already."""
        return False


class TrainingResults(EvaluationResults):
    """Metrics of the training batches of an epoch; :class:`Sums` adds them up over the ranks."""

    def __init__(self) -> None:
        super().__init__(training=True)

    def _is_told(self, metric: Any) -> bool:
        return is_summed(metric)

    def snapshot(self) -> Any:
        """Return what :meth:`roll_back` needs; shallow, since tensors are replaced."""
        return {key: dict(vars(metric)) for key, metric in self.items()}

    def roll_back(self, values: Any) -> None:
        """Go back to an earlier :meth:`snapshot`."""
        for key in self.keys() - values.keys():
            del self[key]
        for key, attributes in values.items():
            vars(self[key]).update(attributes)
        self.batch = None

    def state_dict(self) -> dict[str, Any]:
        """Return what each number is, and its value if it is no sum over the ranks."""
        found = {}
        for key, metric in self.items():
            if not metric.has_reset:
                meta, sync = metric.meta, metric.meta.sync
                found[key] = {
                    **{name: getattr(meta, name) for name in _SAID},
                    "reduce_fx": meta.reduce_fx.__name__,
                    "sync_dist": sync.should,
                    "rank_zero_only": sync.rank_zero_only,
                    "value": metric.value if metric.is_tensor else None,
                    "last": metric._forward_cache,
                }
        return found

    def load_state_dict(
        self, state: Mapping[str, Any], reduce: Any, metrics: Mapping[str, Any]
    ) -> None:
        """Take over what another rank has.

        Args:
            state: what :meth:`state_dict` has returned there.
            reduce: reduces a tensor over the ranks.
            metrics: the metrics of the module, by name.
        """
        for key in self.keys() - state.keys():
            self[key].reset()
        for key, entry in state.items():
            said = dict(entry)
            value, last = said.pop("value"), said.pop("last")
            said["reduce_fx"] = getattr(torch, said["reduce_fx"])
            if key not in self:
                first = (
                    metrics[said["metric_attribute"]] if value is None else torch.zeros_like(value)
                )
                self.log(value=first, batch_size=1, sync_dist_fn=reduce, **said)
            metric = self[key]
            if value is not None:
                metric.reset()
                metric.value = value.to(metric.value)
            metric._forward_cache, metric._update_count, metric.has_reset = last, 1, False


def names_code(names: Iterable[str]) -> torch.Tensor:
    """Return numbers whose sums over the ranks show whether all have the same names."""
    # Sums of squares of 20 bits are exact.
    code = zlib.crc32("\n".join(names).encode()) % 2**20
    return torch.tensor([1, code, code**2], dtype=torch.float64)


def check_names(sums: torch.Tensor, shown: Sequence[str]) -> None:
    """Raise ScriptError if the ranks have other names; ``sums``: of their :func:`names_code`."""
    ranks, total, squares = (round(each) for each in sums.tolist())
    if ranks * squares != total**2:
        raise differing_names(shown)


def differing_names(shown: Iterable[str]) -> ScriptError:
    """Return the error for ranks that log other metrics than this one, which logs ``shown``."""
    own = ", ".join(map(repr, shown)) or "none"
    return ScriptError(
        f"the ranks log different metrics: this one has {own} where another rank has others, and "
        "values of an epoch are those of all ranks. Log the same names on every rank, in the same "
        "batches; where a rank has no value: self.log(name, 0.0, on_epoch=True, batch_size=0)"
    )


def is_summed(metric: Any) -> bool:
    """Return whether a logged value is a sum over batches, which ranks add up in each step."""
    meta = metric.meta
    adds = metric.is_tensor and (meta.is_mean_reduction or meta.is_sum_reduction)
    return bool(adds and meta.on_epoch and meta.fx != _ONCE and not meta.sync.rank_zero_only)
