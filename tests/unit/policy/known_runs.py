"""Events of a run whose true step times are known."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from hvd_elastic.model.step_time import StepTimeModel
from tests.unit.records.made_events import noted


def true_model(*times: float, gamma: float = 1.5) -> StepTimeModel:
    """By alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n."""
    alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n = times
    return StepTimeModel(
        alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n, gamma, np.eye(7), noise=0.0
    )


def run_events(
    model: StepTimeModel,
    worlds: Sequence[Sequence[int]],
    batches: Sequence[int] = (256,),
    *,
    limits: dict[str, int] | None = None,
    noise_scale: float | None = None,
    windows: int = 10,
    jitter: float = 0.03,
    cores: int | None = None,
    machine: str = "",
) -> list[Any]:
    """A run that trains on each of the worlds for a while.

    Args:
        model: of the true step times.
        worlds: slots on hosts n0, n1, … for each.
        batches: global batch sizes that each world trains at, one after the other.
        limits: of an adaptive batch.
        noise_scale: as the metrics tell it.
        windows: of a second and a half, for each batch size.
        jitter: relative, of each window.
        cores: that each host's agent tells; None: no agent is told of.
        machine: that all hosts are parts of; empty: of none, each is its own.
    """
    rng = np.random.default_rng(1)
    most = max(worlds, key=len)
    hosts = [[f"n{number}", max(most)] for number in range(len(most))]
    events: list[Any] = []
    taker = SimpleNamespace(note_event=events.append)
    now, step, examples = 100.0, 0.0, 0.0

    def add(kind: str, **fields: Any) -> None:
        noted(taker, kind, {"t": 1e9 + now, **fields}, now)

    add("run_started", run_id="known", hosts=hosts, min_np=1, max_np=None)
    for host, _ in hosts if cores is not None else []:
        add("agent_started", host=host, cpus=cores, machine=machine or f"machine of {host}")
    for generation, world in enumerate(worlds, 1):
        ranks = sum(world)
        names = [f"n{number}" for number in range(len(world))]
        size = {"from_size": 0, "to_size": ranks, "reason": "a test"}
        add("rescale_started", generation=generation, hosts=names, slots=list(world), **size)
        now += 0.3
        add("rescale_finished", generation=generation, size=ranks, pause_s=0.3)
        for batch in batches:
            if limits is not None:
                plan = {"global_batch_size": batch, "accumulation_steps": 0, "limits": limits}
                add("batch_plan", step=int(step), **plan)
            step_s = float(model.step_s(len(world), ranks, batch / ranks, 0))
            for _ in range(windows):
                now += 1.5
                made = 1.5 / (step_s * float(np.exp(jitter * rng.standard_normal())))
                step, examples = step + made, examples + made * batch
                told = {} if noise_scale is None else {"noise_scale": noise_scale}
                done: dict[str, Any] = {"step": step, "examples": examples, "size": ranks}
                add("metrics", epoch=0, global_batch_size=batch, **done, **told)
    return events
