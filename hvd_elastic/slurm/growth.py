"""Grow a run by further allocations of one node each, and give them back."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count, duration_words
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.json_lines import EventFollower
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import RunSummary, take_event
from hvd_elastic.slurm.allocation import Allocation
from hvd_elastic.slurm.batch import Submission, parse_left
from hvd_elastic.slurm.commands import call
from hvd_elastic.slurm.engine import SlurmEngine

_LOOK_S = 5.0
"""Time between two looks at the queue [s]; slurmctld answers one user's jobs in milliseconds."""
_MOST_PENDING = 4
"""Most allocations that wait in the queue at a time: users may submit a limited number of jobs."""
_LOST_S = 60.0
"""How long a lost node may be gone before another one is asked for [s]."""
_LONGEST_PAUSE_S = 7200.0


@dataclass(frozen=True)
class Job:
    """An allocation of one node, in the queue or granted.

    Attributes:
        job_id: number of the job.
        state: Slurm's word for its state.
        node: its node; empty while it waits.
        left_s: time until its limit [s].
    """

    job_id: str
    state: str
    node: str = ""
    left_s: float = math.inf

    @property
    def runs(self) -> bool:
        return self.state == "RUNNING"


_FORMAT = "%A|%T|%N|%L"
_LIVE = "PENDING,CONFIGURING,RUNNING,SUSPENDED"
"""States of a job that has a node or will have one; not that of one that is about to end."""


def parse_queue(text: str) -> list[Job]:
    r"""Return the jobs that squeue has printed in ``_FORMAT``.

    >>> parse_queue("7|PENDING||1:00:00\n8|RUNNING|gpu3|UNLIMITED\n")[0].left_s
    3600.0
    """
    rows = (line.split("|") for line in text.splitlines())
    return [Job(job_id, state, node, parse_left(left)) for job_id, state, node, left in rows]


class Growth:
    """Asks Slurm for further nodes, and gives them back.

    Without a policy, a run has as many nodes as its user allows. With ``--policy goodput`` it asks
    for one more whenever all of its nodes are in use; a node that the policy leaves unused is given
    back, and the next one is asked for after a pause, which doubles each time.

    Args:
        engine: receives the hosts of new allocations.
        submission: how the run was submitted.
        spec: specification of the run.
        tell: called with what is done, in words.
        ask: calls one of Slurm's commands.
    """

    def __init__(
        self,
        engine: SlurmEngine,
        submission: Submission,
        spec: RunSpec,
        tell: Callable[[str], None],
        ask: Callable[..., str] = call,
    ) -> None:
        self.run = RunSummary()
        self.first: tuple[str, ...] = engine.hosts
        """Nodes of the allocation that the run is led in."""
        self._engine = engine
        self._submission = submission
        self._spec = spec
        self._tell = tell
        self._ask = ask
        self._joined: dict[str, str] = {}
        """Nodes of the further allocations in the run, by job."""
        self._leaving: set[str] = set()
        self._lost: dict[str, float] = {}
        """When nodes were lost, by name [monotonic s]."""
        self._unused: dict[str, float] = {}
        """Since when nodes are unused, by name [monotonic s]."""
        self._pause_s = 5 * submission.give_back_after_s
        self._not_before = 0.0

    def note(self, event: dict[str, object], now: float) -> None:
        """Take an event of the run."""
        take_event(self.run, event)
        host = str(event.get("host"))
        if event["kind"] == "host_lost":
            self._lost.setdefault(host, now)
        elif event["kind"] == "agent_started":
            self._lost.pop(host, None)

    def adopt(self) -> None:
        """Take the allocations into the run that its last leader has left.

        Raises:
            RunError: as of :meth:`look`.
        """
        for job in self._queue():
            if job.runs:
                self._join(job)

    def look(self, now: float) -> None:
        """Look at the queue and do what is due.

        Raises:
            RunError: Slurm does not answer, or refuses.
        """
        jobs = {job.job_id: job for job in self._queue()}
        for job_id in [job_id for job_id in self._joined if job_id not in jobs]:
            self._leave(job_id, "its allocation has ended")
        for job in jobs.values():
            if job.runs and job.job_id not in self._joined and job.job_id not in self._leaving:
                self._join(job)
            elif job.job_id in self._joined and job.left_s <= self._submission.leave_before_s:
                self._leave(job.job_id, f"its time limit is {duration_words(job.left_s)} away")
        self._note_use(now)
        for job_id in self._unwanted(now):
            self._leave(job_id, "it is given back")
        self._cancel_left(jobs)
        self._submit([job for job in jobs.values() if job.job_id not in self._leaving], now)

    def end(self) -> None:
        """Give back all further allocations, and those that are waiting."""
        with contextlib.suppress(RunError):
            self._ask("scancel", "--me", f"--name={self._submission.further_name}")

    def _queue(self) -> list[Job]:
        """Return the run's further allocations, granted or not."""
        name = self._submission.further_name
        options = ("--me", f"--name={name}", f"--states={_LIVE}", f"--format={_FORMAT}")
        return parse_queue(self._ask("squeue", "--noheader", *options))

    # -- nodes that come and go ------------------------------------------------------------

    def _join(self, job: Job) -> None:
        if job.node in self._hosts():
            # Two that waited were granted on one node, which has room for both.
            self._tell(f"job {job.job_id} is cancelled: {job.node} is in the run already")
            self._ask("scancel", job.job_id)
            return
        self._joined[job.job_id] = job.node
        self._tell(f"{job.node} joins: job {job.job_id} has started")
        host = Host(job.node, slots=self._submission.slots_per_node)
        self._engine.add(Allocation(job.job_id, (host,)))

    def _leave(self, job_id: str, why: str) -> None:
        node = self._joined.pop(job_id)
        self._lost.pop(node, None)
        self._unused.pop(node, None)
        self._leaving.add(job_id)
        self._tell(f"the run leaves {node}: {why} (job {job_id})")
        self._engine.remove(job_id)

    def _cancel_left(self, jobs: dict[str, Job]) -> None:
        """End the allocations that the run has left."""
        for job_id in [*self._leaving]:
            if job_id not in jobs:
                self._leaving.discard(job_id)
            elif not self._engine.in_use(job_id):
                self._ask("scancel", job_id)

    def _note_use(self, now: float) -> None:
        unused = {*self._hosts()} - {*self.run.generation_hosts}
        self._unused = {name: self._unused.get(name, now) for name in unused}

    def _hosts(self) -> list[str]:
        return [*self.first, *self._joined.values()]

    # -- how many --------------------------------------------------------------------------

    def _unwanted(self, now: float) -> list[str]:
        """Return the allocations to give back: lost for good, unused by the policy, too many."""
        found = []
        for job_id, node in self._joined.items():
            idle_s = now - self._unused.get(node, now)
            if now - self._lost.get(node, now) >= _LOST_S:
                found.append(job_id)
            elif self._spec.policy != "fixed" and idle_s >= self._submission.give_back_after_s:
                found.append(job_id)
                self._not_before = now + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        kept = [job_id for job_id in self._joined if job_id not in found]
        return found + kept[self.wanted(now) :]

    def wanted(self, now: float) -> int:
        """Return how many further nodes the run should have."""
        first = sum(now - self._lost.get(name, now) < _LOST_S for name in self.first)
        limit = self._submission.most
        processes = self.run.scaled_to or self._spec.np or self._spec.max_np
        if self._spec.policy != "fixed":
            uses_all = self.run.size > 0 and not self._unused and now >= self._not_before
            limit = min(limit, first + len(self._joined) + uses_all)
        elif processes is not None:
            all_processes = processes + self._spec.spares
            limit = min(limit, math.ceil(all_processes / self._submission.slots_per_node))
        return max(0, limit - first)

    def _submit(self, jobs: list[Job], now: float) -> None:
        pending = [job for job in jobs if not job.runs]
        missing = self.wanted(now) - len(self._joined) - len(pending)
        for job in pending[: max(0, -missing)]:
            self._ask("scancel", job.job_id)
            self._tell(f"no further node is needed: job {job.job_id} is cancelled")
        new = min(missing, _MOST_PENDING - len(pending))
        for _ in range(new):
            script = str(self._submission.further_script)
            self._ask("sbatch", f"--exclude={','.join(self._hosts())}", script)
        if new > 0:
            self._tell(f"{count(new, 'further node')} asked for")


@contextlib.contextmanager
def growing(growth: Growth, folder: RunFolder, warn: Callable[[str], None]) -> Iterator[None]:
    """Have a run grow, in a thread, until the end of the block."""
    over = threading.Event()

    def follow() -> None:
        follower = EventFollower(folder.events)
        said = ""
        while not over.wait(_LOOK_S):
            try:
                for event in follower.poll():
                    growth.note(event, time.monotonic())
                growth.look(time.monotonic())
                said = ""
            except (RunError, OSError) as error:  # tried again at the next look
                if str(error) != said:
                    warn(f"the run does not grow for now: {error}")
                said = str(error)

    thread = threading.Thread(target=follow, name="growth", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _LOOK_S)
