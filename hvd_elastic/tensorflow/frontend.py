"""The frontend for TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow.collectives import TensorFlowCollectives, reason_of
from hvd_elastic.tensorflow.content import load_checkpoint
from hvd_elastic.tensorflow.elastic import training
from hvd_elastic.tensorflow.export import exported
from hvd_elastic.tensorflow.saving import write_object
from hvd_elastic.training import context
from hvd_elastic.training.frontend import Frontend


class TensorFlowFrontend(Frontend):
    """The part of TensorFlow that the training context needs."""

    module = "hvd_elastic.tensorflow"
    horovod = "tensorflow"
    loader = "hvd_elastic.tensorflow.dataset"
    other_loader = "a tf.data.Dataset of your own"

    def collectives(self) -> TensorFlowCollectives:
        return TensorFlowCollectives()

    def plain(self, value: Any) -> Any:
        return value.numpy().item() if hasattr(value, "numpy") else value

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        return load_checkpoint(path)

    def failed_collective(self, error: BaseException) -> BaseException | None:
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
        return False  # a pass that did not fit is not called off with TensorFlow

    def free_memory(self) -> None:
        """Do nothing: TensorFlow's allocator keeps its memory."""

    def training(
        self, state: Any, warmup: Callable[[], object] | None
    ) -> AbstractContextManager[None]:
        return training(state, warmup)

    def script_tensor(self, kind: str, tensor: Any, name: str) -> tf.Tensor:
        if not tf.executing_eagerly():
            raise ScriptError(
                f"hvd.{kind}(..., {name!r}) is called in a tf.function. If it failed there, "
                "variables could be left between two steps: return the tensor from the function, "
                f"and call hvd.{kind} on what it returns"
            )
        return tf.convert_to_tensor(tensor)

    def write_object(self, name: str, obj: Any, file: HashingWriter) -> None:
        write_object(name, obj, file)

    def exported(self, model: Any, example: Any, name: str) -> Callable[[Path], Any]:
        return exported(model, example, name)
