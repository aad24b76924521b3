"""Loads trained weights into a model, for every frontend: ``hvd.load_model``."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hvd_elastic.communicator.interface import RingRank
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.script.collectives import script_collective
from hvd_elastic.script.model_source import find_source
from hvd_elastic.wire.messages import SAVED_NAME
from hvd_elastic.worker import context

Model = TypeVar("Model")
_NAME = "weights"


class ModelLoader(ABC):
    """Loads trained weights into models of a framework."""

    @abstractmethod
    def fill(self, model: Any, path: Path, name: str) -> None:
        """Set a model to the weights in a file.

        Args:
            path: manifest of a checkpoint, or a file of ``hvd.save`` or the framework.
            name: name of the model in it.

        Raises:
            CheckpointError: they are damaged or of another model, which is unchanged.
        """

    @abstractmethod
    def tensors(self, model: Any) -> list[Any]:
        """Return the live tensors of a model, for :meth:`Communicator.broadcast`."""

    def ready(self, model: Any) -> None:  # noqa: B027  (most frameworks have one mode)
        """Put a model that is loaded into the mode for inference."""

    def load_model(
        self, source: str | Path, model: Model, *, name: str = "model", share: bool = False
    ) -> Model:
        """Load trained weights into a model for inference; works without ``init()``.

        Args:
            source: where the weights are:

                - a run, by its id or the path of its folder: its newest valid checkpoint;
                - a folder of checkpoints (``--checkpoint-dir``): the newest valid one;
                - the manifest of a checkpoint, ``step-….json``;
                - in the script that saved it: the name that it gave to ``hvd.save``. Rank 0 loads
                  the newest file of that name, which is brought to its host; other ranks get it by
                  ``share=True``;
                - a file of ``hvd.save``; with PyTorch one of ``torch.save``: a ``state_dict()``, or
                  a dict with one under ``name`` (for ``"model"`` also ``"state_dict"`` or
                  ``"model_state_dict"``); with TensorFlow one that Keras wrote.

                Prefixes that DDP (``module.``) or ``torch.compile`` add to keys do not matter, nor
                do the numbers that Keras adds to names of layers.
            model: module of PyTorch, whose parameters and buffers are replaced on the devices where
                they are, and whose own hooks of ``load_state_dict`` may rename keys; or model of
                TensorFlow that is built.
            name: name of the model in the ``State`` of the training script, or in the saved dict.
            share: all ranks call it, in the function under ``hvd.run`` or after it; one whose host
                has the weights sends them to the others.

        Returns:
            ``model``, with PyTorch in evaluation mode (``model.eval()``).

        Raises:
            CheckpointError: there is nothing to load, it is damaged, it is of another model, or
                ``model`` has no memory yet (not built, or on the meta device); then ``model`` is
                unchanged.
            ScriptError: a rank other than 0 loads what the script saved without ``share=True``.
        """
        if share:
            tensors = self.tensors(model)
            _load_on_ranks(source, lambda path: self.fill(model, path, name), tensors)
        else:
            with saved_file(source) as path:
                self.fill(model, path, name)
        self.ready(model)
        return model


def _load_on_ranks(
    source: str | Path, load: Callable[[Path], object], tensors: Sequence[Any]
) -> None:
    """Load weights on a rank whose host has them, and send them to all; all ranks call it.

    Args:
        source: see :func:`~hvd_elastic.script.model_source.find_source`; looked for on each host.
        load: loads the weights of a file into the model.
        tensors: live tensors of the model.

    Raises:
        CheckpointError: no host has the weights, or they do not fit the model.
        ScriptError: this worker has no rank yet.
    """
    context.current().worker.check_has_ranks("which rank loads the weights")
    path, why = None, ""
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(saved_file(source, shared=True))
        except CheckpointError as error:
            why = str(error)
        _send_from_first(path, why, load, tensors)


def _send_from_first(
    path: Path | None, why: str, load: Callable[[Path], object], tensors: Sequence[Any]
) -> None:
    """Load weights on the first rank that has found them, and send them to all."""
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
            communicator.broadcast(tensors, RingRank(found[0]))


@contextlib.contextmanager
def saved_file(source: str | Path, *, shared: bool = False) -> Iterator[Path]:
    """Give the file that ``source`` names, on this host.

    Args:
        source: see :meth:`ModelLoader.load_model`.
        shared: whether rank 0 sends a file that the script saved to this rank.

    Raises:
        CheckpointError: there is none, or it could not be brought here.
        ScriptError: the script saved it, and this rank is not the one that loads it.
    """
    name = str(source)
    worker = context.current().worker if context.is_initialized() else None
    if worker is None or not worker.has_ranks or not re.search(SAVED_NAME, name):
        yield find_source(source)
    elif worker.rank:
        if name not in worker.saves.names:
            yield find_source(source)
        elif shared:
            raise CheckpointError(f"rank 0 has the file {name!r} of hvd.save")
        else:
            raise ScriptError(
                f"load_model({name!r}) was called on rank {worker.rank}: rank 0 has "
                "what hvd.save has saved. Call it on all ranks with share=True, and rank 0 sends "
                "them the weights; or on rank 0 alone"
            )
    elif worker.link is None:
        stored = Path(worker.sink.saved_folder, name)
        yield stored if stored.is_file() else find_source(source)
    else:
        brought = worker.link.bring_saved(name)
        if brought.error:
            raise CheckpointError(f"{name!r} cannot be loaded: {brought.error}")
        if not brought.path:
            yield find_source(source)
        else:
            try:
                yield Path(brought.path)
            finally:
                Path(brought.path).unlink(missing_ok=True)
