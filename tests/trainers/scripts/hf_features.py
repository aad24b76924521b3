"""What Hugging Face's Trainer can do, each alone; arguments: folder, name of the feature."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

if "PLAIN" in os.environ:  # as theirs, in one process
    from transformers import Trainer

    def elastic(trainer: type) -> type:
        return trainer
else:
    from hvd_elastic.transformers import Trainer, elastic

FOLDER, FEATURE = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
torch.set_num_threads(1)
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(57))]
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OF_PASSES = ("eval_mean_token_accuracy", "eval_entropy")
"""TRL's means over what the ranks compute at the same time."""
if FEATURE in ("lora", "in order"):  # which accumulate
    OF_PASSES += ("mean_token_accuracy", "entropy")
ARGUMENTS = {
    "output_dir": str(FOLDER / "out"),
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "logging_steps": 4,
    "eval_strategy": "epoch",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "seed": 5,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def texts(number: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS[3:], k=rng.randint(3, 11))) for _ in range(number)]


def language_model() -> GPT2LMHeadModel:
    size = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), **size, **DROPOUT, **ends))


def classifier(labels: int = 3) -> BertForSequenceClassification:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(WORDS), intermediate_size=32, num_labels=labels, **size)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertForSequenceClassification(config)


def labelled(number: int, seed: int, tokenizer: PreTrainedTokenizerFast) -> Dataset:
    made = Dataset.from_dict({"text": texts(number, seed)})
    made = made.map(lambda row: tokenizer(row["text"], return_token_type_ids=True))
    return made.map(lambda row: {"labels": sum(row["input_ids"]) % 3, "length": len(row["text"])})


def classification(**options) -> Trainer:
    """In the shape of run_glue."""
    tokenizer = make_tokenizer()
    compute = options.pop("compute", accuracy)
    given = {
        "train_dataset": labelled(94, 1, tokenizer),
        "eval_dataset": labelled(37, 2, tokenizer),
        "compute_metrics": compute,
    } | options.pop("given", {})
    return Trainer(
        model=classifier(),
        args=TrainingArguments(**(ARGUMENTS | options)),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        **given,
    )


def accuracy(outputs) -> dict[str, float]:
    right = outputs.predictions.argmax(-1) == outputs.label_ids
    return {"accuracy": float(right.mean()), "examples": len(right)}


def supervised(**options):
    """TRL's SFTTrainer on texts."""
    from trl import SFTConfig, SFTTrainer

    arguments = ARGUMENTS | {"max_length": 16, "gradient_checkpointing": False} | options
    given = arguments.pop("given", {})
    return elastic(SFTTrainer)(
        model=language_model(),
        args=SFTConfig(**arguments),
        train_dataset=Dataset.from_dict({"text": texts(94, 1)}),
        eval_dataset=Dataset.from_dict({"text": texts(37, 2)}),
        processing_class=make_tokenizer(),
        **given,
    )


def preferences(number: int, seed: int) -> Dataset:
    pairs = {"chosen": texts(number, seed), "rejected": texts(number, seed + 10)}
    return Dataset.from_dict({"prompt": texts(number, seed + 20), **pairs})


def preferring(**options):
    """TRL's DPOTrainer, with the outputs of the first model computed once."""
    from trl import DPOConfig, DPOTrainer

    folder, tokenizer = FOLDER / f"model-{os.getpid()}", make_tokenizer()
    language_model().save_pretrained(folder)
    arguments = ARGUMENTS | {"max_length": 16, "gradient_checkpointing": False} | options
    return elastic(DPOTrainer)(
        model=GPT2LMHeadModel.from_pretrained(folder),
        args=DPOConfig(**arguments),
        train_dataset=preferences(96, 1),
        eval_dataset=preferences(37, 2),
        processing_class=tokenizer,
    )


def rewarding(**options):
    """TRL's RewardTrainer."""
    from trl import RewardConfig, RewardTrainer

    arguments = ARGUMENTS | {"max_length": 16, "gradient_checkpointing": False} | options
    model = classifier(1)
    model.config.pad_token_id = 0
    return elastic(RewardTrainer)(
        model=model,
        args=RewardConfig(**arguments),
        train_dataset=preferences(96, 1).remove_columns("prompt"),
        eval_dataset=preferences(37, 2).remove_columns("prompt"),
        processing_class=make_tokenizer(),
    )


class Counting:
    """Metrics that are added up batch by batch."""

    def __init__(self) -> None:
        self.right = self.examples = 0

    def __call__(self, outputs, compute_result: bool):
        self.right += int((outputs.predictions.argmax(-1) == outputs.label_ids).sum())
        self.examples += len(outputs.label_ids)
        if not compute_result:
            return {}
        found = {"right": self.right, "examples": self.examples}
        self.right = self.examples = 0
        return found


def make() -> Trainer:
    if FEATURE == "classification":
        return classification(gradient_accumulation_steps=3, dataloader_num_workers=1)
    if FEATURE == "lengths":
        return classification(train_sampling_strategy="group_by_length", eval_on_start=True)
    if FEATURE == "batch metrics":
        tokenizer = make_tokenizer()
        several = {"a": labelled(37, 2, tokenizer), "b": labelled(3, 3, tokenizer)}
        given = {"eval_dataset": several}
        return classification(compute=Counting(), batch_eval_metrics=True, given=given)
    if FEATURE == "plateau":
        given = {"metric_for_best_model": "loss", "lr_scheduler_kwargs": {"patience": 0}}
        return classification(lr_scheduler_type="reduce_lr_on_plateau", max_steps=20, **given)
    if FEATURE == "checkpointing":
        return classification(
            gradient_checkpointing=True, max_grad_norm=0, label_smoothing_factor=0.1
        )
    if FEATURE == "adaptive":
        return classification(given={"max_batch_size": 32}, num_train_epochs=6)
    if FEATURE == "streams":
        tokenizer = make_tokenizer()
        given = {
            "train_dataset": labelled(50, 1, tokenizer).to_iterable_dataset().shuffle(seed=1),
            "eval_dataset": labelled(37, 2, tokenizer).to_iterable_dataset(),
        }
        return classification(given=given, max_steps=20, eval_strategy="steps", eval_steps=7)
    if FEATURE == "preferences":
        return preferring(precompute_ref_log_probs=True)
    if FEATURE == "rewards":
        return rewarding(train_sampling_strategy="sequential")
    if FEATURE == "sft":
        return supervised()
    if FEATURE == "in order":
        return supervised(train_sampling_strategy="sequential", gradient_accumulation_steps=2)
    if FEATURE == "lora":
        from peft import LoraConfig

        lora = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.0)
        return supervised(
            save_strategy="epoch",
            load_best_model_at_end=True,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=5,  # of two ranks one has a pass more
            include_num_input_tokens_seen="non_padding",
            given={"peft_config": lora},
        )
    raise ValueError(FEATURE)


def main() -> None:
    trainer = make()
    result = trainer.train()
    predicted = trainer.evaluate() if FEATURE in ("classification", "lengths") else {}
    if trainer.is_world_process_zero():
        times = ("_runtime", "_per_second", "preparation_time", "total_flos")
        history = [
            {
                k: v
                for k, v in each.items()
                if not k.endswith(times) and k not in OF_PASSES and "/" not in k
            }
            for each in trainer.state.log_history
        ]
        found = {
            "weights": {k: v.tolist() for k, v in trainer.model.state_dict().items()},
            "loss": result.training_loss,
            "step": trainer.state.global_step,
            "rate": trainer._get_learning_rate(),
            "history": history,
            "after": [v for k, v in predicted.items() if not k.endswith(times)],
        }
        (FOLDER / "end.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
