"""The library that the script uses: ``lightning`` or ``pytorch_lightning``, which are the same."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from hvd_elastic.errors import ScriptError
from hvd_elastic.frameworks import LIGHTNING_REQUIREMENT, install_command, why_no_lightning

_SIGNATURES = {
    "loops.fit_loop._FitLoop": "setup_data() reset() on_run_start() on_run_end() "
    "on_advance_start() on_advance_end()",
    "loops.training_epoch_loop._TrainingEpochLoop": "reset() advance(data_fetcher) "
    "on_advance_end(data_fetcher) _should_check_val_fx(data_fetcher) "
    "_accumulated_batches_reached()",
    "strategies.ParallelStrategy": "setup_environment() setup(trainer) block_backward_sync() "
    "process_dataloader(dataloader) backward(closure_loss,optimizer,args,kwargs) "
    "optimizer_step(optimizer,closure,model,kwargs) reduce(tensor,group,reduce_op) "
    "broadcast(obj,src) barrier(name) all_gather(tensor,group,sync_grads) teardown() "
    "save_checkpoint(checkpoint,filepath,storage_options) load_checkpoint(checkpoint_path) "
    "remove_checkpoint(filepath)",
    "plugins.precision.Precision": "_wrap_closure(model,optimizer,closure) "
    "pre_backward(tensor,module) backward(tensor,model,optimizer,args,kwargs) "
    "post_backward(tensor,module)",
    "trainer.connectors.logger_connector.result._ResultCollection": "_get_cache(result_metric,"
    "on_step) log(fx,name,value,prog_bar,logger,on_step,on_epoch,reduce_fx,enable_graph,sync_dist,"
    "sync_dist_fn,sync_dist_group,add_dataloader_idx,batch_size,metric_attribute,rank_zero_only)",
    "trainer.connectors.signal_connector._SignalConnector": "teardown()",
}
"""What is called or overridden: methods of classes, and their parameters."""


_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _name() -> str:
    """Return the name of the library that the script has imported, else of one that is there."""
    for name in sorted(_NAMES, key=lambda name: name not in sys.modules):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ScriptError(
        "hvd_elastic.lightning needs Lightning, and it is not installed here: "
        f"{install_command(LIGHTNING_REQUIREMENT)}"
    )


NAME = _name()
"""Import name of the library."""


def other_imported() -> str:
    """Return the name of the library that the script has imported too; empty: it has not."""
    return next((name for name in _NAMES if name != NAME and name in sys.modules), "")


def part(module: str) -> Any:
    """Return a module of the library; ``module``: its name below that of the library."""
    return importlib.import_module(f"{NAME}.{module}")


def check_version() -> None:
    """Raise ScriptError if the library is of a release whose loops are not known."""
    version = str(importlib.import_module(NAME).__version__)
    why = why_no_lightning(version) or next(_changed(version), None)
    if why is not None:
        raise ScriptError(f"{why}; run: {install_command(LIGHTNING_REQUIREMENT)}")


def _changed(version: str) -> Iterator[str]:
    """Yield in words each method that is not as it is known; it may have further options."""
    for place, known in _SIGNATURES.items():
        module, _, owner = place.rpartition(".")
        for each in known.split():
            name, _, given = each.rstrip(")").partition("(")
            method = getattr(getattr(part(module), owner, None), name, None)
            found = {} if method is None else dict(inspect.signature(method).parameters)
            found.pop("self", None)
            expected = given.split(",") if given else []
            further = [*found.values()][len(expected) :]
            if (
                method is None
                or [*found][: len(expected)] != expected
                or any(option.default is option.empty for option in further)
            ):
                yield (
                    f"{NAME} {version} has another {place}.{name} than the one that "
                    f"hvd_elastic.lightning knows, {name}({', '.join(expected)})"
                )
