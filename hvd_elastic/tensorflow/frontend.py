"""The frontend for TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_elastic.tensorflow.collectives import TensorFlowCollectives, reason_of
from hvd_elastic.tensorflow.content import load_checkpoint
from hvd_elastic.training import context


class TensorFlowFrontend:
    """Implements :class:`hvd_elastic.training.frontend.Frontend` for TensorFlow."""

    module = "hvd_elastic.tensorflow"
    horovod = "tensorflow"
    loader = "hvd_elastic.tensorflow.dataset"
    other_loader = "a tf.data.Dataset of your own"

    def collectives(self) -> TensorFlowCollectives:
        """Return Horovod's collectives on tensors."""
        return TensorFlowCollectives()

    def plain(self, value: Any) -> Any:
        """Return a number; reading a tensor waits for its device."""
        return value.numpy().item() if hasattr(value, "numpy") else value

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """See :func:`~hvd_elastic.tensorflow.content.load_checkpoint`."""
        return load_checkpoint(path)

    def failed_collective(self, error: BaseException) -> BaseException | None:
        """Return what to raise for a reduction that failed in a ``tf.function``."""
        if not isinstance(error, tf.errors.OpError):
            return None
        worker = context.current().worker
        averagers: Any = worker.averagers
        raised: list[BaseException] = [a.raised for a in averagers if a.raised is not None]
        if raised:
            return raised[0]
        if not any(averager.reduces(error) for averager in averagers):
            return None
        worker.communicator.graph_ends(failed=True)
        return worker.communicator.translated(reason_of(error))

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return False: a pass that did not fit is not called off with TensorFlow."""
        return False

    def free_memory(self) -> None:
        """Do nothing: TensorFlow's allocator keeps its memory."""
