"""What all parts of a leader share of the run that they lead."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvd_elastic.control.loop import Loop
from hvd_elastic.control.progress import Position
from hvd_elastic.leader.agents.agents import Agents
from hvd_elastic.leader.failover.fencing import Fence
from hvd_elastic.leader.hostfile_watch import HostfileWatch
from hvd_elastic.leader.input_hosts import InputHosts
from hvd_elastic.leader.journal import Journal
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.leader.workers import Workers
from hvd_elastic.records.run_folder import RunFolder

_START = Position(0, 0, 0, 0)  # before the first step


@dataclass
class TrainingProgress:
    """The progress of training as far as the leader knows it.

    Attributes:
        reached: newest position that a worker reported.
        is_exact: whether training has not gone on from there, as far as is known: metrics come less
            often than steps, and who crashes tells nothing more.
        written: position of the newest checkpoint of which a worker has written its shard.
        is_known: False after a takeover of workers, until they report their position.
        stopped: why the script has ended training early; empty: it has not.
    """

    reached: Position = _START
    is_exact: bool = True
    written: Position = _START
    is_known: bool = True
    stopped: str = ""

    def passed(self, progress: Position) -> None:
        """Note where training is, and goes on."""
        self.reached, self.is_exact = progress, False

    def ended_at(self, progress: Position | None) -> None:
        """Note where a worker has ended its part, unless another one was further."""
        if progress is not None and progress.step >= self.reached.step:
            self.reached, self.is_exact = progress, True


@dataclass(frozen=True)
class LedRun:
    """A run as the parts of its leader share it; all of it is used in the leader's loop.

    Attributes:
        spec: specification of the run.
        folder: run folder, whose lock this process holds.
        fence: identity of this leader, and whether it has to end for another one.
        loop: loop of the leader.
        journal: records events, readings of the data set, and the output of rank 0.
        hostfile: hosts of the run.
        agents: connections to the agents.
        workers: place and log of each worker.
        readers: input hosts.
        progress: how far training is.
    """

    spec: RunSpec
    folder: RunFolder
    fence: Fence
    loop: Loop
    journal: Journal
    hostfile: HostfileWatch
    agents: Agents
    workers: Workers
    readers: InputHosts
    progress: TrainingProgress = field(default_factory=TrainingProgress)
