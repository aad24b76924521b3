"""Checks, before training, for what a script cannot use."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import transformers
from transformers import TrainingArguments

from hvd_elastic.errors import ScriptError
from hvd_elastic.worker import context

_GENERATE = ("PPO", "Online", "GKD", "Nash", "XPO")
"""Beginnings of the names of TRL's trainers that generate in a step what they train on."""
_GENERATING = ("_prepare_inputs", "get_train_dataloader")
"""Methods that those of TRL override which generate before a step."""
_LOOP = (
    "a training loop of its own, and the loop is where hosts join. Override compute_loss or "
    "training_step instead"
)
_OWN = {
    "_inner_training_loop": _LOOP,
    "_run_epoch": _LOOP,
    "get_train_dataloader": "a loader of its own, which says nothing of which rank reads which "
    "example. Override _get_train_sampler() for another order, or leave it out",
}
"""Methods that cannot be overridden, and why."""
_SHARDED = (
    "it shards the model over the ranks itself, and here each rank has the whole model, so that it "
    "outlives the others. Leave it out; activation checkpointing, bf16 and PEFT's LoRA save memory"
)
_REFUSED = {
    "deepspeed": _SHARDED,
    "fsdp": _SHARDED,
    "parallelism_config": _SHARDED,
    "auto_find_batch_size": "it trains again with half the batch, and a script has one training. "
    "Trainer(..., max_batch_size=1024) adapts the batch, in passes that fit into memory",
    "push_to_hub": "which rank pushes is known in training only. Call trainer.push_to_hub() after "
    "trainer.train(), which rank 0 does",
    "enable_jit_checkpoint": "a host that is about to go leaves the run, and the others continue. "
    "Leave it out",
}
"""Arguments that cannot be used, and why."""


def check_class(trainer: Any) -> None:
    """Raise ScriptError if a class is no Trainer that can be made elastic; says what to do."""
    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        name = getattr(trainer, "__name__", type(trainer).__name__)
        raise ScriptError(
            f"elastic({name}): give a subclass of transformers.Trainer, such as TRL's SFTTrainer, "
            "the class and not an object of it"
        )
    bases = [each for each in trainer.__mro__ if each.__module__.startswith("trl.")]
    if any(
        each.__name__.startswith(_GENERATE) or not vars(each).keys().isdisjoint(_GENERATING)
        for each in bases
    ):
        raise ScriptError(
            f"elastic({trainer.__name__}): it generates the examples that it trains on, so these "
            "cannot be used exactly once. SFTTrainer, DPOTrainer, KTOTrainer and RewardTrainer can"
        )
    for name, why in _OWN.items():
        owner = next(each for each in trainer.__mro__ if name in vars(each))
        if not owner.__module__.startswith(("transformers.", "hvd_elastic.")):
            raise ScriptError(f"elastic({trainer.__name__}): {owner.__name__}.{name} is {why}")


def check_script(
    kind: type[Any], given: tuple[Any, ...], options: dict[str, Any], *, adapts: bool
) -> None:
    """Raise ScriptError for a model or arguments that cannot be used; says what to do.

    Args:
        kind: class of the Trainer.
        given, options: its arguments.
        adapts: whether the batch adapts.
    """
    check_class(kind)
    every = [*given, *options.values()]
    args = next((each for each in every if isinstance(each, TrainingArguments)), None)
    model = options.get("model", given[0] if given else None)
    placed = {str(each) for each in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(placed) > 1 or "disk" in placed:
        raise ScriptError(
            f'the model is on several devices ({", ".join(sorted(placed))}), as device_map="auto" '
            "puts it, and a rank has one. Load it without device_map"
        )
    if args is None:
        return
    for name, why in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            shown = repr(value) if isinstance(value, (bool, str)) else "..."
            raise ScriptError(f"TrainingArguments({name}={shown}): {why}")
    if adapts and args.gradient_accumulation_steps > 1:
        raise ScriptError(
            f"TrainingArguments(gradient_accumulation_steps={args.gradient_accumulation_steps}) "
            "with max_batch_size: the batch adapts, and the number of passes of a step with it. "
            "Leave one of them out"
        )


def check_training() -> None:
    """Raise ScriptError if the script has trained before."""
    if context.current().has_trained:
        raise ScriptError(
            "trainer.train() is called a second time, and a script has one: it is where hosts "
            "join, a failure is undone, and a resumed run continues. Give the first more epochs, "
            "or start another script, which begins with from_pretrained(...)"
        )


def refuse_foreign(checkpoint: Any, output_dir: str) -> None:
    """Warn of a checkpoint to resume from; raise ScriptError if it is not of this script."""
    says = (
        "a run resumes where it was, on any hosts, with hvd-elastic run --resume RUN. To begin "
        "with the weights of a folder: from_pretrained(folder)"
    )
    if (
        checkpoint is not True
        and Path(output_dir).resolve() not in Path(checkpoint).resolve().parents
    ):
        raise ScriptError(f"trainer.train(resume_from_checkpoint={str(checkpoint)!r}): {says}")
    context.current().worker.warn_once(
        f"trainer.train(resume_from_checkpoint={checkpoint!r}) is not used: {says}"
    )


def refuse_search() -> NoReturn:
    """Raise ScriptError for a search of hyperparameters."""
    raise ScriptError(
        "trainer.hyperparameter_search(): a script has one training. Start a run for each choice, "
        "such as: hvd-elastic run ... -- python train.py --learning_rate 1e-4"
    )
