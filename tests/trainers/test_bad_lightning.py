"""What a script of Lightning cannot use is one clear error before training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, utils

pytest.importorskip("lightning", reason="Lightning is not installed: make test-trainers")

import lightning as L
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import FSDPPrecision

import hvd_elastic.torch as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(L.LightningModule):
    def __init__(self, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.1)


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1e-3)
        optimizer.step()


class Stream(utils.data.IterableDataset[Any]):
    def __iter__(self):
        return iter(torch.zeros(40, 1, 4))


class Averaging(callbacks.Callback):
    def on_train_start(self, trainer, module):
        self.average = torch.optim.swa_utils.AveragedModel(module.net)


class Idle(Model):
    def configure_optimizers(self):
        return None


class Backbone(Model):
    @property
    def backbone(self):
        return self.net


class Skipping(Model):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 else None


DATA = utils.data.TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))


def loader(**options: Any) -> Any:
    return utils.data.DataLoader(DATA, batch_size=4, **options)


def fit(
    model: Any = None, data: Any = None, strategy: dict[str, Any] | None = None, **options: Any
) -> Any:
    from hvd_elastic.lightning import ElasticStrategy

    arguments = {"max_epochs": 1, "logger": False, "enable_checkpointing": False} | options
    checkpoint = arguments.pop("ckpt_path", None)
    trainer = L.Trainer(
        strategy=ElasticStrategy(**(strategy or {})),
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(
        model or Model(), loader() if data is None else data, loader(), ckpt_path=checkpoint
    )
    return trainer


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Context:
    made = Context(Mode.ALONE, TorchFrontend())
    monkeypatch.setattr(context, "_context", made)
    return made


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "several loaders": (lambda: {"data": [loader(), loader()]}, "a list of 2 loaders"),
    "stream": (
        lambda: {"data": utils.data.DataLoader(Stream(), batch_size=4)},
        "reads a Stream, an IterableDataset",
    ),
    "sampler": (
        lambda: {"data": loader(sampler=utils.data.WeightedRandomSampler([1.0] * 40, 40))},
        r"has a WeightedRandomSampler: .*order=",
    ),
    "no loader": (lambda: {"data": [1, 2]}, "a list"),
    "limit": (lambda: {"limit_train_batches": 3}, r"limit_train_batches=\.\.\.\): .*Subset"),
    "overfit": (lambda: {"overfit_batches": 3}, r"overfit_batches=\.\.\.\): .*Subset"),
    "group": (
        lambda: {"val_check_interval": 3, "accumulate_grad_batches": 2},
        "after 3 batches would come between the batches of one step. .*, such as 2",
    ),
    "scheduled group": (
        lambda: {
            "val_check_interval": 3,
            "callbacks": callbacks.GradientAccumulationScheduler({2: 3, 4: 2}),
        },
        "after 3 batches would come between the batches of one step. .*, such as 2",
    ),
    "time": (lambda: {"val_check_interval": "00:00:01:00"}, "as a time: the ranks' clocks differ"),
    "reload": (lambda: {"reload_dataloaders_every_n_epochs": 1}, "so there is one loader"),
    "LBFGS": (lambda: {"model": Model(torch.optim.LBFGS)}, r"closure \(LBFGS\) cannot be used"),
    "file": (lambda: {"ckpt_path": "last.ckpt"}, r"ckpt_path='.*last\.ckpt'\): .*run --resume"),
    "averaging": (
        lambda: {"callbacks": callbacks.StochasticWeightAveraging(1e-2)},
        "callback StochasticWeightAveraging: it changes the loop",
    ),
    "finder": (
        lambda: {"callbacks": callbacks.LearningRateFinder()},
        "callback LearningRateFinder: it trains before training",
    ),
    "sharded": (
        lambda: {"plugins": [FSDPPrecision("bf16-mixed")]},
        r"plugins=FSDPPrecision\(\.\.\.\)\) is for sharded models",
    ),
    "no optimizer": (lambda: {"model": Idle()}, "returns no optimizer"),
    "finetuning": (
        lambda: {"model": Backbone(), "callbacks": callbacks.BackboneFinetuning(2)},
        "callback BaseFinetuning: it gives the optimizer parameters while it trains",
    ),
    "pruning": (
        lambda: {"callbacks": callbacks.ModelPruning("l1_unstructured", amount=0.5)},
        "callback ModelPruning: it changes which parameters",
    ),
    "late": (
        lambda: {"callbacks": Averaging()},
        r"Averaging\.average, a AveragedModel, is made when training begins",
    ),
    "clipped": (
        lambda: {"model": Manual()},
        r"'net\.weight' was changed .* call optimizer\.synchronize\(\)",
    ),
    "rest of the epoch": (lambda: {"model": Skipping()}, "has returned -1, to leave out the rest"),
    "adaptive": (
        lambda: {"strategy": {"max_batch_size": 16}, "accumulate_grad_batches": 2},
        "the batch adapts, and the number of passes of a step with it",
    ),
    "adaptive, scheduled": (
        lambda: {
            "strategy": {"max_batch_size": 16},
            "callbacks": callbacks.GradientAccumulationScheduler({1: 2}),
        },
        "the batch adapts, and the number of passes of a step with it",
    ),
    "adaptive validation": (
        lambda: {"strategy": {"max_batch_size": 16}, "val_check_interval": 3},
        "how many batches an epoch has changes",
    ),
    "as_on": (lambda: {"strategy": {"as_on": 0}}, r"ElasticStrategy\(as_on=0\): it must be"),
    "twice": (
        lambda: {"strategy": {"as_on": 2}, "data": hvd.DataLoader(DATA, 4)},
        r"is an hvd\.DataLoader already",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_explained(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(ScriptError, match=message):
        fit(**make())


def test_a_second_fit_is_explained() -> None:
    trainer = fit()
    with pytest.raises(ScriptError, match=r"trainer\.fit\(\) is called a second time"):
        trainer.fit(Model(), loader())


def test_devices_and_nodes_are_said_not_to_be_used(caplog: pytest.LogCaptureFixture) -> None:
    trainer = fit(devices=4, num_nodes=2)
    assert trainer.global_step == 10
    assert "Trainer(devices=4, num_nodes=2) is not used" in caplog.text


def test_the_trainer_of_the_other_package_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_lightning", L)
    fit()
    assert "For that of pytorch_lightning, import it before hvd_elastic.lightning" in caplog.text


def test_another_release_is_refused_with_those_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvd_elastic.lightning.library import check_version

    for version in ("2.4.0", "2.7.0rc1"):
        monkeypatch.setattr("lightning.pytorch.__version__", version)
        with pytest.raises(
            ScriptError, match=f"Lightning {version} is installed, .*lightning>=2.5,<2.7"
        ):
            check_version()


def test_a_release_with_other_loops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvd_elastic.lightning.library import check_version

    monkeypatch.setattr("lightning.pytorch.loops.fit_loop._FitLoop.reset", lambda self, mode: None)
    with pytest.raises(
        ScriptError, match=r"another loops\.fit_loop\._FitLoop\.reset than .*, reset\(\); run: "
    ):
        check_version()


def test_an_order_of_the_scripts_own_trains() -> None:
    ours: Any = hvd.DataLoader(DATA, 4, order=lambda epoch: list(range(20)))
    assert fit(data=ours).global_step == 5
