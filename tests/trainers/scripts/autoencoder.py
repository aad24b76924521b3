"""The first example of Lightning, an autoencoder, on random pictures; argument: folder.

Of its own it has what dies: the environment variable KILLS is a list of [place, epoch, rank], and
the first rank that comes to such a place ends there, once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import lightning as L
import torch
from killing import may_die, pending
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import nn, optim, utils

from hvd_elastic.lightning import ElasticStrategy

FOLDER = Path(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)


class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.steps_seen = 0
        self.outputs: list[tuple[torch.Tensor, int]] = []
        self.validated: dict[int, list[int]] = defaultdict(list)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        self.steps_seen += 1
        if (pending() and self.trainer.world_size == 1) or "SLOW" in os.environ:
            time.sleep(float(os.environ.get("SLOW", "1.5")))
        if batch_idx == 3:
            may_die(self.trainer, "before the step")
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("total", loss.detach() * len(x), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 4:
            may_die(self.trainer, "after the step")

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        if batch_idx == 1:
            may_die(self.trainer, "validation")
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.outputs.append((loss, len(x)))
        self.log("val_loss", loss, on_epoch=True)

    def on_validation_epoch_end(self):
        seen = self.all_gather(torch.tensor(sum(number for _, number in self.outputs)))
        self.validated[self.trainer.current_epoch].append(int(seen.sum()))
        self.outputs.clear()

    def on_train_epoch_end(self):
        may_die(self.trainer, "end of the epoch")

    def on_save_checkpoint(self, checkpoint):
        may_die(self.trainer, "saving")

    def configure_optimizers(self):
        optimizer = optim.Adam(self.parameters(), lr=1e-3)
        by_step = optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}]


class Averaging(Callback):
    """Keeps an average of the weights, as users write it."""

    def on_fit_start(self, trainer, module) -> None:
        self.average = optim.swa_utils.AveragedModel(module.encoder)

    def on_train_batch_end(self, trainer, module, *_) -> None:
        self.average.update_parameters(module.encoder)


class Exchanging(Callback):
    """Validates other weights than those that are trained, as users write it."""

    def on_validation_start(self, trainer, module) -> None:
        for parameter in module.parameters():
            parameter.data.mul_(0.5)

    def on_validation_end(self, trainer, module) -> None:
        for parameter in module.parameters():
            parameter.data.mul_(2.0)


class Remembering(Callback):
    """A callback as users write them, with plain attributes."""

    def __init__(self) -> None:
        self.batches = 0
        self.of_epochs: list[float] = []
        self.of_validations: list[float] = []

    def on_train_batch_end(self, *_) -> None:
        self.batches += 1

    def on_train_epoch_end(self, trainer, module) -> None:
        self.of_epochs.append(float(trainer.callback_metrics["train_loss_epoch"]))

    def on_validation_epoch_end(self, trainer, module) -> None:
        if not trainer.sanity_checking:
            self.of_validations.append(float(trainer.callback_metrics["val_loss"]))


def pictures(number: int, seed: int) -> utils.data.Dataset:
    made = torch.rand(number, 64, generator=torch.Generator().manual_seed(seed))
    return utils.data.TensorDataset(made)


encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 64))
autoencoder = LitAutoEncoder(encoder, decoder)
train_loader = utils.data.DataLoader(pictures(300, 1), batch_size=16, shuffle=True)
val_loader = utils.data.DataLoader(pictures(131, 2), batch_size=32)
remembering, averaging = Remembering(), Averaging()
trainer = L.Trainer(
    max_epochs=int(os.environ.get("EPOCHS", "8")),
    strategy=ElasticStrategy(),
    accelerator="cpu",
    precision="64-true",
    gradient_clip_val=0.5,
    val_check_interval=0.5,
    accumulate_grad_batches=int(os.environ.get("ACCUMULATE", "1")),
    callbacks=[
        EarlyStopping("val_loss", patience=50),
        ModelCheckpoint(FOLDER / "best", monitor="val_loss", save_top_k=2),
        remembering,
        averaging,
        *([Exchanging()] if "EXCHANGE" in os.environ else []),
    ],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(autoencoder, train_loader, val_loader)
if trainer.global_rank == 0:
    stopping, best = trainer.early_stopping_callback, trainer.checkpoint_callback
    found = {
        "weights": {name: value.tolist() for name, value in autoencoder.state_dict().items()},
        "average": {key: each.tolist() for key, each in averaging.average.state_dict().items()},
        "validated": list(autoencoder.validated.values()),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "rate": trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
        "steps seen": autoencoder.steps_seen,
        "metrics": {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not name.endswith("_step")  # that of rank 0's share
        },
        "remembered": [
            getattr(remembering, name) for name in ("batches", "of_epochs", "of_validations")
        ],
        "stopping": [stopping.wait_count, float(stopping.best_score)],
        "best": [Path(best.best_model_path).name, float(best.best_model_score)],
    }
    (FOLDER / "end.json").write_text(json.dumps(found))
