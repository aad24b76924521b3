"""What all parts of a leader share of the run that they lead."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_elastic.control.loop import Loop
from hvd_elastic.leader.agents.agents import Agents
from hvd_elastic.leader.failover.fencing import Fence
from hvd_elastic.leader.hostfile_watch import HostfileWatch
from hvd_elastic.leader.input_hosts import InputHosts
from hvd_elastic.leader.journal import Journal
from hvd_elastic.leader.progress import TrainingProgress
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.leader.workers import Workers
from hvd_elastic.records.run_folder import RunFolder


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
    progress: TrainingProgress
