"""Snapshots with known answers: the model is fitted to times of a known workload."""

from __future__ import annotations

from typing import Any

from hvd_elastic.model.goodput import BatchLimits, BatchPlan
from hvd_elastic.model.step_time import Observation, StepTimeModel, fit_step_time
from hvd_elastic.policy.snapshot import Allocation, HostOffer, Snapshot

HOSTS = tuple(HostOffer(f"n{number}", 2) for number in range(4))


def well_known(constant_s: float, example_s: float, sync_s: float, batch: int) -> StepTimeModel:
    """Fitted to every number of slots up to 8, on hosts with two each."""
    seen = [
        Observation(
            -(-ranks // 2),
            ranks,
            batch / ranks,
            0,
            constant_s + example_s * batch / ranks + (sync_s if ranks > 1 else 0.0),
        )
        for ranks in range(1, 9)
        for _ in range(4)
    ]
    return fit_step_time(seen)


def snapshot(model: StepTimeModel | None, current: dict[str, int], **other: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "hosts": HOSTS,
        "plan": BatchPlan(64),
        "limits": BatchLimits(64, 64, max_accumulation_steps=0),
        "noise_scale": float("inf"),
        "measured": 9,
        "silent_s": 0.0,
        "pause_s": 0.5,
        "min_np": 1,
        "max_np": None,
    }
    return Snapshot(current=Allocation.of(current), model=model, **{**fields, **other})
