"""What a library's loop is in the middle of goes back with it, and to ranks that join."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="Lightning is not installed: make test-trainers")
pytest.importorskip("transformers", reason="transformers is not installed: make test-trainers")

import lightning as L

from hvd_elastic.lightning.loop_state import LoopState
from hvd_elastic.lightning.results import EvaluationResults, TrainingResults
from hvd_elastic.lightning.sums import Sums
from hvd_elastic.transformers.loop_state import LoopState as TransformersLoopState

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 1)


class Rank:
    def __init__(self) -> None:
        self.model = Model()
        self.trainer: Any = L.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        self.trainer.strategy._lightning_module = self.model
        self.trainer.strategy.slots = {}
        given = {"": self.model}, torch.device("cpu"), lambda rows: rows, lambda: False
        sums = Sums(TrainingResults(), *given)
        self.state = LoopState(self.trainer.fit_loop, sums)


def test_a_rank_that_joins_accumulates_as_a_callback_has_said() -> None:
    """As GradientAccumulationScheduler does where an epoch begins."""
    rank, joined = Rank(), Rank()
    before = rank.state.snapshot()
    rank.trainer.accumulate_grad_batches = 3
    joined.state.load_state_dict(rank.state.state_dict())
    assert joined.trainer.accumulate_grad_batches == 3
    rank.state.roll_back(before)
    assert rank.trainer.accumulate_grad_batches == 1


def test_a_rank_that_joins_knows_which_modules_are_in_eval_mode() -> None:
    rank, joined = Rank(), Rank()
    rank.model.backbone.eval()
    before = rank.state.snapshot()
    joined.state.load_state_dict(rank.state.state_dict())
    for each in (joined.model.backbone, joined.model.backbone[1]):
        assert not each.training
    assert joined.model.training
    assert joined.model.head.training
    rank.model.eval()  # a validation, in which another rank is lost
    rank.state.roll_back(before)
    assert rank.model.head.training
    assert not rank.model.backbone[1].training


def test_a_validation_that_was_cut_leaves_no_loader_set() -> None:
    results: Any = EvaluationResults(training=False)
    results.dataloader_idx, results.batch, results.batch_size = 1, torch.zeros(3), 3
    results.forget_cut()
    results.log("on_train_epoch_start", "late", torch.tensor(1.0))
    assert [*results] == ["on_train_epoch_start.late"]
    assert (results.batch, results.batch_size) == (None, None)


def test_a_value_of_a_step_of_a_validation_is_not_reduced() -> None:
    """The last batch may be that of some ranks only."""
    reduced: list[torch.Tensor] = []

    def reduce(value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        reduced.append(value)
        return value

    for results in (EvaluationResults(training=False), TrainingResults()):
        options: Any = {"on_step": True, "sync_dist": True, "sync_dist_fn": reduce, "batch_size": 1}
        results.log("step", "loss", torch.tensor(1.0), **options)
        assert len(reduced) == results.training


class Counting:
    examples = 0

    def __call__(self, predicted: list[float], compute_result: bool) -> dict[str, float]:
        self.examples += len(predicted)
        return {"examples": self.examples} if compute_result else {}

    def compute(self, predicted: list[float], compute_result: bool) -> dict[str, float]:
        return self(predicted, compute_result)

    @classmethod
    def of_class(cls, predicted: list[float], compute_result: bool) -> dict[str, float]:
        return cls()(predicted, compute_result)


@pytest.mark.parametrize("name", ["itself", "compute", "of_class"])
def test_an_evaluation_that_was_cut_counts_once(name: str) -> None:
    counting: Any = Counting()
    counting.examples = 0
    trainer = SimpleNamespace(
        args=SimpleNamespace(eval_on_start=False),
        callback_handler=SimpleNamespace(callbacks=[]),
        state=SimpleNamespace(log_history=[]),
        control=SimpleNamespace(),
        compute_metrics=counting if name == "itself" else getattr(counting, name),
    )
    state = TransformersLoopState(trainer)
    before = state.snapshot()
    trainer.compute_metrics([1.0, 2.0], compute_result=False)
    state.roll_back(before)
    assert counting.examples == 0
