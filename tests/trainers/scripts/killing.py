"""Kills a rank of a script at the places that the variable ``KILLS`` names, each once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hvd_elastic.torch as hvd
from hvd_elastic.worker import context

FOLDER = Path(sys.argv[1])
KILLS = json.loads(os.environ.get("KILLS", "[]"))


def pending() -> list[tuple[Path, list]]:
    marks = [(FOLDER / f"killed-{number}", kill) for number, kill in enumerate(KILLS)]
    return [(mark, kill) for mark, kill in marks if not mark.exists()]


def wait_for_the_next_to_die() -> None:
    """Wait in a step of a rank that is alone until another one can join, if one is to die yet."""
    until = time.monotonic() + 60
    worker = context.current().worker
    while pending() and hvd.size() == 1 and not worker.wants_change and time.monotonic() < until:
        time.sleep(0.1)


def may_die(trainer: Any, place: str) -> None:
    """Die in a place of a Trainer of Lightning."""
    if not trainer.sanity_checking and trainer.world_size == 2:
        may_die_in_epoch(trainer.current_epoch, place)


def may_die_in_epoch(now: int, place: str, before: Callable[[], None] = lambda: None) -> None:
    """Die if this rank is one of two, and the next to die in this place, from that epoch on."""
    for mark, (where, epoch, rank) in pending()[:1]:
        if place == where and now >= epoch and hvd.size() == 2 and hvd.rank() == rank:
            mark.touch()
            before()
            os.kill(os.getpid(), signal.SIGKILL)
