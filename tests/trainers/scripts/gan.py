"""A GAN in the form of Lightning's example: manual optimisation, two optimizers; argument: folder.

The environment variable KILLS is a list of [place, epoch, rank], as in autoencoder.py.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import lightning as L
import torch
from killing import may_die, pending
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn, utils
from torchmetrics import MeanMetric, Metric

from hvd_elastic.lightning import ElasticStrategy

FOLDER = Path(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)


class Largest(Metric):
    """Of which no sum over the ranks could be made: the largest values of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.zeros(()), dist_reduce_fx="max")

    def update(self, values: torch.Tensor) -> None:
        self.largest = torch.maximum(self.largest, values.max())

    def compute(self) -> torch.Tensor:
        return self.largest


class GAN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        self.real_score = MeanMetric()
        self.largest = Largest()
        self.of_epochs: list[float] = []
        self.norms = 0.0

    def training_step(self, batch, batch_idx):
        real, noise = batch
        if pending() and self.trainer.world_size == 1:
            time.sleep(1.0)
        first, second = self.optimizers()
        ones = torch.ones(len(real), 1)
        entropy = nn.functional.binary_cross_entropy_with_logits

        self.toggle_optimizer(second)
        score = self.discriminator(real)
        real_loss = entropy(score, ones)
        fake_loss = entropy(self.discriminator(self.generator(noise).detach()), 0 * ones)
        second.zero_grad()
        self.manual_backward(real_loss)
        self.manual_backward(fake_loss)
        self.clip_gradients(second, 0.1, "norm")
        second.step()
        self.untoggle_optimizer(second)
        if batch_idx == 2:
            may_die(self.trainer, "between the steps")

        self.toggle_optimizer(first)
        loss = entropy(self.discriminator(self.generator(noise)), ones)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        if batch_idx == 3:
            may_die(self.trainer, "after the steps")
        self.lr_schedulers().step()

        self.real_score(score.detach())
        self.largest.update(score.detach())
        self.log("real_score", self.real_score, on_step=False, on_epoch=True)
        self.log_dict({"g_loss": loss, "d_loss": real_loss + fake_loss}, on_epoch=True)

    def on_before_optimizer_step(self, optimizer):
        (group,) = optimizer.param_groups
        self.norms += sum(float(each.grad.norm()) for each in group["params"])

    def on_train_epoch_end(self):
        self.of_epochs.append(float(self.largest.compute()))
        self.largest.reset()

    def configure_optimizers(self):
        first = torch.optim.Adam(self.generator.parameters(), lr=2e-3)
        second = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 30, 0.5)]


class Data(L.LightningDataModule):
    def prepare_data(self):
        with (FOLDER / "prepared").open("a") as file:
            file.write("x")

    def setup(self, stage):
        random = torch.Generator().manual_seed(1)
        noise = torch.randn(240, 8, generator=random)
        real = torch.randn(240, 4, generator=random) * 0.5 + 2
        self.data = utils.data.TensorDataset(real, noise)

    def train_dataloader(self):
        return utils.data.DataLoader(self.data, batch_size=20, shuffle=True)


gan = GAN()
logger = CSVLogger(FOLDER / "logs")
trainer = L.Trainer(
    max_epochs=8,
    strategy=ElasticStrategy(),
    accelerator="cpu",
    logger=logger,
    callbacks=[LearningRateMonitor("step")],
    log_every_n_steps=5,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(gan, datamodule=Data())
if trainer.global_rank == 0:
    found = {
        "weights": {name: value.tolist() for name, value in gan.state_dict().items()},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "rate": trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
        "metrics": {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not name.endswith("step") and name not in ("g_loss", "d_loss")
        },
        "largest": gan.of_epochs,
        "norms": gan.norms,
    }
    (FOLDER / "end.json").write_text(json.dumps(found))
