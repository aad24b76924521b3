"""Train a small convolutional network on handwritten digits with Lightning, elastically."""

import argparse
import time
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from hvd_elastic.lightning import ElasticStrategy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", type=Path, required=True, help="folder of datasets_prep/digits.py")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--step-time", type=float, default=0.0, help="seconds to add to each step")
args = parser.parse_args()


class Digits(L.LightningDataModule):
    def load(self, name):
        with np.load(args.data / f"{name}.npz") as arrays:
            return TensorDataset(*(torch.from_numpy(arrays[key]) for key in ("images", "labels")))

    def setup(self, stage):
        seeded = torch.Generator().manual_seed(0)  # all workers split alike
        self.train, self.val = random_split(self.load("train"), [0.9, 0.1], seeded)

    def train_dataloader(self):
        return DataLoader(self.train, args.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, args.batch_size)

    def test_dataloader(self):
        return DataLoader(self.load("test"), args.batch_size)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        time.sleep(args.step_time)  # stands for a larger model
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("test_accuracy", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), args.lr, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


L.seed_everything(0)
model, data = Classifier(), Digits()
trainer = L.Trainer(
    strategy=ElasticStrategy(),
    max_epochs=args.epochs,
    callbacks=[
        EarlyStopping("val_accuracy", mode="max", patience=5),
        ModelCheckpoint(monitor="val_accuracy", mode="max"),
    ],
    log_every_n_steps=10,
)
trainer.fit(model, data)
(found,) = trainer.test(model, data, verbose=False)
if trainer.is_global_zero:
    print(f"test accuracy {found['test_accuracy']:.4f}")
