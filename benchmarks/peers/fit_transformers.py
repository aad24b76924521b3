"""Hugging Face's Trainer under ``hvd-elastic run``, ``torchrun`` and Ray Train."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

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


class Model(nn.Module):
    """The network; keeps the examples of a step, of all its passes, for the notes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_network()
        self.indices: list[int] = []

    def forward(self, inputs: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        if self.training:
            time.sleep(args.step_time)
            self.indices += index.tolist()
        return {"loss": (self.net(inputs) - inputs).square().mean()}


class Notes(TrainerCallback):
    """Notes each step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        model.indices.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        note_step(state.global_step, math.ceil(state.epoch - 1e-9) - 1, model.indices)


model, options = Model(), dict[str, Any]()
optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
kind: Any = Trainer
if args.launcher == "ours":
    import hvd_elastic.transformers

    kind, options = hvd_elastic.transformers.Trainer, {"as_on": args.ranks}
else:
    optimizer.world_size = torch.distributed.get_world_size  # read by the marks
trainer = kind(
    model=model,
    args=TrainingArguments(
        output_dir=str(args.folder),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=BATCH // args.ranks,
        per_device_eval_batch_size=BATCH // args.ranks,
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["inputs"],  # so that an evaluation has a loss
        use_cpu=True,
    ),
    train_dataset=Rows(1),
    eval_dataset=Rows(2),
    optimizers=(optimizer, None),
    callbacks=[Notes()],
    **options,
)
last = None if args.launcher == "ours" else get_last_checkpoint(str(args.folder))
trainer.train(resume_from_checkpoint=last)
if trainer.is_world_process_zero():
    logged = trainer.state.log_history
    losses = {round(each["epoch"]) - 1: each["loss"] for each in logged if "loss" in each}
    validation = [each["eval_loss"] for each in logged if "eval_loss" in each][-1]
    note_end(args.folder, model.net, {"loss": losses, "validation": validation})
