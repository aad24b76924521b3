"""Sums over an epoch begin anew with it, on a rank that joins there too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="Lightning is not installed: make test-trainers")

from torchmetrics import CatMetric, MeanMetric, Metric

from hvd_elastic.communicator.interface import GenerationBrokenError
from hvd_elastic.errors import ScriptError
from hvd_elastic.lightning.loop import _metrics
from hvd_elastic.lightning.results import EvaluationResults, TrainingResults, names_code
from hvd_elastic.lightning.sums import Sums
from hvd_elastic.worker import context

CPU = torch.device("cpu")


class Ring:
    """Of two ranks, of which the other one adds nothing, or what it has begun too."""

    size = 2

    def __init__(self) -> None:
        self.begun: list[torch.Tensor] = []

    def sum_async(self, values: torch.Tensor, name: str) -> torch.Tensor:
        self.begun.append(values)
        return values

    def wait(self, values: torch.Tensor) -> torch.Tensor:
        if len({each.shape for each in self.begun}) > 1:
            raise ScriptError("what the ranks exchange does not fit together")
        return torch.stack(self.begun).sum(0)


@pytest.fixture(autouse=True)
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    made = Ring()
    progress = SimpleNamespace(step=3)
    ctx = SimpleNamespace(worker=SimpleNamespace(communicator=made, progress=progress))
    monkeypatch.setattr("hvd_elastic.worker.context.current", lambda: ctx)
    return made


def unchanged(value: Any, *_: Any, **__: Any) -> Any:
    return value


def add_up(*ranks: Rank) -> None:
    for rank in ranks:
        rank.sums.begin_sum()
    for rank in ranks:
        rank.sums.finish_sum()
    communicator: Any = context.current().worker.communicator
    communicator.begun.clear()


def log(results: Any, name: str, value: float, fx: str = "training_step", **more: Any) -> None:
    given = {"on_step": False, "on_epoch": True, "batch_size": 1, "sync_dist_fn": unchanged}
    results.log(fx, name, torch.tensor(value), **(given | more))


class Rank:
    def __init__(self) -> None:
        self.results, self.module = TrainingResults(), nn.Module()
        self.mean = self.module.mean = MeanMetric()
        self.sums = Sums(self.results, {"": self.module}, CPU, lambda rows: rows, lambda: False)

    def step(self, *values: float) -> None:
        for value in values:
            log(self.results, "loss", value)
            self.mean(value)
        add_up(self)

    def epoch_ends(self) -> None:
        self.results.reset()
        self.mean.reset()

    def means(self) -> Any:
        logged = self.results["training_step.loss"]
        assert float(self.mean.compute()) == pytest.approx(float(logged.compute()))
        return float(logged.compute())


def test_a_rank_that_joins_between_two_epochs_begins_anew() -> None:
    rank, joined = Rank(), Rank()
    rank.step(5.0)
    rank.epoch_ends()
    joined.sums.load_state_dict(rank.sums.state_dict(), unchanged)
    joined.step(1.0, 3.0)
    assert joined.means() == 2.0


def test_a_rank_that_joins_before_the_end_of_an_epoch_goes_on_and_begins_anew() -> None:
    rank, joined = Rank(), Rank()
    for value in (1.0, 2.0):
        rank.step(value, value)
    joined.sums.load_state_dict(rank.sums.state_dict(), unchanged)
    assert joined.means() == 1.5
    joined.epoch_ends()
    joined.step(1.0, 4.0)
    assert joined.means() == 2.5


def test_what_is_not_logged_in_the_first_step_of_an_epoch_begins_anew() -> None:
    rank = Rank()
    rank.step(5.0)
    rank.epoch_ends()
    rank.step()
    rank.step(1.0, 3.0)
    assert rank.means() == 2.0


@pytest.mark.parametrize("others", [("loss_b",), ("loss_a", "loss_b"), ()])
def test_other_names_on_another_rank_are_an_error(others: tuple[str, ...]) -> None:
    one, other = Rank(), Rank()
    for value in (1.0, 2.0):  # the names of the second step are those of the first
        for rank in (one, other):
            log(rank.results, "loss_a", value)
        add_up(one, other)
    assert float(one.results["training_step.loss_a"].compute()) == 1.5
    context.current().worker.progress.step = 4  # a step in which ranks without any take part
    for rank in (one, other):
        rank.results.reset()
    log(one.results, "loss_a", 1.0)
    for name in others:
        log(other.results, name, 2.0)
    with pytest.raises(ScriptError, match=r"metrics: this one has 'loss_[ab]' where .*=0\)"):
        add_up(one, other)


def test_an_empty_value_stands_for_a_metric_that_a_rank_lacks() -> None:
    one, other = Rank(), Rank()
    log(one.results, "loss_a", 3.0)
    log(other.results, "loss_a", 0.0, batch_size=0)
    add_up(one, other)
    for rank in (one, other):
        assert float(rank.results["training_step.loss_a"].compute()) == 3.0


@pytest.mark.parametrize("other", ["loss_a", "loss_b"])
def test_other_names_in_a_validation_are_an_error(other: str) -> None:
    def reduce(value: torch.Tensor, *_: Any, reduce_op: Any = None, **__: Any) -> torch.Tensor:
        return value + names_code([f"validation_step.{other}"]) if reduce_op == "sum" else value

    results = EvaluationResults(training=False)
    log(results, "loss_a", 4.0, fx="validation_step", sync_dist_fn=reduce)
    if other == "loss_a":
        assert float(results.metrics(on_step=False)["log"]["loss_a"]) == 4.0
    else:
        with pytest.raises(ScriptError, match=r"this one has 'loss_a' where another rank has"):
            results.metrics(on_step=False)


def test_a_validation_whose_reduction_was_cut_can_be_repeated() -> None:
    def cut(*_: Any, **__: Any) -> torch.Tensor:
        raise GenerationBrokenError("a rank has died")

    results = EvaluationResults(training=False)
    log(results, "loss", 4.0, fx="validation_step", sync_dist_fn=cut)
    with pytest.raises(GenerationBrokenError):
        results.metrics(on_step=False)
    results.reset()
    log(results, "loss", 2.0, fx="validation_step", sync_dist_fn=cut)


def test_values_of_an_epoch_are_reduced_in_the_order_of_their_names() -> None:
    reduced: list[float] = []

    def reduce(value: torch.Tensor, *_: Any, reduce_op: Any = None, **__: Any) -> torch.Tensor:
        if reduce_op != "sum":
            reduced.append(float(value))
        return value

    results = EvaluationResults(training=False)
    for name, value in (("late", 2.0), ("early", 1.0)):
        log(results, name, value, reduce_fx="max", sync_dist_fn=reduce)
    assert list(results.metrics(on_step=False)["log"]) == ["late", "early"]
    assert reduced == [1.0, 2.0]


def test_metrics_that_are_gathered_belong_together() -> None:
    module, accuracy = nn.Module(), MeanMetric()
    module.accuracy = accuracy
    rows: list[torch.Tensor] = []

    def gather(own: torch.Tensor) -> torch.Tensor:
        """As of two ranks, the other of which has another metric of a name as long."""
        rows.append(own)
        if own.dtype is not torch.uint8:
            return torch.cat([own, own])
        other = own.numpy().tobytes().replace(b"accuracy", b"accurate")
        return torch.cat([own, torch.frombuffer(bytearray(other), dtype=torch.uint8)])

    sums = Sums(TrainingResults(), {"": module}, CPU, gather, lambda: True)
    with sums.whole():
        accuracy.update(1.0)
        with pytest.raises(ScriptError, match="this one has 'accuracy' where another rank has"):
            accuracy.compute()
    assert len(rows) == 2


class Validating(nn.Module):
    """A module whose metric was updated before training began, as in the sanity check."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.metric = metric
        metric.update(1.0)

    def sums(self) -> Sums:
        return Sums(TrainingResults(), {"": self}, CPU, lambda rows: rows, lambda: True)


@pytest.mark.parametrize("validates", [False, True])
def test_a_metric_of_a_validation_is_not_of_training(ring: Ring, validates: bool) -> None:
    """Of a rank that joins it is empty."""
    module, other = Validating(MeanMetric()), Validating(MeanMetric())
    root, joined = module.sums(), other.sums()
    if validates:
        with root.whole():
            module.metric.reset()
            module.metric.update(2.0)
    snapshot = root.snapshot()
    joined.load_state_dict(root.state_dict(), unchanged)
    root.begin_sum()
    joined.begin_sum()
    assert not ring.begun
    root.roll_back(snapshot)
    root.begin_sum()
    assert not ring.begun
    module.metric.reset()
    module.metric.update(5.0)
    root.begin_sum()
    assert ring.begun, "that of training is"


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("metric", [MeanMetric, CatMetric])
def test_a_metric_that_a_validation_resets_is_joined_over_the_ranks(
    metric: type[Metric], trained: bool
) -> None:
    module = Validating(metric())
    sums = module.sums()
    if trained:
        module.metric.update(7.0)
    with sums.whole():
        assert sums._is_gathered(module.metric) is not trained
        module.metric.reset()
        module.metric.update(3.0)
        assert sums._is_gathered(module.metric)
        module.metric(4.0)
        assert sums._is_gathered(module.metric)
    assert not sums._is_gathered(module.metric)
    assert module.metric.compute().sum() == (3.5 if metric is MeanMetric else 7.0)


def test_a_metric_that_continues_in_a_validation_is_of_training(ring: Ring) -> None:
    module = Validating(MeanMetric())
    sums = module.sums()
    module.metric.update(7.0)
    with sums.whole():
        module.metric.update(3.0)
    ring.begun.clear()
    sums.begin_sum()
    assert ring.begun


def test_a_rank_that_joined_does_not_keep_what_the_others_had(monkeypatch: Any) -> None:
    """Else it would count twice where the epoch's next part ends."""
    module, metric = nn.Module(), CatMetric()
    module.metric = metric
    sums = Sums(TrainingResults(), {"": module}, CPU, lambda rows: rows, lambda: True)
    other = {"metric": {"value": [torch.tensor([4.0])]}}
    monkeypatch.setattr(sums, "_gathered", lambda name, own: [own, other])
    with sums.whole():
        assert metric.compute() == 4.0
    assert not metric._update_count
    assert not metric.value


def test_a_metric_of_a_callback_is_one_of_all_ranks(ring: Ring) -> None:
    callback, metric = SimpleNamespace(number=1), MeanMetric()
    callback.mean = metric
    found = _metrics([SimpleNamespace(), callback])
    assert found == {"1.SimpleNamespace.mean": metric}
    sums = Sums(TrainingResults(), {"": nn.Module()} | found, CPU, lambda rows: rows, lambda: True)
    with sums.whole():
        metric.update(2.0)
        assert sums._is_gathered(metric)
    metric.reset()
    metric.update(3.0)
    sums.begin_sum()
    assert ring.begun
