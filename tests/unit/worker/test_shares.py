"""Unequal shares in a training process: gradients, passes, reviews, and what is told of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.interface import RingRank
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.model.shares import ShareBalance
from hvd_elastic.torch import gradient_buckets
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.torch.gradient_statistics import GradientStatistics
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.message_sink import FileSink
from hvd_elastic.worker.planning import planner as planning
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.planning.compute_times import ComputeTimes
from hvd_elastic.worker.planning.planner import UnequalShares
from tests.waiting import Clock

Loader = hvd.DataLoader[list[torch.Tensor]]
BATCH = 40


class OneOf(LocalCommunicator):
    """One rank of several; the parts of the others in an average of gradients are zero."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = RingRank(rank), size

    def reduce_async(self, tensor: torch.Tensor, name: str, *, sent_as: str = "") -> Any:
        if name == "hvd_elastic.change":  # all say the same
            return tensor
        return tensor.div_(self.size)

    def gather(self, array: Any, name: str) -> Any:
        return np.concatenate([array] * self.size)


def data(examples: int = 400) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(examples, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    first, last = torch.nn.Linear(5, 4), torch.nn.Linear(4, 1)
    return torch.nn.Sequential(first, torch.nn.Tanh(), last).double()


def process(monkeypatch: pytest.MonkeyPatch, engine: LocalCommunicator) -> Context:
    made = Context(Mode.ALONE, TorchFrontend())
    made.worker.communicator = engine
    monkeypatch.setattr(context, "_context", made)
    return made


def balance_of(planner: AdaptivePlanner | UnequalShares) -> ShareBalance:
    return planner.choice.balance if isinstance(planner, AdaptivePlanner) else planner.balance


def hold(planner: AdaptivePlanner | UnequalShares, parts: tuple[int, ...]) -> None:
    """Have these shares, whatever is measured."""
    balance = balance_of(planner)
    balance.parts = parts
    balance.speeds = tuple(map(float, parts))
    if isinstance(planner, AdaptivePlanner):
        planner._share_out = lambda *_, **__: ""  # type: ignore[method-assign]
    else:
        planner._decide = lambda *_, **__: ("", "")  # type: ignore[method-assign]


def gradients_of_a_step(
    monkeypatch: pytest.MonkeyPatch, rank: int, options: dict[str, Any], accumulation: int
) -> tuple[list[torch.Tensor], int, int]:
    """What one of three ranks adds to the average, in how many passes, of how many examples."""
    made = process(monkeypatch, OneOf(rank, 3))
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, model, lr_rule="none")
    loader: Loader = hvd.DataLoader(data(), BATCH, shuffle=True, seed=1, **options)
    planner = loader.planner
    assert isinstance(planner, AdaptivePlanner | UnequalShares)
    hold(planner, (22, 5, 13))
    if isinstance(planner, AdaptivePlanner):
        planner.choice.plan = BatchPlan(BATCH, accumulation)
        monkeypatch.setattr(planner, "_choose_plan", lambda *_: "")
    passes = examples = 0
    found: list[torch.Tensor] = []
    for _ in hvd.epochs(1):
        for inputs, targets in loader:
            passes, examples = passes + 1, examples + len(inputs)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.synchronize()  # type: ignore[attr-defined]
            last = not made.step.accumulating
            if last:
                found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            if last:
                break
        break
    return found, passes, examples


@pytest.mark.parametrize(
    ("options", "accumulation", "passes"),
    [
        ({"unequal_shares": True}, 0, [1, 1, 1]),
        ({"max_batch_size": BATCH}, 0, [1, 1, 1]),
        # Passes have two examples at the least, so a small share has fewer of them.
        ({"max_batch_size": BATCH}, 3, [4, 2, 4]),
        ({"max_batch_size": BATCH, "atomic_batch_size_bounds": (1, 13)}, 0, [2, 1, 1]),
    ],
)
def test_the_average_is_the_gradient_of_the_global_batch(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    accumulation: int,
    passes: list[int],
) -> None:
    ranks = [gradients_of_a_step(monkeypatch, r, options, accumulation) for r in range(3)]
    assert [made for _, made, _ in ranks] == passes
    assert [examples for _, _, examples in ranks] == [22, 5, 13]
    alone = process(monkeypatch, LocalCommunicator())
    model = network()
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    loader: Loader = hvd.DataLoader(data(), BATCH, shuffle=True, seed=1, context=alone)
    inputs, targets = next(iter(loader))
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    for number, parameter in enumerate(model.parameters()):
        average = sum(gradients[number] for gradients, _, _ in ranks)
        torch.testing.assert_close(average, parameter.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 4096])
def test_squared_norms_of_passes_are_weighted_by_their_examples(
    monkeypatch: pytest.MonkeyPatch, together: bool, bucket_bytes: int
) -> None:
    """What the noise scale is estimated from: 10 passes of 2 to 6 examples on three ranks.

    One by one, and as on a GPU; with each gradient in place, several buckets, and one bucket.
    """
    monkeypatch.setattr(GradientStatistics, "together", lambda *_: together)
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", bucket_bytes)
    made = 0.0
    for rank in range(3):
        process(monkeypatch, OneOf(rank, 3))
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = hvd.DistributedOptimizer(sgd, model)
        loader: Loader = hvd.DataLoader(data(BATCH), BATCH, max_batch_size=BATCH)
        adaptation = loader.planner
        assert isinstance(adaptation, AdaptivePlanner)
        hold(adaptation, (22, 5, 13))
        adaptation.choice.plan = BatchPlan(BATCH, 3)
        monkeypatch.setattr(adaptation, "_choose_plan", lambda *_: "")
        weighted = passes = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            weighted += len(inputs) / BATCH * sum(float(g.square().sum()) for g in own)
            passes += 1
            loss.backward()
            optimizer.step()
        assert adaptation._statistics is not None
        (row,) = adaptation._statistics.drain()
        assert row[1:3].tolist() == [BATCH, passes]
        assert row[3].item() == pytest.approx(weighted, rel=1e-9)
        made += passes
    assert made == 10


class SlowOther(OneOf):
    """Two ranks; an example takes the other ``slowness`` times as long as this one."""

    def __init__(self, slowness: float) -> None:
        super().__init__(0, 2)
        self.slowness = slowness
        self.planner: AdaptivePlanner | UnequalShares | None = None

    def gather(self, array: Any, name: str) -> Any:
        other = array.copy()
        assert self.planner is not None
        own, others = balance_of(self.planner).parts_of(BATCH, 2)
        other[1] *= self.slowness * others / own
        return np.concatenate([array, other])


@pytest.mark.parametrize("options", [{"unequal_shares": True}, {"max_batch_size": BATCH}])
def test_reviews_follow_the_ranks_and_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    engine = SlowOther(3.0)
    made = process(monkeypatch, engine)
    made.worker.sink = FileSink(tmp_path)
    model, clock = network(), Clock()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    loader: Loader = hvd.DataLoader(data(4000), BATCH, **options)
    planner = loader.planner
    assert isinstance(planner, AdaptivePlanner | UnequalShares)
    engine.planner = planner
    planner.times = ComputeTimes(clock, lambda: None)
    monkeypatch.setattr(planning, "time", SimpleNamespace(perf_counter=clock))
    sizes = []
    steps = 0
    for _ in hvd.epochs(1):
        for inputs, targets in loader:
            clock.now += len(inputs)
            sizes.append(len(inputs))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
            if steps == 50:
                engine.slowness = 1.0
                assert planner.metrics()["shares"] == [30, 10]
                other = json.loads(json.dumps(planner.state_dict()))
                planner.load_state_dict(other)
                assert planner.parts == (30, 10)
    assert {*sizes[:10]} == {20}
    assert 30 in sizes
    assert sizes[-1] == 20
    slow, even = told(tmp_path)
    assert (slow["shares"], even["shares"]) == ([30, 10], [])
    assert slow["reason"].startswith("rank 1 takes 60 s for 20 examples and rank 0 20 s for 20")
    assert "equally fast" in even["reason"]


def told(folder: Path, kind: str = "shares") -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_passes_of_unequal_shares_keep_to_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of 26 would be too much for one pass, and too little for two."""
    engine = SlowOther(3.0)
    process(monkeypatch, engine)
    model, clock = network(), Clock()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    loader: Loader = hvd.DataLoader(
        data(3000), BATCH, max_batch_size=BATCH, atomic_batch_size_bounds=(14, 22)
    )
    planner = loader.planner
    assert isinstance(planner, AdaptivePlanner)
    engine.planner = planner
    planner.times = ComputeTimes(clock, lambda: None)
    monkeypatch.setattr(planning, "time", SimpleNamespace(perf_counter=clock))
    sizes = set()
    for inputs, targets in loader:
        clock.now += len(inputs)
        sizes.add(len(inputs))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert sizes == {20, 22}


def test_shares_of_another_batch_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = SlowOther(3.0)
    made = process(monkeypatch, engine)
    made.worker.sink = FileSink(tmp_path)
    model = network()
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    loader: Loader = hvd.DataLoader(data(), BATCH, max_batch_size=2 * BATCH)
    planner = loader.planner
    assert isinstance(planner, AdaptivePlanner)
    engine.planner = planner
    planner.review_if_due(made.worker)
    hold(planner, (30, 10))
    sizes = iter([BATCH, 2 * BATCH])

    def decide(*_: Any) -> str:
        planner.choice.plan = BatchPlan(next(sizes))
        return "more is better"

    monkeypatch.setattr(planner, "_choose_plan", decide)
    for _ in range(2):
        planner.want_review()
        planner.review_if_due(made.worker)
    (event,) = told(tmp_path)
    assert (event["shares"], event["global_batch_size"]) == ([60, 20], 80)
    assert event["reason"] == "more is better"


def test_another_world_begins_with_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlowOther(3.0)
    made = process(monkeypatch, engine)
    model = network()
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    planner = engine.planner = UnequalShares(BATCH, 2, ComputeTimes())
    planner.review_if_due(made.worker)
    planner.balance.speeds = (3.0, 1.0)
    planner.balance.cut(BATCH, 2, 2)
    planner.review_if_due(made.worker)
    assert planner.parts == (30, 10), "nothing is due"
    made.worker.generation += 1
    planner.review_if_due(made.worker)
    assert not planner.parts


def test_another_rank_0_tells_the_leader_what_is_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The host of the first one may be lost, and a leader that has no records asks the others."""
    engine = SlowOther(1.0)
    made = process(monkeypatch, engine)
    made.worker.sink = FileSink(tmp_path)
    model = network()
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    planner = hvd.DataLoader(data(), BATCH, max_batch_size=2 * BATCH).planner
    assert isinstance(planner, AdaptivePlanner)
    engine.planner = planner
    own_plan = planner.state_dict()
    monkeypatch.setattr(engine, "broadcast_bytes", lambda *_: json.dumps(own_plan).encode())
    for rank, plans in ((1, 0), (0, 1), (0, 1), (1, 1), (0, 2)):
        engine.rank = RingRank(rank)
        planner.review_if_due(made.worker)
        made.worker.generation += 1
        assert (len(told(tmp_path, "batch_plan")) if plans else 0) == plans, rank


def test_equal_shares_are_kept_where_the_script_wants_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process(monkeypatch, LocalCommunicator())
    assert not hvd.DataLoader(data(), BATCH).planner.reviews
    fixed: Loader = hvd.DataLoader(data(), BATCH, max_batch_size=BATCH, unequal_shares=False)
    assert isinstance(fixed.planner, AdaptivePlanner)
    assert not fixed.planner.choice.unequal_shares
    assert "shares" not in fixed.planner.metrics()
    with pytest.raises(ScriptError, match=r"unequal_shares='yes'\): it must be True, False"):
        hvd.DataLoader(data(), BATCH, unequal_shares="yes")  # type: ignore[arg-type]


def test_unequal_shares_need_an_optimizer_that_weighs_them(alone: Context) -> None:
    loader: Loader = hvd.DataLoader(data(), BATCH, unequal_shares=True)
    with pytest.raises(ScriptError, match=r"wrap yours in it"):
        next(iter(loader))
