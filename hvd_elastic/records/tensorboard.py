"""A run's metrics as TensorBoard reads them.

Made of the run's records, so whoever keeps those writes it: the leader, or rank 0 of a run without
one. Rescales and the death of any worker leave it alone, and the next leader adds a file of its own
beside the first. It uses the ``tensorboard`` package as ``torch.utils.tensorboard`` does, without
its writer, which needs PyTorch: the leader does without.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hvd_elastic.errors import UsageError
from hvd_elastic.records.json_lines import Record

__all__ = ["TensorBoardWriter", "check_tensorboard", "scalars"]

_TAGS = {
    **{name: f"goodput/{name}" for name in ("throughput", "efficiency", "goodput", "noise_scale")},
    "size": "size/world_size",
    "global_batch_size": "size/global_batch_size",
}
_PLACES = frozenset({"t", "mono", "kind", "step", "position", "examples", "passes"})
_RETRY_S = 30.0


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Tag → value of a ``metrics`` record.

    What the script reports, loss and learning rate are under ``train/``, unless the script's own
    name has a group already.

    >>> scalars({"kind": "metrics", "step": 9, "size": 2, "loss": 0.5, "val/accuracy": 0.9})
    {'size/world_size': 2.0, 'train/loss': 0.5, 'val/accuracy': 0.9}
    """
    found = {}
    for name, value in record.items():
        if name in _PLACES or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        tag = name if "/" in name else _TAGS.get(name, f"train/{name}")
        found[tag] = float(value)
    return found


def check_tensorboard(asked_by: str) -> None:
    """Make sure that the package is there, before training counts on it.

    Args:
        asked_by: the option or variable that wants it, for the message.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{asked_by} needs the package tensorboard, which is not installed here: "
            "pip install 'hvd-elastic[tensorboard]'"
        ) from error


class TensorBoardWriter(AbstractContextManager["TensorBoardWriter"]):
    """Adds the metrics of a run to a folder of event files.

    Each writer begins a file with its first record. Where training goes back to an earlier step,
    since it went on from a checkpoint, TensorBoard is told to forget what came after that.

    Args:
        folder: for ``tensorboard --logdir``; made when missing.
        warn: told once that the disk cannot take the file; training goes on, and writing is tried
            again later.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn
        self._records: Any = None
        self._step: int | None = None
        self._warned = False
        self._retry_at = 0.0
        self._numbers = itertools.count()

    def note(self, record: Record) -> None:
        """Write what a record has for TensorBoard; most kinds have nothing."""
        if record["kind"] != "metrics" or record["t"] < self._retry_at:
            return
        try:
            for event in self._events(record):
                self._records.write(event)
            self._records.flush()
        except OSError as error:
            # What is half there would end the file for its readers.
            self.close()
            self._retry_at = record["t"] + _RETRY_S
            if not self._warned:
                self._warned = True
                self._warn(
                    f"cannot write for TensorBoard into {self._folder}: {error.strerror}. The run "
                    "goes on without; free space on that disk or mend its permissions."
                )

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; another record begins another one."""
        records, self._records, self._step = self._records, None, None
        if records is not None:
            with contextlib.suppress(OSError):  # it was flushed with every record
                records.close()

    def _events(self, record: Record) -> Iterator[bytes]:
        """Serialised, in order."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        wall_time, step = record["t"], record["step"]
        if self._records is None:
            self._records = self._open()
            yield Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString()
        if self._step is None or step < self._step:
            start = SessionLog(status=SessionLog.START)
            yield Event(wall_time=wall_time, step=step, session_log=start).SerializeToString()
        self._step = step
        values = [
            Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record).items()
        ]
        yield Event(
            wall_time=wall_time, step=step, summary=Summary(value=values)
        ).SerializeToString()

    def _open(self) -> Any:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        return RecordWriter((self._folder / f"events.out.tfevents.{name}").open("xb"))
