"""Ends training early on all ranks after the same step, where the script of one asks for it."""

from __future__ import annotations

import logging

import numpy as np

from hvd_elastic.run_events import TrainingStopped
from hvd_elastic.worker.worker import Worker

log = logging.getLogger(__name__)


def wants_stop(worker: Worker) -> bool:
    """Return whether this rank asks for the end of training, and the ranks have not agreed yet."""
    return bool(worker.stop_reason) and not worker.progress.stopped


def agree_on_stop(worker: Worker, step: int) -> None:
    """End training after ``step``: a collective, called once any rank asks for it.

    The lowest rank that asks gives the reason.
    """
    communicator = worker.communicator
    own = np.frombuffer(f"{worker.stop_reason}\n".encode(), np.uint8).copy()
    told = communicator.gather(own, "hvd_elastic.stop").tobytes().decode().split("\n")
    rank, reason = next((rank, each) for rank, each in enumerate(told) if each)
    worker.progress.stopped = True
    if worker.rank == 0:
        worker.sink.send(TrainingStopped(step, rank, reason))
        if worker.link is None:  # else the leader shows it
            text = "training ends after step %d, as rank %d has asked: %s"
            log.warning(text, step, rank, reason)
