"""Lightning's fit loop whose parts are run, and after a failure run again, by ``hvd.run``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchmetrics import Metric, MetricCollection

import hvd_elastic.torch as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.lightning.checks import check_loop
from hvd_elastic.lightning.library import part
from hvd_elastic.lightning.loop_state import LoopState, take_versions, version_of
from hvd_elastic.lightning.sums import Sums
from hvd_elastic.script.loop_parts import train_by_parts
from hvd_elastic.script.state import Stateful
from hvd_elastic.worker import context
from hvd_elastic.worker.worker import Worker

_FitLoop: Any = part("loops.fit_loop")._FitLoop
_EpochLoop: Any = part("loops.training_epoch_loop")._TrainingEpochLoop
_DataModule: Any = part("core.datamodule").LightningDataModule
_ProgressBar: Any = part("callbacks").ProgressBar
rank_zero_only: Any = part("utilities.rank_zero").rank_zero_only
_CSVLogger: Any = part("loggers").CSVLogger
_MLFlowLogger: Any = part("loggers").MLFlowLogger
_log_hyperparams: Any = part("loggers.utilities")._log_hyperparams
rank_zero_info: Any = part("utilities.rank_zero").rank_zero_info


class _State(hvd.State):
    """The state, without a warning of lists of the module: its attributes are set back."""

    def module_attributes(self) -> Any:
        return (each for each in super().module_attributes() if each[0] != "model")


class _OneBatch:
    """In place of a data fetcher: gives the batch that our loader has handed out."""

    fetched = 0

    def __init__(self, batch: Any, *, last: bool) -> None:
        self._batch, self.done = batch, last

    def __next__(self) -> Any:
        return self._batch, 0, 0


class ElasticEpochLoop(_EpochLoop):
    """The loop over the batches of an epoch; passes of an adaptive batch are accumulated."""

    def _accumulated_batches_reached(self) -> bool:
        ctx = context.current()
        if ctx.planner.adapts and ctx.step.passes:
            return not ctx.step.passes[-1].accumulating
        reached: bool = super()._accumulated_batches_reached()
        return reached


class ElasticFitLoop(_FitLoop):
    """Lightning's training by parts, a :class:`hvd_elastic.script.loop_parts.Library`."""

    place: LoopState
    sums: Sums

    def run(self) -> None:
        """Train, together with the other ranks."""
        self.setup_data()
        if self.skip:
            return
        check_loop(self)
        self.reset()
        trainer, strategy = self.trainer, self.trainer.strategy
        trainer._signal_connector.teardown()  # its SIGTERM handler would end this rank alone
        (self._loader,) = self._combined_loader.flattened
        self.sums = Sums(
            self.epoch_loop._results,
            {"": trainer.lightning_module} | _metrics(trainer.callbacks),
            strategy.root_device,
            strategy.gather_rows,
            lambda: strategy.together,
        )
        self.place = LoopState(self, self.sums)
        self._started = False
        values = _numbered("optimizer", strategy.optimizers)
        values |= _numbered("scheduler", [each.scheduler for each in strategy.lr_scheduler_configs])
        values |= {"model": trainer.lightning_module, "lightning": self.place}
        self._kept = values | _objects(trainer, values)
        state = _State(**self._kept)
        hvd.run(self._fit)(state)

    def _fit(self, _: Any) -> None:
        """Train until the end, also from where another rank stands."""
        ctx, trainer, strategy = context.current(), self.trainer, self.trainer.strategy
        by_steps = self.max_epochs == -1 and self.max_steps > 0
        ctx.aim(
            self.max_steps if by_steps else max(self.max_epochs, 1), "step" if by_steps else "epoch"
        )
        strategy.failed = None
        if trainer.validating:  # a validation was interrupted
            self.epoch_loop.val_loop._module_mode.restore(trainer.lightning_module)
            self.epoch_loop.val_loop._results.forget_cut()
        trainer.training = True
        trainer.lightning_module._current_fx_name = None
        self._follow_rank()
        if not self._started:
            strategy.alone = True  # a worker that joins is alone here
            self.on_run_start()
            if ctx.worker.link is not None and ctx.worker.progress.step == 0:
                _do_as_rank_0(trainer)
            strategy.alone, self._started = False, True
            for name, each in _objects(trainer, self._kept).items():
                raise ScriptError(
                    f"{name}, a {type(each).__name__}, is made when training begins: a worker that "
                    "joins could not take over its state. Make it in on_fit_start()"
                )
            if ctx.worker.progress.step == 0:
                rank_zero_info(strategy.batch_words(self._loader))
        train_by_parts(self, self._loader)
        self.on_run_end()

    def _follow_rank(self) -> None:
        """Have rank 0 alone log, save and show the progress, whichever process it is."""
        trainer, strategy = self.trainer, self.trainer.strategy
        before, now = rank_zero_only.rank, strategy.global_rank
        if before == now:
            return
        rank_zero_only.rank = now
        if now == 0:
            for logger in trainer.loggers:
                _go_on(logger)
        for bar in (each for each in trainer.callbacks if isinstance(each, _ProgressBar)):
            if now:
                bar.disable()
                continue
            bar.enable()
            if self._started:
                bar.on_train_start(trainer, trainer.lightning_module)
                bar.on_train_epoch_start(trainer, trainer.lightning_module)

    # -- parts -----------------------------------------------------------------------------

    def is_done(self) -> bool:
        """Return whether the limits of the Trainer are reached, or it should stop."""
        return bool(self.done)

    def begin_epoch(self) -> None:
        """Call the hooks at the beginning of an epoch."""
        self._agree_on_versions()
        self.on_advance_start()
        self.epoch_loop.reset()

    def _agree_on_versions(self) -> None:
        """Have loggers of all ranks know where that of rank 0 writes, which may be lost."""
        trainer, strategy = self.trainer, self.trainer.strategy
        if trainer.loggers and strategy.together:
            own = [version_of(each) for each in trainer.loggers] if strategy.is_global_zero else []
            take_versions(trainer.loggers, strategy.broadcast(own))

    def train(self, batch: Any) -> bool:
        """Train on a batch; return whether a validation or the end of the epoch follows."""
        ctx, loop, place = context.current(), self.epoch_loop, self.place
        self._follow_rank()
        more, left = ctx.step.passes[-1].accumulating, self._loader.steps_left()
        last = left <= 1 and not more
        self.max_batches = loop.batch_progress.current.ready + max(left, 1) + more
        fetcher = _OneBatch(batch, last=last)
        try:
            loop.advance(fetcher)
        except StopIteration:
            raise ScriptError(
                "on_train_batch_start() has returned -1, to leave out the rest of the epoch. Set "
                "trainer.should_stop, or give the train_dataloader a Subset of the data"
            ) from None
        if ctx.worker.averagers.several:
            self.sums.begin_sum()
            self.sums.finish_sum()
        self._agree_on_stop(ctx.worker)
        ctx.metrics.update(self.trainer._logger_connector._logged_metrics)
        check = loop._should_check_val_fx(fetcher)
        if not check:
            loop.on_advance_end(fetcher)
        place.check = check
        place.last = last or loop.done
        place.due = place.check or place.last
        strategy = self.trainer.strategy
        failed, strategy.failed = strategy.failed, None
        if failed is not None:
            raise failed
        return place.due

    def _agree_on_stop(self, worker: Worker) -> None:
        """Have all ranks stop after the same batch: one of them may have set ``should_stop``."""
        trainer = self.trainer
        if worker.progress.stopped:
            trainer.should_stop = True
        elif trainer.should_stop and trainer.strategy.together:
            trainer.should_stop = False
            hvd.stop(f"trainer.should_stop was set after batch {self.batch_idx} of an epoch")

    def follow(self) -> None:
        """Validate, and end the epoch."""
        self._follow_rank()
        with self.sums.whole():
            self._validate()
            if self.place.last:
                self.on_advance_end()
                self.place.last = self.place.begun = False

    def _validate(self) -> None:
        val_loop = self.epoch_loop.val_loop
        if self.place.check:
            if val_loop._combined_loader is not None:  # the world may have changed since
                val_loop._max_batches = [len(each) for each in val_loop._combined_loader.flattened]
            self.epoch_loop.on_advance_end(None)
            self.place.check = False


def _go_on(logger: Any) -> None:
    """Keep what an earlier rank 0 has written, which CSVLogger would delete."""
    if not isinstance(logger, _CSVLogger) or logger._experiment is not None:
        return
    path = Path(logger.log_dir) / "metrics.csv"
    written = path.read_bytes() if path.is_file() else b""
    writer = logger.experiment
    if written:
        path.write_bytes(written)
        writer.metrics_keys = written.decode().partition("\n")[0].strip().split(",")


def _do_as_rank_0(trainer: Any) -> None:
    """Do what the library does on rank 0 before it trains, where no process had a rank yet."""
    if not trainer.is_global_zero:
        return
    for callback in trainer.callbacks:
        names = {base.__name__ for base in type(callback).__mro__}
        if "SaveConfigCallback" in names:
            callback.setup(trainer, trainer.lightning_module, "fit")
        if "ModelSummary" in names:
            callback.on_fit_start(trainer, trainer.lightning_module)
    if getattr(trainer, "enable_autolog_hparams", True):  # 2.5.0 has it not
        _log_hyperparams(trainer)
    for logger in trainer.loggers:
        if isinstance(logger, _MLFlowLogger):
            logger.experiment  # noqa: B018  # begins its run, so that the other ranks know it


def _objects(trainer: Any, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return by name what callbacks hold that has a state, such as an averaged model."""
    known = {id(each) for each in (*kept.values(), *trainer.lightning_module.modules())}
    return {
        f"{type(callback).__name__}{number or ''}.{name}": each
        for number, callback in enumerate(trainer.callbacks)
        for name, each in vars(callback).items()
        if isinstance(each, Stateful)
        and id(each) not in known
        and not isinstance(each, (Metric, _DataModule))
    }


def _metrics(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return by name the metrics of torchmetrics that callbacks have."""
    return {
        f"{number}.{type(callback).__name__}.{name}": each
        for number, callback in enumerate(callbacks)
        for name, each in vars(callback).items()
        if isinstance(each, (Metric, MetricCollection))
    }


def _numbered(name: str, items: list[Any]) -> dict[str, Any]:
    return {f"{name}{number or ''}": item for number, item in enumerate(items)}
