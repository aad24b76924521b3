"""A causal language model, in the shape of run_clm, on random tokens; argument: folder.

Of its own it has what dies: the environment variable KILLS is a list of [place, epoch, rank], and
the first rank that comes to such a place ends there, once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from killing import may_die_in_epoch, wait_for_the_next_to_die
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)

from hvd_elastic.transformers import Trainer

FOLDER = Path(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
WORDS = 61


class Ours(Trainer):
    def may_die(self, place, before=lambda: None):
        if self.is_in_train:
            may_die_in_epoch(int(self.state.epoch), place, before)

    def create_optimizer(self, *_):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), self.args.learning_rate)
        return self.optimizer

    def compute_loss(self, model, inputs, **options):
        if model.training and (self.state.global_step % 10 == 3):
            self.may_die("before the step")
        elif not model.training:
            self.may_die("evaluation")
        return super().compute_loss(model, inputs, **options)

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        self.may_die("saving", lambda: shutil.rmtree(self.args.output_dir))  # its disk too


class Remembering(TrainerCallback):
    """A callback as users write them, with plain attributes."""

    def __init__(self) -> None:
        self.trainer: Ours | None = None
        self.steps = 0
        self.losses: list[float] = []

    def on_train_begin(self, args, state, control, **_):
        self.steps = 0

    def on_step_begin(self, args, state, control, **_):
        wait_for_the_next_to_die()
        time.sleep(float(os.environ.get("SLOW", "0")))

    def on_step_end(self, args, state, control, **_):
        self.steps += 1
        if state.global_step % 10 == 4:
            self.trainer.may_die("after the step")

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def on_epoch_end(self, args, state, control, **_):
        self.trainer.may_die("end of the epoch")


def texts(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Tokens of which only the first, another number in each, are learnt."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(number):
        tokens = torch.randint(0, WORDS, (12,), generator=generator)
        labels = tokens.clone()
        labels[int(torch.randint(3, 13, (1,), generator=generator)) :] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def main() -> None:
    config = GPT2Config(vocab_size=WORDS, n_positions=12, n_embd=16, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    remembering, stopping = Remembering(), EarlyStoppingCallback(50)
    trainer = Ours(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(FOLDER / "out"),
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            gradient_accumulation_steps=int(os.environ.get("ACCUMULATE", "2")),
            num_train_epochs=int(os.environ.get("EPOCHS", "4")),
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            eval_strategy="steps",
            eval_steps=5,
            save_strategy="steps",
            save_steps=5,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            logging_steps=3,
            include_num_input_tokens_seen="all",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            seed=5,
        ),
        train_dataset=texts(200, 1),
        eval_dataset=texts(43, 2),
        compute_metrics=lambda outputs: {
            "right": float((outputs.predictions.argmax(-1) == outputs.label_ids).mean())
        },
        callbacks=[remembering, stopping],
    )
    remembering.trainer = trainer
    result = trainer.train()
    if trainer.is_world_process_zero():
        state = trainer.state
        times = ("_runtime", "_per_second", "preparation_time", "_flos")
        found = {
            "weights": {k: v.tolist() for k, v in trainer.model.state_dict().items()},
            "step": state.global_step,
            "loss": result.training_loss,
            "flos": state.total_flos,
            "tokens": state.num_input_tokens_seen,
            "rate": trainer.lr_scheduler.get_last_lr(),
            "history": [
                {k: v for k, v in each.items() if not k.endswith(times)}
                for each in state.log_history
            ],
            "best": [state.best_metric, Path(state.best_model_checkpoint).name],
            "remembered": [remembering.steps, remembering.losses],
            "patience": stopping.early_stopping_patience_counter,
        }
        (FOLDER / "end.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
