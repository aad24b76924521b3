"""Makes Hugging Face's Trainer, and any subclass of it, elastic."""

from __future__ import annotations

import functools
import tarfile
from pathlib import Path
from typing import Any, TypeVar

import transformers
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.interface import RingRank
from hvd_elastic.script.collectives import script_collective
from hvd_elastic.script.loop_parts import batch_words, slot_of
from hvd_elastic.script.model_loading import saved_file
from hvd_elastic.script.saving import save_file
from hvd_elastic.transformers.accelerator import (
    ElasticAccelerator,
    follow_rank,
    gather_objects,
    together,
)
from hvd_elastic.transformers.checks import (
    check_class,
    check_script,
    check_training,
    refuse_foreign,
    refuse_search,
)
from hvd_elastic.transformers.loaders import EvaluationLoader, training_loader
from hvd_elastic.transformers.loop import ElasticLoop
from hvd_elastic.transformers.loop_state import LoopState
from hvd_elastic.worker import context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.planning.batch_bounds import require_whole

Kind = TypeVar("Kind", bound=type[Any])


class ElasticMixin:
    """Comes before Hugging Face's Trainer in the bases of a class; see :func:`elastic`.

    The batch of a step is that of all ranks together: ``per_device_train_batch_size`` times
    ``gradient_accumulation_steps``, as on one device.

    Args:
        as_on: multiply the batch size, as a job on so many devices would.
        max_batch_size: largest global batch to adapt to; None: the batch is fixed.
        lr_rule, compression: as for :func:`hvd_elastic.torch.DistributedOptimizer`.
        args, options: those of the Trainer.

    Raises:
        ScriptError: ``as_on`` is no whole number, or below 1; or the Trainer is asked for what it
            cannot keep.
    """

    def __init__(
        self: Any,
        *args: Any,
        as_on: int = 1,
        max_batch_size: int | None = None,
        lr_rule: Any = None,
        compression: Any = hvd.Compression.none,
        **options: Any,
    ) -> None:
        hvd.init()
        self._as_on = require_whole("as_on", as_on, 1, "the number of devices", "Trainer")
        self._loader_options = {} if max_batch_size is None else {"max_batch_size": max_batch_size}
        self._optimizer_options = {"lr_rule": lr_rule, "compression": compression}
        self._elastic: ElasticLoop | None = None
        check_script(type(self), args, options, adapts=max_batch_size is not None)
        super().__init__(*args, **options)

    def create_accelerator_and_postprocess(self: Any) -> None:
        """Have the Trainer's collectives be ours."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = ElasticAccelerator
        if self.accelerator.scaler is not None:
            self.accelerator.scaler = hvd.GradScaler.like(self.accelerator.scaler)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        follow_rank(context.current().worker)

    # -- data ------------------------------------------------------------------------------

    def get_train_dataloader(self: Any) -> Any:
        """Return our loader of the training data, whose batches are update steps."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        dataset, collate = self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names") and hasattr(dataset, "set_format"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        sampler = functools.partial(self._get_train_sampler, dataset)
        return training_loader(
            dataset, collate, self.args, sampler, self._as_on, self._loader_options
        )

    def set_initial_training_values(self: Any, args: Any, dataloader: Any) -> Any:
        """Count a batch of our loader as a whole update step."""
        check_training()
        passes, args.gradient_accumulation_steps = args.gradient_accumulation_steps, 1
        try:
            return super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        finally:
            args.gradient_accumulation_steps = passes

    def batch_words(self, loader: Any) -> str:
        """Return in words whose batch size that of our loader is."""
        return batch_words("Trainer(..., as_on=8)", "step", loader.batch_size, self._as_on)

    def passes_of_all(self: Any, loader: Any) -> int:
        """Return the number of passes of the present step on the rank that has the most."""
        return -(-int(loader.largest_share()) // int(self.args.train_batch_size))

    # -- training --------------------------------------------------------------------------

    def _prepare_for_training(self: Any, *args: Any, **options: Any) -> Any:
        """Have the optimizer average its gradients over the ranks."""
        result = super()._prepare_for_training(*args, **options)  # type: ignore[misc]
        self.inner_optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not hasattr(self.inner_optimizer, "synchronize"):  # else the script has done it
            hvd.DistributedOptimizer(self.inner_optimizer, self.model, **self._optimizer_options)
        if getattr(self.optimizer, "scaler", None) is not None:
            _call_present_step(self.optimizer)
        if context.current().planner.adapts:
            hvd.follow_progress(self.lr_scheduler)
        # Called again where this worker has a rank.
        for event in ("on_train_begin", "on_epoch_begin"):
            setattr(self.callback_handler, event, _not_yet)
        return result

    def _run_epoch(self: Any, **given: Any) -> None:
        """Train all epochs: their loop calls it once."""
        for event in ("on_train_begin", "on_epoch_begin"):
            delattr(self.callback_handler, event)
        self._elastic = ElasticLoop(self, given)
        self._elastic.run()
        self.control.should_training_stop = True

    def log(self: Any, logs: dict[str, Any], *args: Any, **options: Any) -> None:
        """Log numbers, and have them among the metrics of the run."""
        super().log(logs, *args, **options)  # type: ignore[misc]
        if context.current().worker.in_train:
            numbers = {name: each for name, each in logs.items() if isinstance(each, (int, float))}
            context.current().metrics.update(numbers)

    # -- evaluation ------------------------------------------------------------------------

    def _evaluate(self: Any, *args: Any, **options: Any) -> Any:
        if self.is_in_train and self._elastic is None:  # eval_on_start, before there are ranks
            return {}
        return super()._evaluate(*args, **options)  # type: ignore[misc]

    def evaluation_loop(self: Any, dataloader: Any, *args: Any, **options: Any) -> Any:
        """Evaluate, each rank a part, with the numbers of the whole set on all of them."""
        loader = EvaluationLoader(dataloader, self.accelerator)
        return super().evaluation_loop(loader, *args, **options)  # type: ignore[misc]

    # -- checkpoints -----------------------------------------------------------------------

    def _save_rng_state(self: Any, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        """Write a folder on the host of rank 0, and keep it in the run folder too."""
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        (best, *_) = gather_objects(self.state.best_model_checkpoint)
        self.state.best_model_checkpoint = best
        worker = context.current().worker
        if worker.mode is Mode.AGENT and worker.in_train:
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            self._keep(self._elastic.place, folder)

    def _keep(self: Any, place: LoopState, folder: Path) -> None:
        """Keep a folder as a file of the run, under a name that a removed one leaves to it."""
        there = [each.name for each in folder.parent.glob("checkpoint-*") if each.is_dir()]
        best = Path(self.state.best_model_checkpoint or folder).name  # perhaps of another host
        (kept, *_) = gather_objects([*there, folder.name, best])
        place.slots = {name: slot for name, slot in place.slots.items() if name in kept}
        slot = slot_of(place.slots, folder.name)

        def write(file: Any) -> None:
            with tarfile.open(fileobj=file, mode="w|") as packed:
                packed.add(folder, folder.name)

        save_file(context.current().worker, _file_of(slot), write)

    def load_best(self: Any, place: LoopState) -> None:
        """Load the best checkpoint where a host has it, and send its weights to all ranks."""
        best = self.state.best_model_checkpoint
        if not (self.args.load_best_model_at_end and best):
            return
        worker, folder = context.current().worker, Path(best)
        has = gather_objects(folder.is_dir())
        if not any(has) and folder.name in place.slots:
            if worker.rank == 0:
                with saved_file(_file_of(place.slots[folder.name])) as path:
                    with tarfile.open(path) as packed:
                        packed.extractall(folder.parent, filter="data")
            has = gather_objects(folder.is_dir())
        if not any(has):
            worker.warn_once(
                f"load_best_model_at_end: no host has {folder} any more, so the model is the last"
            )
            return
        root = RingRank(has.index(True))
        if worker.communicator.rank == root:
            super()._load_best_model()  # type: ignore[misc]
        if together():
            tensors = [*self.model.parameters(), *self.model.buffers()]
            with script_collective("load_best_model", "weights") as communicator:
                communicator.broadcast([each.data for each in tensors], root)

    def _load_best_model(self: Any) -> None:
        """Do nothing at their end of training: :meth:`load_best` has done it."""

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train; a run continues with ``hvd-elastic run --resume``."""
        if resume_from_checkpoint:
            refuse_foreign(resume_from_checkpoint, self.args.output_dir)
        return super().train(None, *args, **options)  # type: ignore[misc]

    def hyperparameter_search(self: Any, *_: Any, **__: Any) -> Any:
        """Raise ScriptError: a run trains once."""
        refuse_search()


def _call_present_step(accelerated: AcceleratedOptimizer) -> None:
    """Have an optimizer of accelerate with a scaler call the step that its own one has now.

    It remembers the step from when it was made, and would call that.
    """
    step = accelerated.optimizer.step
    accelerated._optimizer_original_step_method = step
    accelerated._optimizer_patched_step_method = patch_optimizer_step(accelerated, step)


def _not_yet(_: Any, __: Any, control: Any) -> Any:
    """Take the place of a callback's event that follows later."""
    return control


def _file_of(slot: int) -> str:
    return f"checkpoint-{slot}.tar"


def elastic(trainer: Kind) -> Kind:
    """Return an elastic subclass of a Trainer, such as TRL's SFTTrainer.

    Args:
        trainer: subclass of ``transformers.Trainer``.

    Raises:
        ScriptError: it is none, or has a training loop of its own.

    >>> SFTTrainer = elastic(SFTTrainer)      # doctest: +SKIP
    """
    check_class(trainer)
    if issubclass(trainer, ElasticMixin):
        return trainer
    made: Any = type(trainer.__name__, (ElasticMixin, trainer), {"__doc__": trainer.__doc__})
    made.__module__ = trainer.__module__
    return made


Trainer = elastic(transformers.Trainer)
"""Hugging Face's ``Trainer``, elastic."""
