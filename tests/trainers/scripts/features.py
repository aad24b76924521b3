"""What a Trainer can do, each alone: arguments: folder, name of the feature."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn, utils
from torchmetrics import MaxMetric
from torchmetrics.regression import R2Score, SpearmanCorrCoef

from hvd_elastic.lightning import ElasticStrategy

FOLDER, FEATURE = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
torch.set_num_threads(1)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16) if FEATURE == "batch_norm" else nn.Identity()
        self.net = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 1))
        self.noticed: list[float] = []
        self.validated = nn.ModuleDict({"r2": R2Score(), "spearman": SpearmanCorrCoef()})

    def step(self, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.step(batch), prog_bar=True)
        predicted, targets = self.net(batch[0]).flatten(), batch[1].flatten()
        for metric in self.validated.values():
            metric.update(predicted, targets)

    def on_validation_epoch_start(self):
        for metric in self.validated.values():  # it has values after the sanity check too
            metric.reset()

    def on_validation_epoch_end(self):
        for name, metric in self.validated.items():
            self.log(name, metric.compute())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.step(batch))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def on_before_optimizer_step(self, optimizer):
        self.noticed.append(float(self.net[0].weight.grad.norm()))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if FEATURE == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
            return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": by_epoch, "interval": "epoch"},
        }


class Watching(Callback):
    def __init__(self) -> None:
        self.largest = MaxMetric()

    def on_validation_start(self, trainer, module):
        self.largest.reset()

    def on_validation_batch_end(self, trainer, module, outputs, batch, *_):
        self.largest.update(batch[0])

    def on_validation_epoch_end(self, trainer, module):
        module.log("largest", self.largest.compute())


def data(number: int, seed: int) -> utils.data.Dataset:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, 8, generator=random)
    return utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


options: dict = {"max_epochs": 4, "precision": "64-true", "logger": False}
callbacks: list = []
watching = Watching()
strategy: dict = {}
validation: object = utils.data.DataLoader(data(50, 2), batch_size=8)
match FEATURE:
    case "bf16":
        options["precision"] = "bf16-mixed"
    case "scaler":
        del options["precision"]
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 64.0))]
    case "accumulate":
        callbacks = [GradientAccumulationScheduler({0: 1, 2: 3})]
        options |= {"gradient_clip_val": 0.3, "gradient_clip_algorithm": "value"}
    case "checkpoints":
        callbacks = [
            ModelCheckpoint(FOLDER, "{step}", every_n_train_steps=7, save_top_k=-1, save_last=True),
            ModelCheckpoint(FOLDER, "best-{epoch}", monitor="train_loss_epoch", save_top_k=1),
        ]
    case "stopping":
        callbacks = [EarlyStopping("val_loss", patience=1, min_delta=0.3)]
        options |= {"max_epochs": 30, "check_val_every_n_epoch": 2}
    case "steps":
        options |= {"max_epochs": -1, "max_steps": 23, "val_check_interval": 5}
        options["check_val_every_n_epoch"] = None
    case "fast_dev_run":
        options = {"fast_dev_run": 3, "precision": "64-true"}
    case "loaders":
        validation = [validation, utils.data.DataLoader(data(9, 3), batch_size=4)]
    case "as_on":
        strategy = {"as_on": 2}
    case "batch_norm":
        options["sync_batchnorm"] = True
    case "loggers":
        options["logger"] = [CSVLogger(FOLDER), TensorBoardLogger(FOLDER)]
        options["log_every_n_steps"] = 3
        callbacks = [TQDMProgressBar()]
    case "adaptive":
        strategy = {"max_batch_size": 64}

training = utils.data.DataLoader(data(200, 1), batch_size=16, shuffle=True)
model = Model()
trainer = L.Trainer(
    strategy=ElasticStrategy(**strategy),
    accelerator="cpu",
    enable_progress_bar=FEATURE == "loggers",
    enable_model_summary=False,
    enable_checkpointing=FEATURE == "checkpoints",
    callbacks=[*callbacks, watching],
    **options,
)
trainer.fit(model, training, validation)
metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
tested = trainer.test(model, utils.data.DataLoader(data(20, 4), batch_size=8), verbose=False)
predicted = trainer.predict(model, utils.data.DataLoader(data(20, 4), batch_size=8))
if trainer.global_rank == 0:
    found = {
        "weights": {name: value.double().tolist() for name, value in model.state_dict().items()},
        "step": trainer.fit_loop.epoch_loop.global_step,
        "epoch": trainer.fit_loop.epoch_progress.current.completed,
        "metrics": metrics,
        "noticed": model.noticed,
        "tested": tested,
        "predicted": [each.tolist() for each in predicted],
        "files": sorted(path.name for path in FOLDER.glob("*.ckpt")),
    }
    (FOLDER / "end.json").write_text(json.dumps(found))
