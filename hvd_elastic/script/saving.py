"""Saves objects and files of the script by name, for every frontend: ``hvd.save``.

Only rank 0 saves. Under ``hvd-elastic run`` it writes the file into the spool of its host, and the
leader fetches it into the run folder. Otherwise it writes into the folder ``saved`` itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hvd_elastic.checkpoint.saved import check_name
from hvd_elastic.checkpoint.whole_files import Write
from hvd_elastic.worker import context
from hvd_elastic.worker.worker import Worker


def save(name: str, obj: Any) -> None:
    """Save an object in the folder of the run, whichever host rank 0 is on.

    Rank 0's object is saved; on other ranks the call does nothing, so it may be made on all ranks
    or on rank 0 alone. When it returns, the file is complete on the disk of rank 0's host; it is
    then brought to the leader while training continues. A later file of the same name replaces it;
    until the new one is complete, the earlier one stays.

    Args:
        name: name of the file, up to 100 letters, digits and ``. _ -``.
        obj: with PyTorch anything that ``torch.save`` can save, such as a ``state_dict()``, or a
            dict that has one under ``"model"``. With TensorFlow a model of Keras, a ``tf.Module``,
            a variable, or nested dicts and lists of these, arrays and plain values, written in the
            format of safetensors; a model goes into ``best.keras`` as ``model.save`` writes it, and
            into ``best.weights.h5`` as ``model.save_weights`` does.

    Raises:
        ScriptError: the name is not valid, or the object cannot be saved.
        CheckpointError: the file cannot be written on this host, because the disk is full, for
            example; an earlier one is untouched.
    """
    ctx = context.current()
    worker = ctx.worker
    if ctx.step.is_period and ctx.step.accumulating:
        worker.warn_once(
            "hvd.save() within a period of hvd.LocalOptimizer saves the weights of rank 0, which "
            "differ from those of the other ranks until the period ends; call it after the loop "
            "over the loader"
        )
    save_file(worker, name, partial(worker.frontend.write_object, name, obj))


def save_file(worker: Worker, name: str, write: Write) -> None:
    """Save a file on rank 0; other ranks do nothing, and need not call it.

    Args:
        name: name of the file; a later file of that name replaces it.
        write: writes the content to the file it is given.

    Raises:
        ScriptError: the name is not valid, or this worker has no rank yet.
        CheckpointError: the file cannot be written on this host; an earlier one is untouched.
    """
    check_name(name)
    worker.check_has_ranks(f"whether this rank writes {name!r}")
    worker.saves.names.add(name)
    if worker.saves.again is not None:
        worker.saves.again[name] = write
    if not worker.rank:
        worker.keep_file(name, write)


def save_again(worker: Worker) -> None:
    """Save what was saved since the epoch has ended, which an earlier rank 0 may not have done."""
    for name, write in (worker.saves.again or {}).items():
        save_file(worker, name, write)
