"""Mixed precision: a scaler beside averages over ranks, passes of a step and measured noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.policy import batch, sampling
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from tests.unit.torch.two_ranks import hand_out

WIDTH = 20


def regression(examples: int, size: float = 1.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(examples, WIDTH, generator=generator)
    truth = torch.randn(WIDTH, 1, generator=generator)
    noise = torch.randn(examples, 1, generator=generator)
    return TensorDataset(inputs, size * (inputs @ truth + noise))


class Trained:
    """A short training on one rank, with a scaler or without one.

    Args:
        data: its examples, 30 in each step.
        accumulation: extra passes of a step.
        scaler: of :class:`hvd.GradScaler`; None for no scaler.
        clip: largest norm of the gradient.
        epochs: passes over the data.
        optimizer: its class, by default SGD with momentum.
    """

    def __init__(
        self,
        data: TensorDataset,
        accumulation: int,
        scaler: hvd.GradScaler | None,
        *,
        clip: float | None = None,
        epochs: int = 4,
        make: Any = None,
    ) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(WIDTH, 1, bias=False)
        if make is None:
            own = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        else:
            own = make(self.model.parameters())
        self.optimizer = hvd.DistributedOptimizer(own, self.model, lr_rule="none")
        loader: Any = hvd.DataLoader(data, 30, shuffle=True, max_batch_size=30)
        self.adaptation: AdaptivePlanner = loader.planner
        self.adaptation.choice.plan = BatchPlan(30, accumulation)
        self.adaptation._choose_plan = lambda *_: ""
        self.scales: dict[int, set[float]] = {}
        """Those of the passes of each step."""

        @hvd.run
        def train(state: hvd.State) -> None:
            for _ in hvd.epochs(epochs):
                for inputs, targets in loader:
                    step = context.current().worker.progress.step
                    self.optimizer.zero_grad()
                    loss = F.mse_loss(self.model(inputs), targets)
                    if scaler is None:
                        loss.backward()
                        self.optimizer.synchronize()  # type: ignore[attr-defined]
                    else:
                        self.scales.setdefault(step, set()).add(scaler.get_scale())
                        scaler.scale(loss).backward()
                        if clip is not None:
                            scaler.unscale_(self.optimizer)
                    if clip is not None:
                        torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
                    if scaler is None:
                        self.optimizer.step()
                    else:
                        scaler.step(self.optimizer)
                        scaler.update()
                    state.commit(loss=loss)

        train(hvd.State(model=self.model, optimizer=self.optimizer))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulation", [0, 2])
def test_a_changing_scale_changes_no_step_and_no_estimate(
    monkeypatch: pytest.MonkeyPatch, accumulation: int, clip: float | None
) -> None:
    # Else a slow machine samples other steps.
    monkeypatch.setattr(batch, "_REVIEW_STEPS", (10, 10))
    monkeypatch.setattr(batch, "_REVIEW_SHARE", math.inf)
    monkeypatch.setattr(sampling, "_LEARNING_SHARE", math.inf)
    found = []
    for scaled in (False, True):
        monkeypatch.setattr(context, "_context", Context(Mode.ALONE, TorchFrontend()))
        scaler = hvd.GradScaler(init_scale=2.0, growth_interval=3) if scaled else None
        found.append(Trained(regression(600), accumulation, scaler, clip=clip))
    without, scaled_too = found
    torch.testing.assert_close(scaled_too.model.weight, without.model.weight)
    assert all(len(scales) == 1 for scales in scaled_too.scales.values())
    assert len(set.union(*scaled_too.scales.values())) > 20, "it grew all the time"
    noise = [one.adaptation.metrics()["noise_scale"] for one in found]
    assert noise[1] == pytest.approx(noise[0], rel=1e-3)
    assert context.current().worker.progress.skipped == 0


@pytest.mark.parametrize(
    "make", [None, lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True)]
)
@pytest.mark.parametrize("accumulation", [0, 2])
def test_a_scale_that_is_too_large_comes_down_and_training_goes_on(
    alone: Context, accumulation: int, make: Any
) -> None:
    """More steps overflow than would end a job without a scaler."""
    scaler = hvd.GradScaler(init_scale=2.0**127)
    trained = Trained(regression(600, 1e4), accumulation, scaler, make=make)
    skipped = alone.worker.progress.skipped
    assert skipped > 10
    assert scaler.get_scale() == 2.0 ** (127 - skipped)
    assert torch.isfinite(trained.model.weight).all()
    made = alone.worker.progress.step
    assert alone.worker.progress.examples == 30 * made, "their examples are used"
    assert trained.adaptation.progress == pytest.approx(made - skipped), "for no progress"


def test_a_loss_that_stays_nan_ends_the_job(alone: Context) -> None:
    data = regression(3000)
    data.tensors[1].fill_(float("nan"))
    with pytest.raises(ScriptError, match="not finite in 50 steps running"):
        Trained(data, 0, hvd.GradScaler())


class TwoRanks(LocalCommunicator):
    """The other rank's scaled gradients are all ``other``; averages are there when waited for."""

    size = 2

    def __init__(self, other: float) -> None:
        self.other = other

    def wait(self, handle: Any) -> Any:
        if isinstance(handle, torch.Tensor):
            handle.add_(self.other).div_(2)
        return handle


@pytest.mark.parametrize("unscale_first", [False, True])
def test_it_looks_at_the_average_of_all_ranks(alone: Context, unscale_first: bool) -> None:
    alone.worker.communicator = engine = TwoRanks(other=24.0)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    scaler = hvd.GradScaler(init_scale=8.0)

    def step() -> float:
        hand_out(alone)
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()  # ours is 8
        if unscale_first:
            scaler.unscale_(optimizer)
            assert model.weight.grad is not None
        scaler.step(optimizer)
        scaler.update()
        return model.weight.item()

    assert step() == -2.0
    engine.other = float("inf")
    assert step() == -2.0
    assert scaler.get_scale() == 4.0, "though this rank's own gradient is finite"
    engine.other = 4.0
    assert step() == -3.0
    assert alone.worker.progress.step == 3


def test_a_disabled_scaler_still_waits_for_the_average_before_clipping(alone: Context) -> None:
    alone.worker.communicator = TwoRanks(other=3.0)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    scaler = hvd.GradScaler(enabled=False)
    hand_out(alone)
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 2.0
    scaler.step(optimizer)
    scaler.update()
    assert alone.worker.progress.step == 1


def test_a_step_that_was_called_off_is_done_again(alone: Context) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    scaler = hvd.GradScaler(init_scale=4.0)
    for called_off in (True, False):
        hand_out(alone)
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        scaler.unscale_(optimizer)
        if called_off:
            alone.step_failed()
    before = model.weight.item()
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.item() == pytest.approx(before - 1.0)


def test_newcomers_and_checkpoints_have_its_scale(alone: Context) -> None:
    scaler = hvd.GradScaler(init_scale=32.0)
    state = hvd.State()
    values = state.content().values["objects"]["_grad_scaler"]
    assert values["scale"] == 32.0
    other = hvd.GradScaler()
    other.load_state_dict(values)
    assert other.get_scale() == scaler.get_scale()


def test_each_of_several_scalers_is_part_of_the_state_once(alone: Context) -> None:
    made = [hvd.GradScaler(init_scale=scale) for scale in (2.0, 4.0, 8.0)]
    objects = hvd.State(discriminator=made[2]).content().values["objects"]
    assert sorted(each["scale"] for each in objects.values()) == [2.0, 4.0, 8.0]
    assert objects["discriminator"]["scale"] == 8.0


def test_checkpoints_of_releases_that_stored_one_scaler_are_resumed(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", told.append)
    first, second = hvd.GradScaler(init_scale=2.0), hvd.GradScaler(init_scale=4.0)
    state = hvd.State(scaler=first)
    assert sorted(state.named_objects()) == ["_grad_scaler1", "scaler"]
    values = {**first.state_dict(), "scale": 64.0}
    rest = {**state._values(), "progress": alone.worker.progress.as_state()}
    state.load({**rest, "objects": {"scaler": values, "_grad_scaler": values}}, "c.json")
    assert (first.get_scale(), second.get_scale()) == (64.0, 4.0)
    (said,) = told
    assert said.startswith("checkpoint c.json has no state of a gradient scaler (_grad_scaler1)")
    with pytest.raises(CheckpointError, match="Resume with the script that wrote it"):
        state.load({**rest, "objects": {"_grad_scaler1": values}}, "c.json")


def test_a_scaler_that_is_made_while_training_runs_is_refused(alone: Context) -> None:
    alone.worker.in_train = True
    with pytest.raises(
        ScriptError, match=r"hvd\.GradScaler\(\) is called in the training function"
    ):
        hvd.GradScaler()


def test_a_body_with_a_scaler_for_each_optimizer_is_done_again(alone: Context) -> None:
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    both = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=1.0), m) for m in models]
    scalers = [hvd.GradScaler(init_scale=4.0) for _ in models]
    before = [model.weight.item() for model in models]
    for called_off in (True, False):
        hand_out(alone)
        for model, optimizer, scaler in zip(models, both, scalers, strict=True):
            scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            scaler.unscale_(optimizer)
        if called_off:
            alone.step_failed()
    for optimizer, scaler in zip(both, scalers, strict=True):
        scaler.step(optimizer)
        scaler.update()
    assert [model.weight.item() for model in models] == pytest.approx([b - 1.0 for b in before])


def test_pytorchs_own_scaler_is_refused_with_a_way_out(alone: Context) -> None:
    with pytest.raises(
        ScriptError, match=r"State\(scaler=\.\.\.\).*hvd_elastic\.torch\.GradScaler"
    ):
        hvd.State(scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_by_pytorchs_own_scaler_is_refused_at_one_rank_too(
    alone: Context, ranks: int, enabled: bool
) -> None:
    if ranks == 2:
        alone.worker.communicator = TwoRanks(other=3.0)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    hand_out(alone)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    if not enabled:
        scaler.step(optimizer)
        return
    with pytest.raises(ScriptError, match=r"use hvd\.GradScaler\(\)"):
        scaler.step(optimizer)
