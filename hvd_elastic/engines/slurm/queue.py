"""The jobs of a run in the queue of Slurm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvd_elastic.engines.slurm.batch import parse_left
from hvd_elastic.engines.slurm.commands import call


@dataclass(frozen=True)
class Job:
    """An allocation in the queue, or granted.

    Attributes:
        job_id: number of the job.
        state: Slurm's word for its state.
        node: its nodes; empty while it waits.
        left_s: time until its limit [s].
        asked: the node that it has asked for by name; empty: it takes any.
    """

    job_id: str
    state: str
    node: str = ""
    left_s: float = math.inf
    asked: str = ""

    @property
    def runs(self) -> bool:
        return self.state == "RUNNING"


_FORMAT = "%A|%T|%N|%L|%n|%o"
_LIVE = "PENDING,CONFIGURING,RUNNING,SUSPENDED"
"""States of a job that has a node or will have one; not that of one that is about to end."""


def queue_of(name: str, script: Path, ask: Callable[..., str] = call) -> list[Job]:
    """Return the jobs of this user that have a name and a batch script.

    The script tells a run from others of the same name, which have another home.

    Args:
        name: name of the jobs.
        script: path of their script, as sbatch was given it.
        ask: calls one of Slurm's commands.

    Raises:
        RunError: Slurm does not answer.
    """
    options = ("--me", f"--name={name}", f"--states={_LIVE}", f"--format={_FORMAT}")
    return parse_queue(ask("squeue", "--noheader", *options), script)


def parse_queue(text: str, script: Path) -> list[Job]:
    r"""Return the jobs with a script that squeue has printed in ``_FORMAT``.

    >>> parse_queue("7|PENDING||1:00:00||/a/b\n8|RUNNING|gpu3|UNLIMITED||/c\n", Path("/a/b"))[0]
    Job(job_id='7', state='PENDING', node='', left_s=3600.0, asked='')
    """
    rows = (line.split("|", 5) for line in text.splitlines())
    return [
        Job(job_id, state, node, parse_left(left), asked)
        for job_id, state, node, left, asked, command in rows
        if command == str(script)
    ]
