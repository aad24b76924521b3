"""Lightning's Trainer under ``hvd-elastic run``, ``torchrun`` and Ray Train."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.peers.fit_options import (
    BATCH,
    SAVE_EVERY,
    Rows,
    fit_arguments,
    make_network,
    note_end,
    note_step,
)

args = fit_arguments()


class Module(L.LightningModule):
    """The network, the mean loss of each epoch, and notes of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_network()
        self.of_epochs: dict[int, float] = {}

    def _loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch["inputs"]) - batch["inputs"]).square().mean()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        time.sleep(args.step_time)
        loss = self._loss(batch)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("validation", self._loss(batch), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        note_step(self.trainer.global_step, self.trainer.current_epoch, batch["index"].tolist())

    def on_train_epoch_end(self) -> None:
        self.of_epochs[self.trainer.current_epoch] = float(self.trainer.callback_metrics["loss"])

    def configure_optimizers(self) -> Any:
        optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if args.launcher != "ours":
            optimizer.world_size = torch.distributed.get_world_size  # read by the marks
        return optimizer


share, options = BATCH // args.ranks, dict[str, Any]()
match args.launcher:
    case "ours":
        from hvd_elastic.lightning import ElasticStrategy

        options = {"strategy": ElasticStrategy(as_on=args.ranks)}
    case "torchrun":
        nodes = int(os.environ["GROUP_WORLD_SIZE"])
        options = {"strategy": "ddp", "devices": 1, "num_nodes": nodes}
    case _:
        from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment

        options = {"strategy": RayDDPStrategy(), "plugins": [RayLightningEnvironment()]}
keeping = ModelCheckpoint(args.folder, save_last=True, every_n_train_steps=SAVE_EVERY)
trainer = L.Trainer(
    max_epochs=args.epochs,
    accelerator="cpu",
    precision="64-true",
    callbacks=[keeping],
    logger=False,
    num_sanity_val_steps=0,
    enable_progress_bar=False,
    enable_model_summary=False,
    **options,
)
module = Module()
trainer.fit(
    module,
    DataLoader(Rows(1), share, shuffle=True),
    DataLoader(Rows(2), share),
    ckpt_path=None if args.launcher == "ours" else "last",
)
if trainer.global_rank == 0:
    found = {"loss": module.of_epochs, "validation": float(trainer.callback_metrics["validation"])}
    note_end(args.folder, module.net, found)
