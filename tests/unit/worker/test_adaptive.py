"""A batch that adapts: passes, statistics, learning rate and bad input, in one process."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.goodput import BatchLimits, BatchPlan
from hvd_elastic.model.lr_rules import Adjustment, Situation, unchanged
from hvd_elastic.model.timings import Configuration
from hvd_elastic.records.audit import check_audit
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.torch.gradient_statistics import GradientStatistics
from hvd_elastic.torch.optimizer import averager_of
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.planning.compute_times import SamplingCost
from hvd_elastic.worker.planning.planner import Report
from hvd_elastic.worker.progress import Progress

Loader = hvd.DataLoader[list[torch.Tensor]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HVD_ELASTIC_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("HVD_ELASTIC_AUDIT", "1")
    return tmp_path


def regression(examples: int, width: int = 20, noise: float = 1.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(examples, width, generator=generator)
    truth = torch.randn(width, 1, generator=generator)
    targets = inputs @ truth + noise * torch.randn(examples, 1, generator=generator)
    return TensorDataset(inputs, targets)


def exact_noise_scale(
    model: torch.nn.Linear, data: TensorDataset, divisor: torch.Tensor | float = 1.0
) -> float:
    """Of the squared error's gradient on this data set, from every example's own gradient."""
    inputs, targets = data.tensors
    with torch.no_grad():
        own = 2 * (model(inputs) - targets) * inputs / divisor
        mean = own.mean(0)
        return float(own.var(0, unbiased=True).sum() / mean.square().sum())


def fixed(adaptation: AdaptivePlanner, plan: BatchPlan) -> None:
    """Have this plan, whatever is measured."""
    adaptation.choice.plan = plan
    adaptation._choose_plan = lambda *_: ""  # type: ignore[method-assign]


def steps(
    loader: Loader, optimizer: Any, model: torch.nn.Module, epochs: int, **values: Any
) -> None:
    """Train; one pass at a time, as a script does."""

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                state.commit(loss=loss)

    train(hvd.State(model=model, optimizer=optimizer, **values))


def test_passes_of_a_step_add_up_to_the_gradient_of_its_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, found = regression(90), []
    for accumulation in (0, 2):
        made = Context(Mode.ALONE, TorchFrontend())
        monkeypatch.setattr(context, "_context", made)
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 1, bias=False)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(sgd, model, lr_rule="none")
        loader: Loader = hvd.DataLoader(data, 30, shuffle=True, max_batch_size=30)
        assert isinstance(loader.planner, AdaptivePlanner)
        fixed(loader.planner, BatchPlan(30, accumulation))
        steps(loader, optimizer, model, 2)
        assert made.worker.progress.step == 6
        found.append(model.weight.detach().clone())
    torch.testing.assert_close(found[0], found[1])
    lines = (folder / "audit.jsonl").read_text().splitlines()
    for life in (0, 7):  # the data set and six steps, twice
        assert check_audit(map(json.loads, lines[life : life + 7]), finished=True).ok


@pytest.mark.parametrize("accumulation", [0, 3])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_the_noise_scale_of_frozen_weights_is_found(
    alone: Context, monkeypatch: pytest.MonkeyPatch, accumulation: int, kind: str
) -> None:
    data = regression(6400, width=100)
    torch.manual_seed(1)
    model = torch.nn.Linear(100, 1, bias=False)
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    hvd.DistributedOptimizer(optimizer, model)
    loader: Loader = hvd.DataLoader(data, 32, shuffle=True, max_batch_size=32)
    adaptation = loader.planner
    assert isinstance(adaptation, AdaptivePlanner)
    fixed(adaptation, BatchPlan(32, accumulation))
    # Every step is sampled, and all samples count, however busy this machine is.
    monkeypatch.setattr(adaptation.sampling, "schedule", lambda *_, **__: None)
    steps(loader, optimizer, model, 1)
    adaptation.want_review()
    adaptation.review_if_due(alone.worker)
    assert adaptation.noise.tracker.steps == (194 if kind == "adam" else 200)
    found = adaptation.metrics()["noise_scale"]
    divisor: torch.Tensor | float = 1.0
    if kind == "adam":
        divisor = optimizer.state[model.weight]["exp_avg_sq"].sqrt()
    assert found == pytest.approx(exact_noise_scale(model, data, divisor), rel=0.1)


def test_the_noise_scale_follows_training_on_one_rank(alone: Context) -> None:
    data = regression(3000, width=100)
    torch.manual_seed(1)
    model = torch.nn.Linear(100, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
    loader: Loader = hvd.DataLoader(data, 32, shuffle=True, max_batch_size=32)
    adaptation = loader.planner
    assert isinstance(adaptation, AdaptivePlanner)
    fixed(adaptation, BatchPlan(32))
    ratios = []

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(6):
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                state.commit()
                if alone.worker.progress.step >= 100 and alone.worker.progress.step % 20 == 0:
                    found = adaptation.metrics()["noise_scale"]
                    ratios.append(found / exact_noise_scale(model, data))

    train(hvd.State(model=model, optimizer=optimizer))
    assert max(ratios) < 1.25
    assert min(ratios) > 0.8


def test_a_noisy_gradient_and_a_costly_step_bring_a_larger_batch(
    folder: Path, alone: Context
) -> None:
    context.current().worker.sink = hvd_file_sink(folder)
    data = regression(2000, noise=10.0)
    model = torch.nn.Linear(20, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100_000)
    loader: Loader = hvd.DataLoader(data, 20, shuffle=True, max_batch_size=500)
    planner = loader.planner
    assert isinstance(planner, AdaptivePlanner)
    rates = []

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(20):  # on a busy machine it takes longer to know what a step costs
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                time.sleep(0.004)
                optimizer.step()
                scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
                state.commit()
            if planner.plan.global_batch_size > 30:
                hvd.stop("it has grown")

    train(hvd.State(model=model, optimizer=optimizer))
    assert planner.plan.global_batch_size > 30
    assert set(rates) == {0.001}, "outside of a step the rate is the schedule's"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    plans = [event for event in events if event["kind"] == "batch_plan"]
    assert plans[0]["reason"] == "the initial batch size"
    assert "noise scale" in plans[-1]["reason"]
    assert plans[-1]["lr_scale"] > 1
    assert check_audit(
        map(json.loads, (folder / "audit.jsonl").read_text().splitlines()), finished=True
    ).ok


def hvd_file_sink(folder: Path) -> Any:
    from hvd_elastic.worker.message_sink import FileSink

    context.current().worker.audit = True
    return FileSink(folder)


def test_the_rule_scales_each_step_and_counts_progress(alone: Context) -> None:
    def threefold(now: Situation) -> Adjustment:
        return Adjustment(factor=3.0, gain=0.5)

    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model, lr_rule=threefold)
    data = TensorDataset(torch.ones(8, 1), torch.ones(8, 1))
    loader: Loader = hvd.DataLoader(data, 8, max_batch_size=8, accumulation=False)

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(1):
            for inputs, _ in loader:
                optimizer.zero_grad()
                model(inputs).mean().backward()  # gradient 1
                optimizer.step()

    train(hvd.State(model=model, optimizer=optimizer))
    assert isinstance(loader.planner, AdaptivePlanner)
    passes = alone.worker.progress.epoch
    assert model.weight.item() == pytest.approx(-0.3 * passes)
    assert loader.planner.progress == 0.5 * passes
    assert passes == 2, "half as good, so twice as many"


def test_a_step_with_nan_is_left_out_and_a_run_of_them_ends_the_job(alone: Context) -> None:
    model = torch.nn.Linear(20, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
    loader: Loader = hvd.DataLoader(regression(400), 10, max_batch_size=10)
    bad: set[int] = {3, 7}
    sampled: set[int] = set()

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(1):
            for inputs, targets in loader:
                optimizer.zero_grad()
                factor = math.nan if alone.worker.progress.step in bad else 1.0
                (factor * torch.nn.functional.mse_loss(model(inputs), targets)).backward()
                optimizer.step()
                averager = averager_of(optimizer)
                assert averager is not None
                sampled.update(row[0] for row in averager.gradients.sampling.statistics._rows)
                state.commit()

    train(hvd.State(model=model, optimizer=optimizer))
    assert isinstance(loader.planner, AdaptivePlanner)
    assert sampled
    assert not sampled & bad, "the noise scale would be NaN"
    assert alone.worker.progress.skipped == 2
    assert torch.isfinite(model.weight).all()
    assert alone.worker.progress.examples == 400
    alone.worker.progress.epoch, alone.worker.progress.position = 0, 0
    loader.planner.progress = 0.0
    bad |= set(range(1000))
    alone.has_trained = False
    with pytest.raises(ScriptError, match=r"not finite in 10 steps running.*loss is NaN"):
        train(hvd.State(model=model, optimizer=optimizer))


def test_a_loss_that_bursts_with_a_rate_that_was_scaled_is_told_with_the_scale() -> None:
    adaptation = AdaptivePlanner(BatchLimits(64, 1024), examples=8192)
    adaptation.choice.plan = BatchPlan(512)
    adaptation.adjustments = lambda: [Adjustment(factor=4.39, gain=1.0)]  # type: ignore[method-assign]
    for step in range(10):
        adaptation.skipped.count_step(
            Progress(step=step, skipped_at=step - 1, skipped_running=step)
        )
    with pytest.raises(ScriptError, match="not finite in 10 steps") as error:
        adaptation.skipped.refuse_many(9, adaptation.rate_advice)
    assert "8 times the initial 64, hvd_elastic has multiplied the learning rate by 4.39" in str(
        error.value
    )
    assert "lr_rule='none'" in str(error.value)


class BadInParts(torch.nn.Module):
    """In some steps the gradients of its first layer alone are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(20, 8)
        self.last = torch.nn.Linear(8, 1)
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.bad = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        if self.bad:
            hidden = hidden + (hidden * 0).sqrt()  # whose slope at 0 is infinite
        return self.last(hidden)


def test_gradients_that_are_bad_in_a_part_of_the_model_are_seen(alone: Context) -> None:
    """Also where the smallest parameter is in another part, or is not used at all."""
    model = BadInParts()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
    loader: Loader = hvd.DataLoader(regression(100), 10, max_batch_size=10)

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(1):
            for inputs, targets in loader:
                model.bad = alone.worker.progress.step in (3, 7)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()

    train(hvd.State(model=model, optimizer=optimizer))
    assert isinstance(loader.planner, AdaptivePlanner)
    assert alone.worker.progress.skipped == 2
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_model_of_sparse_gradients_alone_trains(alone: Context) -> None:
    """Nothing adds up its gradients where one rank makes one pass of a step."""
    model = torch.nn.EmbeddingBag(10, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    words = TensorDataset(torch.arange(40).reshape(20, 2) % 10, torch.zeros(20, 3))
    loader: Loader = hvd.DataLoader(words, 5, max_batch_size=5, accumulation=False)
    before = model.weight.detach().square().sum()
    steps(loader, optimizer, model, 1)
    assert model.weight.detach().square().sum() < before


def test_a_pass_that_does_not_fit_is_made_in_smaller_ones(folder: Path, alone: Context) -> None:
    alone.worker.sink = hvd_file_sink(folder)
    model = torch.nn.Linear(20, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
    loader: Loader = hvd.DataLoader(regression(400), 40, max_batch_size=40)
    sizes = []

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(2):
            for inputs, targets in loader:
                sizes.append(len(inputs))
                if len(inputs) > 15:
                    raise torch.cuda.OutOfMemoryError("made up")
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                state.commit()

    train(hvd.State(model=model, optimizer=optimizer))
    assert max(sizes[10:]) <= 15
    lines = (folder / "audit.jsonl").read_text().splitlines()
    assert check_audit(map(json.loads, lines), finished=True).ok


@pytest.mark.parametrize("accumulation", [True, False])
def test_a_larger_last_step_keeps_to_the_memory_too(alone: Context, accumulation: bool) -> None:
    model = torch.nn.Linear(20, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
    # A single example is too few for a step, so the last one of the epoch has 10.
    loader: Loader = hvd.DataLoader(
        regression(91),
        9,
        max_batch_size=9,
        atomic_batch_size_bounds=(1, 9),
        accumulation=accumulation,
    )
    failed = []

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(3):
            for inputs, targets in loader:
                optimizer.zero_grad()
                if len(inputs) > 9:
                    failed.append(len(inputs))
                    assert len(failed) < 10, "the same step is tried again and again"
                    raise torch.cuda.OutOfMemoryError("made up")
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                state.commit()

    train(hvd.State(model=model, optimizer=optimizer))
    assert alone.worker.progress.epoch == 3
    assert len(failed) == (0 if accumulation else 1)


def test_no_smaller_pass_is_allowed(alone: Context) -> None:
    model = torch.nn.Linear(20, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
    loader: Loader = hvd.DataLoader(
        regression(400), 40, max_batch_size=40, atomic_batch_size_bounds=(40, None)
    )

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(1):
            for _ in loader:
                raise torch.cuda.OutOfMemoryError("made up")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        train(hvd.State(model=model, optimizer=optimizer))


def test_what_is_known_goes_on_in_another_process(alone: Context) -> None:
    model = torch.nn.Linear(20, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
    loader: Loader = hvd.DataLoader(regression(800), 10, max_batch_size=80)
    steps(loader, optimizer, model, 2)
    before = loader.planner
    assert isinstance(before, AdaptivePlanner)
    state = json.loads(json.dumps(before.state_dict()))
    other: Loader = hvd.DataLoader(regression(800), 10, max_batch_size=80, context=alone)
    after = other.planner
    assert isinstance(after, AdaptivePlanner)
    after.attach(before._statistics, before.rule)  # type: ignore[arg-type]
    after.load_state_dict(state)
    assert json.dumps(after.state_dict()) == json.dumps(before.state_dict())
    assert after.metrics() == {**before.metrics(), "passes": 0}


def test_the_only_rank_tells_its_passes(alone: Context) -> None:
    model = torch.nn.Linear(20, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
    loader: Loader = hvd.DataLoader(regression(800), 10, max_batch_size=10)
    assert isinstance(loader.planner, AdaptivePlanner)
    assert loader.planner.metrics()["passes"] == 0
    steps(loader, optimizer, model, 1)
    assert alone.worker.progress.step == 80
    assert loader.planner.metrics()["passes"] == 160, "at first, each step in two"


class Others(LocalCommunicator):
    """Three other ranks that do what this one does.

    Each measures its part of the mean gradient, and all parts have to be as large as ours.
    """

    size = 4

    def gather(self, array: Any, name: str) -> Any:
        return np.concatenate([array] * 4)


def test_four_ranks_with_equal_gradients_have_no_noise(alone: Context) -> None:
    alone.worker.communicator = Others()
    model = torch.nn.Linear(20, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
    with torch.no_grad():
        model.weight.fill_(1.0)
    inputs, targets = regression(400, width=1).tensors
    data = TensorDataset(inputs.expand(400, 20), targets)  # so all weights have one gradient
    loader: Loader = hvd.DataLoader(data, 40, max_batch_size=40)
    steps(loader, optimizer, model, 2)
    assert isinstance(loader.planner, AdaptivePlanner)
    assert loader.planner.metrics()["noise_scale"] == pytest.approx(0.0, abs=1e-3)
    assert loader.planner.metrics()["efficiency"] == 1.0


def test_sparse_missing_and_frozen_parameters(alone: Context) -> None:
    torch.manual_seed(1)
    table = torch.nn.Embedding(50, 8, sparse=True)
    head, unused, frozen = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1), torch.nn.Linear(8, 8)
    frozen.requires_grad_(False)
    modules = torch.nn.ModuleList([table, head, unused, frozen])
    groups: list[dict[str, Any]] = [
        {"params": table.parameters(), "lr": 0.1},
        {"params": [*modules[1:].parameters()]},
    ]
    sgd = torch.optim.SGD(groups, lr=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, modules)
    indices = torch.arange(200) % 50
    # Something can be learned: of pure chance the noise scale has no bounds.
    data = TensorDataset(indices, (indices / 25)[:, None] + torch.randn(200, 1))
    loader: Loader = hvd.DataLoader(data, 20, shuffle=True, max_batch_size=20)

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(4):
            for indices, targets in loader:
                optimizer.zero_grad()
                found = head(frozen(table(indices)))
                torch.nn.functional.mse_loss(found, targets).backward()
                optimizer.step()

    train(hvd.State(model=modules, optimizer=optimizer))
    assert isinstance(loader.planner, AdaptivePlanner)
    assert loader.planner.metrics()["noise_scale"] > 0
    assert len(loader.planner.adjustments()) == 3, "two groups, and all together"


def test_clipping_between_passes_sees_the_whole_gradient_once(alone: Context) -> None:
    model = torch.nn.Linear(20, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = hvd.DistributedOptimizer(sgd, model, lr_rule="none")
    loader: Loader = hvd.DataLoader(regression(40), 40, max_batch_size=40)
    assert isinstance(loader.planner, AdaptivePlanner)
    fixed(loader.planner, BatchPlan(40, 3))
    norms = []

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(1):
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.synchronize()  # type: ignore[attr-defined]
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
                optimizer.step()

    before = model.weight.detach().clone()
    train(hvd.State(model=model, optimizer=optimizer))
    assert norms[:3] == [0.0, 0.0, 0.0]
    moved = (model.weight - before).norm().item()
    assert moved == pytest.approx(0.001 * norms[3], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 8}, r"max_batch_size=8\): the largest batch is below"),
        ({"max_batch_size": 6.5}, "must be a whole number"),
        ({"max_batch_size": 64, "drop_last": True}, "leave drop_last out"),
        ({"atomic_batch_size_bounds": (1, 8)}, "give max_batch_size too"),
    ],
)
def test_bounds_that_make_no_sense(alone: Context, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        hvd.DataLoader(regression(400), 16, **options)


def test_other_misuse_is_named(alone: Context) -> None:
    with pytest.raises(ScriptError, match="10 examples, fewer than one global batch of 16"):
        hvd.DataLoader(regression(10), 16, max_batch_size=16)
    model = torch.nn.Linear(20, 1).requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ScriptError, match=r"lr_rule=\.\.\.\): learning rate rule 'fast' is not"):
        hvd.DistributedOptimizer(sgd, model, lr_rule="fast")
    hvd.DataLoader(regression(400), 16, max_batch_size=16)
    with pytest.raises(ScriptError, match="no parameter of the optimizer requires one"):
        hvd.DistributedOptimizer(sgd, model)


def test_a_loader_that_adapts_is_made_before_the_training_function(alone: Context) -> None:
    alone.worker.in_train = True
    hvd.DataLoader(regression(400), 16)
    with pytest.raises(
        ScriptError, match=r"max_batch_size=\.\.\.\) is called in the training func"
    ):
        hvd.DataLoader(regression(400), 16, max_batch_size=16)


def test_a_model_without_gradients_is_named_where_the_loader_is_made(alone: Context) -> None:
    model = torch.nn.Linear(20, 1).requires_grad_(False)
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ScriptError, match="no parameter of the optimizer requires one"):
        hvd.DataLoader(regression(400), 16, max_batch_size=16)


@pytest.mark.parametrize("answer", [2.0, None, Adjustment(math.nan), Adjustment(1.0, gain=0.0)])
def test_a_rule_whose_answer_is_none_is_named(alone: Context, answer: Any) -> None:
    model = torch.nn.Linear(20, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model, lr_rule=lambda now: answer)
    loader: Loader = hvd.DataLoader(regression(40), 10, max_batch_size=20)
    with pytest.raises(ScriptError, match=r"lr_rule=\.\.\.\): the rule answered .* for Situation"):
        steps(loader, optimizer, model, 1)


def test_a_loader_without_our_optimizer_cannot_adapt(alone: Context) -> None:
    loader: Loader = hvd.DataLoader(regression(400), 16, max_batch_size=16)
    model = torch.nn.Linear(20, 1)
    with pytest.raises(ScriptError, match=r"was not given to hvd_elastic.*DistributedOptimizer"):
        steps(loader, torch.optim.SGD(model.parameters(), lr=0.1), model, 1)


def report(
    compute_s: float, host: float = 1.0, memory_bound: float = math.inf, columns: int = 5
) -> Report:
    return Report(memory_bound, compute_s, host, np.zeros((0, columns)))


def test_reports_are_taken_apart() -> None:
    rows = np.arange(5.0)
    fast, slow = report(0.1)._replace(samples=rows[np.newaxis]), report(0.2, 2.0, 7.0)
    found = Report.unpack(np.concatenate([each.pack() for each in (fast, slow, fast)]), 5)
    assert [each[:3] for each in found] == [fast[:3], slow[:3], fast[:3]]
    assert [each.samples.tolist() for each in found] == [[rows.tolist()], [], [rows.tolist()]]


def test_compute_times_count_where_those_of_all_ranks_are_known() -> None:
    """A GPU may not have reached an event yet, and the others may be faster."""
    known, faster, unknown = report(0.2), report(0.1), report(math.nan)
    found = []
    for reports in ([known, faster], [faster, unknown], [unknown, faster]):
        adaptation = AdaptivePlanner(BatchLimits(30, 100), examples=100)
        adaptation.times.step_s[1].append(0.3)
        adaptation._learn(reports)
        found += [times for _, times in adaptation.timings.state_dict()]
    assert found[0] == [[0.3, 0.2]]
    assert all(math.isnan(compute_s) for ((_, compute_s),) in found[1:])


@pytest.mark.parametrize("factor", [2.0, 0.4, 1.2])
def test_times_from_before_a_change_lead_to_an_early_review_and_are_dropped(factor: float) -> None:
    adaptation = AdaptivePlanner(BatchLimits(30, 100), examples=100)
    adaptation.timings.add_window(Configuration(1, 2, 30.0, 0), 0.02)
    waits, sizes, doubts = [], [], []
    for step_s in [0.01] * 4 + [0.01 * factor] * 3 + [0.01 * factor] * 2:
        adaptation.times.clear_steps()
        adaptation.times.step_s[1] = [step_s]
        adaptation._learn([report(math.nan)] * 2)
        waits.append(adaptation._steps_to_review(1000))
        sizes.append(len(adaptation.timings.state_dict()))
        doubts.append(adaptation._may_have_shifted)
    assert any(doubts) == (factor != 1.2)
    if factor == 1.2:
        assert waits == [50] * 9
        assert sizes == [2] * 9
        return
    assert waits == [50] * 4 + [10] * 2 + [50] * 3
    assert sizes == [2] * 6 + [1] * 3
    ((where, times),) = adaptation.timings.state_dict()
    assert where == [1, 2, 15.0, 0, 1.0]
    assert [step_s for step_s, _ in times] == [0.01 * factor] * 5


@pytest.mark.parametrize(
    ("ranks", "extra", "sampled"), [(1, 0, [0, 2, 4, 6]), (1, 1, [0]), (2, 0, [0])]
)
def test_probes_are_for_one_rank_that_makes_one_pass(
    ranks: int, extra: int, sampled: list[int]
) -> None:
    """Others see the noise in any step, and sample as rarely as its cost says."""
    weights = torch.nn.Parameter(torch.zeros(1))
    adaptation = AdaptivePlanner(BatchLimits(32, 32), examples=6400)
    adaptation.attach(GradientStatistics(torch.optim.SGD([weights], lr=0.1)), unchanged)
    adaptation._ranks, adaptation.choice.plan = ranks, BatchPlan(32, extra)
    adaptation.sampling.every, adaptation.sampling.probe_every = 64, 2
    assert [step for step in range(8) if adaptation.sampled(step)] == sampled


class MadeUpCost(SamplingCost):
    """Takes a time that was made up."""

    seconds = math.nan

    def typical_s(self) -> float:
        return self.seconds


def test_reviews_schedule_the_sampling_of_gradients() -> None:
    weights = torch.nn.Parameter(torch.zeros(100))
    adaptation = AdaptivePlanner(BatchLimits(32, 32), examples=6400)
    adaptation.attach(GradientStatistics(torch.optim.SGD([weights], lr=0.1)), unchanged)
    adaptation.sampling_cost = cost = MadeUpCost()
    random = np.random.default_rng(0)
    for gradients in random.normal(size=(250, 2, 100)) / 4 + 1.0:
        local, total = np.square(gradients).sum(1).mean(), np.square(gradients.mean(0)).sum()
        adaptation.noise.tracker.add_norms([local], [total], 32, 2)
    cost.seconds = 0.01
    adaptation.times.step_s[1] = [0.1]
    adaptation._steps_to_review(1000)
    assert adaptation.sampling.every == 34
    adaptation.skipped.note_step(finite=False)
    adaptation._steps_to_review(1000)
    assert adaptation.sampling.every == 4, "whether more steps are bad is to be known soon"
    other = AdaptivePlanner(BatchLimits(32, 32), examples=6400)
    other.load_state_dict(json.loads(json.dumps(adaptation.state_dict())))
    assert other.sampling.state_dict() == adaptation.sampling.state_dict()
    assert other.skipped.state_dict() == {"bad_running": 1}


def test_epochs_are_counted_to_the_nearest_pass() -> None:
    adaptation = AdaptivePlanner(BatchLimits(10, 100), examples=100)
    adaptation.progress = 27.0  # 2.7 epochs in three passes
    assert adaptation.is_enough(3, 3)
    assert not adaptation.is_enough(3, 4)
    assert not adaptation.is_enough(0, 1)


def test_a_rank_that_enters_a_pass_in_its_middle_does_not_end_it() -> None:
    """Nor does one that goes back to the pass before, or a second loop of the same function."""
    there = AdaptivePlanner(BatchLimits(10, 100), examples=100)
    there.progress = 62.0  # 6.2 epochs in six passes, so there is a seventh
    assert not there.is_enough(6, 7)
    there.progress = 68.0
    joins = AdaptivePlanner(BatchLimits(10, 100), examples=100)
    joins.load_state_dict(json.loads(json.dumps(there.state_dict())))
    for rank in there, joins:
        assert not rank.is_enough(6, 7), "they are in it"
        assert rank.is_enough(6, 6), "an earlier loop has ended"
        assert rank.is_enough(7, 7)
        assert not rank.is_enough(6, 7), "a failure repeats the end of the pass before"


@pytest.mark.parametrize("gain", [1.0, 1.3, 2.7, 8.0])
def test_steps_of_a_larger_batch_end_at_the_step_nearest_to_the_progress_asked_for(
    gain: float,
) -> None:
    adaptation, done = AdaptivePlanner(BatchLimits(10, 100), examples=100), 0
    while not adaptation.is_enough(done, 100, "step"):
        done += 1
        adaptation.advance(gain, adaptation.batch_size)
    assert abs(adaptation.progress_in("step") - 100) <= gain / 2
    assert not adaptation.is_enough(0, 1, "step")
    assert adaptation.is_enough(0, 0, "step")
