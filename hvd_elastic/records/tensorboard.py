"""Writes the metrics of a run for TensorBoard.

The process that writes the run's records writes these files too: the leader, or rank 0 of a run
without a leader. So rescales and deaths of workers do not affect them; another leader adds a file
of its own. The writer of ``torch.utils.tensorboard`` is not used, because the leader does not need
PyTorch; only the ``tensorboard`` package is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hvd_elastic.errors import UsageError
from hvd_elastic.records.events import as_record
from hvd_elastic.run_events import Metrics, RunEvent

# Tags of the library's metrics; all others get the group "train".
_TAGS = {
    **{name: f"goodput/{name}" for name in ("throughput", "efficiency", "goodput", "noise_scale")},
    "size": "size/world_size",
    "global_batch_size": "size/global_batch_size",
}
# Fields of an event that are not metrics.
_PLACES = frozenset({"t", "mono", "kind", "step", "position", "examples", "passes"})
_RETRY_S = 30.0
"""Time before writing is tried again after an error [s], as a full disk rarely empties at once."""


def scalars(event: Metrics) -> dict[str, float]:
    """Return the values of a ``metrics`` event by TensorBoard tag.

    The loss, the learning rate and the script's own metrics get the group ``train/``, unless their
    name has a group already.

    >>> scalars(Metrics(9, 1, 8, 72, 2, values={"loss": 0.5, "val/accuracy": 0.9}))
    {'train/epoch': 1.0, 'size/world_size': 2.0, 'train/loss': 0.5, 'val/accuracy': 0.9}
    """
    found = {}
    for name, value in as_record(event).items():
        if name in _PLACES or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        tag = name if "/" in name else _TAGS.get(name, f"train/{name}")
        found[tag] = float(value)
    return found


def check_tensorboard(asked_by: str) -> None:
    """Check that the package ``tensorboard`` is installed, before training starts.

    Args:
        asked_by: option or environment variable that needs it, for the message.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{asked_by} needs the package tensorboard, which is not installed here: "
            "pip install tensorboard"
        ) from error


class TensorBoardWriter(AbstractContextManager["TensorBoardWriter"]):
    """Adds the metrics of a run to a folder of event files.

    Each writer creates a file for its first record. When training goes back to the earlier step of
    a checkpoint, an event makes TensorBoard discard the later steps.

    Args:
        folder: folder for ``tensorboard --logdir``; created if missing.
        warn: called once when the files cannot be written; writing is tried again later.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn
        self._records: Any = None
        self._step: int | None = None
        self._warned = False
        self._retry_at = 0.0
        self._numbers = itertools.count()

    def write_metrics(self, event: RunEvent) -> None:
        """Write the metrics of an event; events of other kinds are ignored."""
        if not isinstance(event, Metrics) or event.t < self._retry_at:
            return
        try:
            for record in self._serialized(event):
                self._records.write(record)
            self._records.flush()
        except OSError as error:
            # Readers would stop at an incomplete event, so a new file is begun.
            self.close()
            self._retry_at = event.t + _RETRY_S
            if not self._warned:
                self._warned = True
                self._warn(
                    f"cannot write for TensorBoard into {self._folder}: {error.strerror}. The run "
                    "continues without; free space on that disk or fix its permissions."
                )

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the next record begins another one."""
        records, self._records, self._step = self._records, None, None
        if records is not None:
            with contextlib.suppress(OSError):  # every record was flushed already
                records.close()

    def _serialized(self, event: Metrics) -> Iterator[bytes]:
        """Yield the serialized TensorBoard events for an event, in order."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        wall_time, step = event.t, event.step
        if self._records is None:
            self._records = self._open()
            yield Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString()
        if self._step is None or step < self._step:
            start = SessionLog(status=SessionLog.START)
            yield Event(wall_time=wall_time, step=step, session_log=start).SerializeToString()
        self._step = step
        values = [
            Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(event).items()
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
