"""The strategy that makes a ``Trainer`` elastic."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.interface import GenerationBrokenError
from hvd_elastic.errors import ScriptError
from hvd_elastic.lightning.checks import check_script, refuse_checkpoint
from hvd_elastic.lightning.library import NAME, other_imported, part
from hvd_elastic.lightning.loaders import EvaluationLoader, training_loader
from hvd_elastic.lightning.loop import ElasticEpochLoop, ElasticFitLoop
from hvd_elastic.lightning.results import EvaluationResults, TrainingResults
from hvd_elastic.script.collectives import script_collective
from hvd_elastic.script.loop_parts import batch_words, slot_of
from hvd_elastic.worker import context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.planning.batch_bounds import require_whole
from hvd_elastic.worker.progress import Phase
from hvd_elastic.worker.step import Stage

ParallelStrategy: Any = part("strategies").ParallelStrategy
LightningEnvironment: Any = part("plugins.environments").LightningEnvironment
rank_zero_only: Any = part("utilities.rank_zero").rank_zero_only
_FITTING: Any = part("trainer.states").TrainerFn.FITTING
_OPERATIONS = ("sum", "avg", "mean", "max", "min")


class ElasticStrategy(ParallelStrategy):
    """Makes ``trainer.fit`` elastic; hosts join and leave, and a step that fails is repeated.

    The batch size of the script's ``train_dataloader`` is that of all ranks together, so what is
    learnt does not depend on their number.

    Args:
        as_on: multiply the batch size, as a job on so many devices would.
        max_batch_size: largest global batch to adapt to; None: the batch is fixed.
        lr_rule, compression: as for :func:`hvd_elastic.torch.DistributedOptimizer`.

    Raises:
        ScriptError: ``as_on`` is no whole number, or below 1.
    """

    strategy_name = "hvd_elastic"

    def __init__(
        self,
        as_on: int = 1,
        *,
        max_batch_size: int | None = None,
        lr_rule: Any = None,
        compression: hvd.Compression = hvd.Compression.none,
    ) -> None:
        hvd.init()
        as_on = require_whole("as_on", as_on, 1, "the number of devices", "ElasticStrategy")
        super().__init__(cluster_environment=LightningEnvironment())
        self._as_on = as_on
        self._loader_options = {} if max_batch_size is None else {"max_batch_size": max_batch_size}
        self._optimizer_options = {"lr_rule": lr_rule, "compression": compression}
        self._worker = context.current().worker
        if other := other_imported():
            self._worker.warn_once(
                f"{other} is imported too, and ElasticStrategy is for the Trainer of {NAME}. "
                f"For that of {other}, import it before hvd_elastic.lightning"
            )
        self.failed: GenerationBrokenError | None = None
        """Failure of another rank after a step was taken, until the batch's hooks have ended."""
        self.slots: dict[str, int] = {}
        """Number of each file of a callback that is kept in the run folder, by name."""
        self.alone = False
        """Whether other ranks may not come here, so that there is no collective."""
        rank_zero_only.rank = self.global_rank

    # -- ranks -----------------------------------------------------------------------------

    @property
    def together(self) -> bool:
        """Return whether the ranks train, so that each calls the same collectives."""
        worker = self._worker
        return worker.in_train and worker.has_ranks and self.world_size > 1 and not self.alone

    @property
    def root_device(self) -> torch.device:
        return hvd.device()

    @property
    def world_size(self) -> int:
        return hvd.size() if self._worker.has_ranks else 1

    @property
    def global_rank(self) -> int:
        """This process's rank; before it is known, one that neither logs nor saves."""
        if self._worker.has_ranks:
            return hvd.rank()
        return int(self._worker.mode is Mode.AGENT)

    @property
    def local_rank(self) -> int:
        return hvd.local_rank()

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def is_distributed(self) -> bool:
        """Return whether ``sync_dist`` has an effect: always, since ranks may come."""
        return True

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    # -- collectives -----------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other ranks, between two batches."""
        if self.together and not self._has_stepped:
            self.reduce(torch.zeros(1))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank on all of them."""
        if not self.together:
            return obj
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        own = data if self.global_rank == src else data[:0]
        got = self._collective("allgather", own, "broadcast")
        # It comes from another rank of this run.
        return obj if got is own else pickle.loads(got.numpy().tobytes())  # noqa: S301

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, sum, largest or smallest value of the ranks."""
        if not self.together or not isinstance(tensor, torch.Tensor):
            return tensor
        name = "mean" if reduce_op is None else str(reduce_op).lower()
        operation = next((each for each in _OPERATIONS if each in name), None)
        if operation is None:
            raise ScriptError(f"reduce(reduce_op={reduce_op!r}): use mean, sum, max or min")
        if operation in ("max", "min"):
            every = self.all_gather(tensor)
            return every.amax(0) if operation == "max" else every.amin(0)
        # As a float for whole numbers too: a mean is divided by the mean number of examples.
        return self._collective("allreduce", tensor, "reduce", average=operation != "sum")

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, stacked; gradients do not flow through it."""
        if not self.together:
            return tensor
        return self._collective("allgather", tensor[None], "gather")

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, of which each may have another number."""
        gathered: torch.Tensor = self._collective("allgather", rows, "rows")
        return gathered

    @property
    def _has_stepped(self) -> bool:
        """Return whether the step of the present batch is taken, so that it cannot be repeated."""
        ctx = context.current()
        return self._worker.progress.phase is Phase.LOOP and ctx.step.stage is Stage.DONE

    def _collective(self, kind: str, tensor: torch.Tensor, name: str, **options: Any) -> Any:
        """Return the result; where a rank is lost after the step, this rank's own ``tensor``."""
        name = f"lightning.{name}"
        value, received = self._worker.frontend.script_tensor(kind, tensor, name, **options)
        try:
            with script_collective(kind, name, changes_state=True) as ring:
                if kind == "allgather":
                    return received(ring.gather(value, f"user.{name}"))
                begin = ring.reduce_async if options.get("average") else ring.sum_async
                return received(ring.wait(begin(value, f"user.{name}")))
        except GenerationBrokenError as error:
            if not self._has_stepped:
                raise
            self.failed = error  # the hooks of the batch follow first
            return tensor

    # -- setup -----------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Refuse what cannot be used; loaders may be asked for from now on, for their length."""
        super().setup_environment()
        trainer = self.lightning_module.trainer
        trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn == _FITTING:
            check_script(trainer)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        """Have the library's objects train elastically."""
        super().setup(trainer)
        if trainer.state.fn != _FITTING:
            return
        if not any(each.param_groups for each in self.optimizers):
            raise ScriptError("configure_optimizers() returns no optimizer, so nothing is trained")
        several = not self.lightning_module.automatic_optimization
        for optimizer in self.optimizers:
            hvd.DistributedOptimizer(
                optimizer,
                self.lightning_module,
                sync_batch_norm=self._layer_sync is not None,
                several_steps=several,
                **self._optimizer_options,
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            self.precision_plugin.scaler = hvd.GradScaler.like(self.precision_plugin.scaler)
        if several:
            self._have_averages_clipped()
        loop = trainer.fit_loop
        loop.__class__, loop.epoch_loop.__class__ = ElasticFitLoop, ElasticEpochLoop
        loop.epoch_loop._results = TrainingResults()
        loop.epoch_loop.val_loop._results = EvaluationResults(training=False)

    def _have_averages_clipped(self) -> None:
        """Have ``clip_gradients()`` of the module clip averages, as with DDP."""
        clip = self.precision_plugin.clip_gradients

        def clip_averages(optimizer: Any, *args: Any, **options: Any) -> None:
            optimizer.synchronize()
            clip(optimizer, *args, **options)

        self.precision_plugin.clip_gradients = clip_averages

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader that gives each rank its part."""
        trainer = self.lightning_module.trainer
        if trainer.training:
            return training_loader(dataloader, self._as_on, self._loader_options)
        if not isinstance(dataloader, DataLoader) or isinstance(
            dataloader.dataset, IterableDataset
        ):
            return dataloader
        if trainer.state.fn != _FITTING or dataloader.batch_size is None:
            return dataloader
        return EvaluationLoader(dataloader, trainer.limit_val_batches)

    # -- checkpoints of callbacks ----------------------------------------------------------

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Write a file on the host of rank 0, and keep it in the run folder too; all ranks call it.

        There it has a name that a later file takes over when this one is removed.
        """
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._worker.mode is Mode.AGENT and self._worker.in_train:
            slot = slot_of(self.slots, Path(filepath).name)
            hvd.save(f"lightning-{slot}.ckpt", checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, **options: Any) -> Any:
        """Load a file for an evaluation."""
        if self.lightning_module.trainer.state.fn == _FITTING:
            refuse_checkpoint(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, **options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file on the host of rank 0."""
        super().remove_checkpoint(filepath)
        self.slots.pop(Path(filepath).name, None)

    # -- other hooks -----------------------------------------------------------------------

    def batch_words(self, loader: Any) -> str:
        """Return in words whose batch size that of our loader is."""
        return batch_words("ElasticStrategy(as_on=8)", "batch", loader.batch_size, self._as_on)

    def teardown(self) -> None:
        self.cluster_environment = LightningEnvironment()
        super().teardown()

    # -- a step ----------------------------------------------------------------------------

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients; hooks after it, and clipping, see their averages."""
        ctx, module, precision = context.current(), self.lightning_module, self.precision_plugin
        last = not (ctx.step.in_no_sync or (ctx.step.passes and ctx.step.passes[-1].accumulating))
        if last and module.automatic_optimization and self._worker.in_train:
            module.trainer.fit_loop.sums.begin_sum()
        self.pre_backward(closure_loss)
        closure_loss = precision.pre_backward(closure_loss, module)
        precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        if last and not self._worker.averagers.several:
            self.optimizers[0].synchronize()
        closure_loss = precision.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Compute gradients, then take the step, which needs them averaged."""
        module, precision = self.lightning_module, self.precision_plugin

        def backward() -> Any:
            result = closure()
            if module.automatic_optimization:
                module.trainer.fit_loop.sums.finish_sum()
            elif self._worker.in_train:
                optimizer.synchronize()  # for on_before_optimizer_step()
            return result

        if getattr(precision, "scaler", None) is not None:
            return super().optimizer_step(optimizer, backward, model, **kwargs)
        result = precision._wrap_closure(module, optimizer, backward)
        if result is not None or not module.automatic_optimization:
            optimizer.step(**kwargs)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave gradients as they are in the passes of a step but the last."""
        with ExitStack() as stack:
            ctx = context.current()
            if not (ctx.planner.adapts or self._worker.averagers.several):
                for optimizer in self.optimizers:
                    stack.enter_context(optimizer.no_sync())
            yield
