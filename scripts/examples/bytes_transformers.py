"""Train a small GPT-2 on the bytes of a text with Hugging Face's Trainer, elastically."""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from hvd_elastic.transformers import Trainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", type=Path, required=True, help="text file, on each host")
parser.add_argument("--output", type=Path, default=Path("out"), help="folder of checkpoints")
parser.add_argument("--epochs", type=float, default=3)
parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
parser.add_argument("--length", type=int, default=128, help="bytes of an example")
args = parser.parse_args()


class Pieces(torch.utils.data.Dataset):
    """A text in pieces of so many bytes."""

    def __init__(self, text, length):
        whole = len(text) // length * length
        self.pieces = torch.tensor(np.frombuffer(text[:whole], np.uint8).reshape(-1, length))

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        piece = self.pieces[index].long()
        return {"input_ids": piece, "labels": piece}


text = args.data.read_bytes()
held_out = len(text) // 10
size = {"vocab_size": 256, "n_positions": args.length, "n_embd": 64, "n_layer": 2, "n_head": 2}
config = GPT2Config(**size, bos_token_id=0, eos_token_id=0)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        output_dir=str(args.output),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        logging_steps=20,
        report_to=[],
    ),
    train_dataset=Pieces(text[:-held_out], args.length),
    eval_dataset=Pieces(text[-held_out:], args.length),
)
trainer.train()
if trainer.is_world_process_zero():
    print(f"best evaluation loss {trainer.state.best_metric:.4f}")
