"""Checks, before training, for what a script cannot use with the strategy."""

from __future__ import annotations

import math
from typing import Any

from hvd_elastic.errors import ScriptError
from hvd_elastic.lightning.library import part
from hvd_elastic.worker import context

_Scheduler: Any = part("callbacks").GradientAccumulationScheduler
_REFUSED = {
    "StochasticWeightAveraging": "it changes the loop that trains. Average by "
    "torch.optim.swa_utils in your module",
    "WeightAveraging": "a worker that joins would not have its average. Average by "
    "torch.optim.swa_utils in your module",
    "BaseFinetuning": "it gives the optimizer parameters while it trains, and a worker that joins "
    "could not take them over. Give it all in configure_optimizers(), and set their requires_grad "
    "in on_train_epoch_start()",
    "ModelPruning": "it changes which parameters the model has while it trains, and a worker that "
    "joins could not take them over. Prune with torch.nn.utils.prune before training, or after it",
    "BatchSizeFinder": "it trains before training. Find the batch size once, without the strategy",
    "LearningRateFinder": "it trains before training. Find the rate once, without the strategy",
}
"""Callbacks that cannot be used, and why."""


def check_script(trainer: Any) -> None:
    """Raise ScriptError for what the Trainer is asked for and cannot be kept; says what to do."""
    ctx, worker = context.current(), context.current().worker
    if ctx.has_trained:
        raise ScriptError(
            "trainer.fit() is called a second time, and a script has one: it is where hosts join, "
            "a failure is undone, and a resumed run continues. Give the first more epochs, or "
            "start another script, which begins with Model.load_from_checkpoint(...)"
        )
    for callback in trainer.callbacks:
        for base in type(callback).__mro__:
            if base.__name__ in _REFUSED and base.__module__.startswith(part("callbacks").__name__):
                raise ScriptError(f"callback {base.__name__}: {_REFUSED[base.__name__]}")
    precision = type(trainer.precision_plugin).__name__
    if precision.startswith(("FSDP", "DeepSpeed")):
        raise ScriptError(
            f"Trainer(plugins={precision}(...)) is for sharded models, and here each rank has a "
            "whole one. Give the precision by name: Trainer(precision='bf16-mixed')"
        )
    if trainer.overfit_batches or (trainer.limit_train_batches != 1.0 and not trainer.fast_dev_run):
        name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"
        raise ScriptError(
            f"Trainer({name}=...): each example of an epoch is used once, so an epoch is not cut. "
            "Give the train_dataloader a torch.utils.data.Subset of the data"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ScriptError(
            "Trainer(reload_dataloaders_every_n_epochs=...): the training data are read in one "
            "order, which a worker that joins and a resumed run know, so there is one loader. "
            "Leave it out; what changes with the epoch can be done in the data set's __getitem__"
        )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise ScriptError(
            "Trainer(val_check_interval=...) as a time: the ranks' clocks differ, and all validate "
            "after the same step. Give it as a number of batches, or as a part of an epoch"
        )
    devices = trainer._accelerator_connector._devices_flag
    nodes = trainer._accelerator_connector._num_nodes_flag
    if nodes > 1 or (isinstance(devices, int) and devices > 1):
        worker.warn_once(
            f"Trainer(devices={devices}, num_nodes={nodes}) is not used: a process has "
            "one device, and hvd-elastic run starts as many processes as there are slots"
        )


def refuse_checkpoint(path: Any) -> None:
    """Raise ScriptError for a file that training is to continue from."""
    raise ScriptError(
        f"trainer.fit(ckpt_path={str(path)!r}): a run resumes where it was with hvd-elastic run "
        "--resume RUN, on any number of hosts. To begin with the weights of a file: "
        "model = Model.load_from_checkpoint(path)"
    )


def check_loop(fit_loop: Any) -> None:
    """Raise ScriptError for loaders and intervals that cannot be kept; says what to do."""
    trainer, adapts = fit_loop.trainer, context.current().planner.adapts
    loaders = fit_loop._combined_loader.iterables
    if isinstance(loaders, (list, tuple, dict)):
        raise ScriptError(
            f"the train_dataloader is a {type(loaders).__name__} of {len(loaders)} loaders, and an "
            "epoch has one order. Make one loader of one data set: "
            "torch.utils.data.ConcatDataset, StackDataset, or hvd_elastic.data.Mixture"
        )
    interval, numbers = trainer.val_check_batch, [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:
        if isinstance(callback, _Scheduler):
            numbers += callback.scheduling.values()
    accumulated = max(numbers, key=lambda number: (bool(interval % number), number))
    if adapts and accumulated > 1:
        raise ScriptError(
            f"Trainer(accumulate_grad_batches={accumulated}) with max_batch_size: the batch "
            "adapts, and the number of passes of a step with it. Leave one of them out"
        )
    if interval >= fit_loop.max_batches and trainer.check_val_every_n_epoch is not None:
        # At the end of an epoch, also where that has fewer batches than on one rank.
        trainer.val_check_batch = math.inf
    elif adapts:
        raise ScriptError(
            f"Trainer(val_check_interval={trainer.val_check_interval}) with max_batch_size: how "
            "many batches an epoch has changes with their size. Validate at the end of an epoch"
        )
    elif interval % accumulated:
        raise ScriptError(
            f"Trainer(val_check_interval={trainer.val_check_interval}, "
            f"accumulate_grad_batches={accumulated}): a validation after {interval} batches would "
            "come between the batches of one step. Make the interval a multiple of "
            f"accumulate_grad_batches, such as {max(interval // accumulated, 1) * accumulated}"
        )
