"""Sends a worker's messages to its agent, or writes them to files in a run without a leader."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from pathlib import Path
from typing import Any

from hvd_elastic.checkpoint.saved import SAVED_FOLDER
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.records.events import append_event, as_record
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.tensorboard import TensorBoardWriter, check_tensorboard
from hvd_elastic.run_events import Event, RescaleFinished, Restored, RunEvent
from hvd_elastic.wire import messages as msg
from hvd_elastic.worker.agent_link import AgentLink

log = logging.getLogger(__name__)


class Sink:
    """Receiver of a worker's messages; this base class drops them.

    Attributes:
        audit: whether a run without a leader records the indices that it reads.
        checkpoint_every_s: checkpoint interval of a run without a leader [s]; 0: no checkpoints.
        checkpoint_folder: folder for those checkpoints; None: no checkpoints.
        saved_folder: folder for files that the script of a run without a leader saves.
    """

    audit = False
    checkpoint_every_s = 0.0
    checkpoint_folder: str | None = None
    saved_folder: str = SAVED_FOLDER

    def send(self, message: msg.WorkerToAgent) -> None:
        """Send, write or drop one message of this worker."""


class AgentSink(Sink):
    """Sends messages to the leader, through the agent."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link

    def send(self, message: msg.WorkerToAgent) -> None:
        self._link.send(message)


class FileSink(Sink):
    """Writes messages to a folder laid out like a run folder, for runs without a leader.

    Set ``HVD_ELASTIC_RUN_FOLDER`` to use it with plain ``python`` or ``horovodrun``: metrics go to
    ``events.jsonl``; with ``HVD_ELASTIC_AUDIT=1`` the indices read go to ``audit.jsonl``; with
    ``HVD_ELASTIC_CHECKPOINT_EVERY=SECONDS`` checkpoints go to ``checkpoints/``; with
    ``HVD_ELASTIC_TENSORBOARD=1`` metrics go to ``tensorboard/`` too. Files that the script saves go
    to ``saved/``.

    Raises:
        UsageError: one of these variables has a value that cannot be used, or TensorBoard output is
            asked for and the package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"HVD_ELASTIC_RUN_FOLDER={folder}: this folder cannot be made: {error.strerror}. "
                "Name one in a place where you may write"
            ) from error
        self.audit = os.environ.get("HVD_ELASTIC_AUDIT") == "1"
        self.checkpoint_every_s = _checkpoint_every_s()
        self.checkpoint_folder = str(folder / "checkpoints")
        self.saved_folder = str(folder / SAVED_FOLDER)
        self._logs: dict[str, EventLog] = {}
        self._board: TensorBoardWriter | None = None
        if os.environ.get("HVD_ELASTIC_TENSORBOARD") == "1":
            check_tensorboard("HVD_ELASTIC_TENSORBOARD=1")
            # All ranks create a writer; only rank 0 sends metrics, so only it creates a file.
            self._board = TensorBoardWriter(folder / "tensorboard", log.warning)

    def send(self, message: msg.WorkerToAgent) -> None:
        match message:
            case msg.CheckpointWritten() | msg.FileSaved():
                self._record(message.event())
            case RescaleFinished():
                pass  # there is one generation
            case RunEvent():
                self._record(message)
            case msg.Dataset() | msg.Used() if self.audit:
                self._audit(*message.as_record())
        if isinstance(message, Restored) and self.audit:
            self._audit(message.kind, as_record(message))

    def _record(self, event: Event) -> None:
        try:
            append_event(self._log("events.jsonl"), event)
        except RunError as error:
            log.warning("%s", error)
        if self._board is not None:
            self._board.write_metrics(event)

    def _audit(self, kind: str, fields: dict[str, Any]) -> None:
        try:
            self._log("audit.jsonl").append(kind, fields)
        except RunError as error:
            log.warning("%s", error)

    def _log(self, name: str) -> EventLog:
        if name not in self._logs:  # most ranks have nothing to record
            self._logs[name] = EventLog(self._folder / name)
        return self._logs[name]


def _checkpoint_every_s() -> float:
    told = os.environ.get("HVD_ELASTIC_CHECKPOINT_EVERY") or "0"
    with contextlib.suppress(ValueError):
        if 0 <= (every_s := float(told)) < math.inf:
            return every_s
    raise UsageError(
        f"HVD_ELASTIC_CHECKPOINT_EVERY={told}: it must be the time between two checkpoints in "
        "seconds, without a unit, such as 30; 0 for no checkpoints"
    )


def open_sink(link: AgentLink | None) -> Sink:
    """Return the sink of this process."""
    if link is not None:
        return AgentSink(link)
    folder = os.environ.get("HVD_ELASTIC_RUN_FOLDER")
    return FileSink(Path(folder)) if folder else Sink()
