"""Norms taken of many gradients at once are those taken one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvd_elastic.communicator.interface import RingRank
from hvd_elastic.model.goodput import BatchLimits
from hvd_elastic.model.noise_scale import NoiseTracker
from hvd_elastic.torch import gradient_buckets, gradient_statistics
from hvd_elastic.torch.gradient_statistics import GradientStatistics, parts_by_size
from hvd_elastic.torch.optimizer import DistributedOptimizer
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.step import Pass
from tests.unit.torch.test_gradient_buckets import Alike, Images, Mixed, Tied, Words, groups, inputs


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(3)
    made = [torch.nn.Parameter(torch.randn(size, dtype=dtype)) for size in (5, 70, 1, 300)]
    made.append(torch.nn.Parameter(torch.randn(6, 4, dtype=dtype)))
    for each in made:
        each.grad = torch.randn_like(each)
    made[-1].grad = torch.randn(4, 6, dtype=dtype).t()  # not contiguous
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_norms_of_many_are_those_of_each(
    kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does, on the CPU: the operations are the same."""
    tolerance = 1e-2 if dtype.itemsize < 4 else 1e-5
    ours = parameters(dtype)
    optimizer = kind([{"params": ours[:2]}, {"params": ours[2:]}], lr=1e-3)
    statistics = GradientStatistics(optimizer)
    for _ in range(3):
        optimizer.step()
    monkeypatch.setattr(gradient_statistics, "_CHUNK_ELEMENTS", 80)
    for number, group in enumerate(optimizer.param_groups):
        for some in gradient_statistics._chunks(group["params"]):
            together = statistics._sum_of_squares(number, some)
            each = [float(statistics._squared_norm(p, p.grad)) for p in some if p.grad is not None]
            assert together.item() == pytest.approx(sum(each), rel=tolerance)


def test_chunks_hold_neighbours_of_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_statistics, "_CHUNK_ELEMENTS", 10)
    made = [torch.zeros(size) for size in (4, 4, 4, 30, 1)] + [torch.zeros(1).double()]
    sizes = [[len(each) for each in chunk] for chunk in gradient_statistics._chunks(made)]
    assert sizes == [[4, 4], [4], [30], [1], [1]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_ranks_parts_of_the_mean_add_up_to_all_of_it(ranks: int) -> None:
    """Each looks at about as many elements as the others; one may have none to look at."""
    made = parameters(torch.float64)
    statistics = GradientStatistics(torch.optim.SGD([{"params": made[:2]}, {"params": made[2:]}]))
    parts = parts_by_size(made, ranks)
    for part in parts:
        statistics.end_step(7, 32, part)
    rows = statistics.drain()
    assert rows[:, :3].tolist() == [[7, 32, 0]] * ranks
    squares = [float(each.grad.square().sum()) for each in made if each.grad is not None]
    expected = [sum(squares[:2]), sum(squares[2:])]
    assert rows[:, 5:].sum(0).tolist() == pytest.approx(expected)
    elements = [sum(each.numel() for each in part) for part in parts]
    assert sum(elements) == 400
    assert max(elements) <= max(300, 400 / ranks)


@pytest.mark.parametrize("make", [torch.optim.Adamax, torch.optim.Adam, torch.optim.SGD])
def test_each_optimizer_is_ready_after_some_steps(make: Callable[..., Any]) -> None:
    weights, unused = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(1))
    optimizer = make([weights, unused], lr=0.1)
    statistics = GradientStatistics(optimizer)
    for _ in range(20):
        weights.grad = torch.ones(4)
        optimizer.step()
    assert statistics.ready


def test_the_first_steps_of_adam_do_not_spoil_what_is_known_of_its_noise() -> None:
    ratios = []
    for seed in range(12):
        torch.manual_seed(seed)
        weights = torch.nn.Parameter(torch.zeros(1000))
        optimizer = torch.optim.Adam([weights], lr=0.0)
        statistics = GradientStatistics(optimizer)
        tracker = NoiseTracker(1, initial_batch_size=32, population=None)
        for step in range(20):
            # Single examples vary by 1 in each element: a noise scale of 25, whatever divides it.
            passes = 0.2 + torch.randn(2, 1000) / 4
            sampled = statistics.ready
            for weights.grad in passes if sampled else ():
                statistics.see([weights])
                statistics.end_pass(0.5)
            weights.grad = passes.mean(0)
            if sampled:
                statistics.end_step(step, 32, [weights])
            optimizer.step()
        for row in statistics.drain():
            tracker.add_norms(row[3:4], row[4:5], row[1], row[2], int(row[0]))
        ratios.append(tracker.noise_scale() / 25)
    assert min(ratios) > 0.9
    assert max(ratios) < 1.1


@pytest.mark.parametrize("bucket_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("build", [Tied, Images, Words, Mixed])
def test_norms_taken_in_buckets_are_those_of_the_gradients(
    alone: Context,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[], torch.nn.Module],
    bucket_bytes: int,
) -> None:
    """Of large gradients alone, in several buckets, and of few that also hold an unused one."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(gradient_buckets, "_IN_CACHE", 7)

    def built() -> torch.nn.Module:
        torch.manual_seed(0)
        return build()

    rows, model = [], built()
    for rank in range(2):
        alone.worker.communicator = ranks = Alike()
        ranks.rank = RingRank(rank)
        DistributedOptimizer(torch.optim.SGD(groups(model), lr=1.0), model)
        planner = AdaptivePlanner(BatchLimits(8, 16), examples=64)
        alone.register_data(64, 0, planner)
        alone.hand_out(Pass(step_examples=8, weight=1.0, examples=4))
        model(inputs(0)).square().mean().backward()
        (averager,) = alone.worker.averagers
        averager.synchronize()  # type: ignore[attr-defined]
        assert planner._statistics is not None
        rows.append(planner._statistics.drain()[0])
        alone.worker.averagers.reset()
        alone.step.forget()
    plain = built()
    plain(inputs(0)).square().mean().backward()
    squares = [
        sum(float(p.grad.double().square().sum()) for p in g["params"] if p.grad is not None)
        for g in groups(plain)
    ]
    tolerance = 1e-2 if build is Mixed else 1e-5
    assert [*rows[0][3:5] * 2] == pytest.approx(squares, rel=tolerance)
    assert [*rows[0][5:] + rows[1][5:]] == pytest.approx(squares, rel=tolerance)
