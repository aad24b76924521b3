"""Loads weights on the ranks whose host has the file, for all ranks and every frontend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvd_elastic.errors import CheckpointError
from hvd_elastic.training import context
from hvd_elastic.training.model_source import find_source
from hvd_elastic.training.script_collectives import script_collective

_NAME = "weights"


def load_on_ranks(
    source: str | Path, load: Callable[[Path], object], send: Callable[[Any, int], object]
) -> None:
    """Load weights on a rank whose host has them, and send them to all; all ranks call it.

    Args:
        source: see :func:`~hvd_elastic.training.model_source.find_source`; looked for on each host.
        load: loads the weights of a file into the model.
        send: sends the model of a rank to all, given the communicator and that rank.

    Raises:
        CheckpointError: no host has the weights, or they do not fit the model.
        ScriptError: this worker has no rank yet.
    """
    context.current().worker.check_has_ranks("which rank loads the weights")
    path, why = None, ""
    try:
        path = find_source(source)
    except CheckpointError as error:
        why = str(error)
    with script_collective("load_model", _NAME) as communicator:
        rows = communicator.gather(np.array([int(path is not None)]), f"user.{_NAME}")
        found = np.flatnonzero(rows).tolist()
        if not found:
            raise CheckpointError(
                f"no host has the weights. On this one: {why}. Copy them to one of the hosts, to "
                "the same path, with: copyclust HOSTFILE FILE PATH (a checkpoint is a manifest "
                "step-….json with its shards beside it)"
            )
        if communicator.rank == found[0]:
            assert path is not None
            load(path)
        if communicator.size > 1:
            send(communicator, found[0])
