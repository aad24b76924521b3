"""Grow a run by further allocations of one node each, and give them back."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count, duration_words
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import RunSummary, take_events
from hvd_elastic.run_events import AgentStarted, HostLost, ReadEvent
from hvd_elastic.slurm.allocation import Allocation, gres_of_nodes
from hvd_elastic.slurm.batch import START_S, Submission
from hvd_elastic.slurm.commands import call
from hvd_elastic.slurm.engine import SlurmEngine
from hvd_elastic.slurm.queue import Job, queue_of

_LOOK_S = 5.0
"""Time between two looks at the queue [s]; slurmctld answers one user's jobs in milliseconds."""
_MOST_PENDING = 4
"""Most allocations that wait in the queue at a time: users may submit a limited number of jobs."""
_LOST_S = 60.0
"""How long a lost node may be gone before another one is asked for [s]."""
_LONGEST_PAUSE_S = 7200.0


def _nearly_over(job: Job) -> str:
    return f"its time limit is {duration_words(job.left_s)} away"


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
        self._leaving: dict[str, str] = {}
        """Nodes of allocations that the run has left or not taken, by job, until they end."""
        self._lost: dict[str, float] = {}
        """When nodes were lost, by name [monotonic s]."""
        self._unused: dict[str, float] = {}
        """Since when nodes are unused, by name [monotonic s]."""
        self._pause_s = 5 * submission.give_back_after_s
        self._not_before = 0.0

    def note(self, event: ReadEvent, now: float) -> None:
        """Take an event of the run."""
        take_events(self.run, [event])
        match event:
            case HostLost(host=host):
                self._lost.setdefault(host, now)
            case AgentStarted(host=host):
                self._lost.pop(host, None)

    def adopt(self) -> None:
        """Take the allocations into the run that its last leader has left.

        Raises:
            RunError: as of :meth:`look`.
        """
        self._take_started({job.job_id: job for job in self._queue()}, time.monotonic())

    def look(self, now: float) -> None:
        """Look at the queue and do what is due.

        Raises:
            RunError: Slurm does not answer, or refuses.
        """
        jobs = {job.job_id: job for job in self._queue()}
        self._leaving = {each: node for each, node in self._leaving.items() if each in jobs}
        for job_id in [job_id for job_id in self._joined if job_id not in jobs]:
            self._leave(job_id, "its allocation has ended")
        for job in jobs.values():
            if job.job_id in self._joined and job.left_s <= self._submission.leave_before_s:
                self._leave(job.job_id, _nearly_over(job))
        self._take_started(jobs, now)
        self._note_use(now)
        for job_id in self._unwanted(now):
            self._leave(job_id, "it is given back")
        for job_id in self._leaving.keys() & jobs.keys():
            if not self._engine.in_use(job_id):
                self._ask("scancel", job_id)
        self._submit([job for job in jobs.values() if job.job_id not in self._leaving], now)

    def _queue(self) -> list[Job]:
        """Return the run's further allocations, granted or not; those with most time come first."""
        submission = self._submission
        jobs = queue_of(submission.further_name, submission.further_script, self._ask)
        return sorted(jobs, key=lambda job: job.left_s, reverse=True)

    # -- nodes that come and go ------------------------------------------------------------

    def _take_started(self, jobs: Mapping[str, Job], now: float) -> None:
        """Take the allocations that have started into the run, or cancel them."""
        ending = {*self._leaving.values()}
        ending |= {node for each, node in self._joined.items() if not self._lasts(jobs[each])}
        for job in jobs.values():
            if not job.runs or job.job_id in self._joined or job.job_id in self._leaving:
                continue
            if not self._lasts(job):
                self._cancel(job, _nearly_over(job))
            elif job.node in ending:
                pass  # it is taken when the other allocation on its node has ended
            elif job.node in self._hosts(now):
                # Two that waited were granted on one node, which has room for both.
                self._cancel(job, f"{job.node} is in the run already")
            else:
                self._join(job)

    def _join(self, job: Job) -> None:
        self.first = tuple(name for name in self.first if name != job.node)  # lost, and back
        self._lost.pop(job.node, None)
        self._joined[job.job_id] = job.node
        self._tell(f"{job.node} joins: job {job.job_id} has started")
        host = Host(job.node, slots=self._submission.slots_per_node)
        gres = gres_of_nodes(job.job_id, self._ask)
        self._engine.add(Allocation(job.job_id, (host,), gres=gres))

    def _lasts(self, job: Job) -> bool:
        """Return whether there is time to train in an allocation before it is left again."""
        return job.left_s >= self._submission.leave_before_s + START_S

    def _cancel(self, job: Job, why: str) -> None:
        self._tell(f"job {job.job_id} is cancelled: {why}")
        self._leaving[job.job_id] = job.node

    def _leave(self, job_id: str, why: str) -> None:
        node = self._joined.pop(job_id)
        self._lost.pop(node, None)
        self._unused.pop(node, None)
        self._leaving[job_id] = node
        self._tell(f"the run leaves {node}: {why} (job {job_id})")
        self._engine.remove(job_id)

    def _note_use(self, now: float) -> None:
        unused = {*self._hosts(now)} - {*self.run.generation_hosts}
        self._unused = {name: self._unused.get(name, now) for name in unused}

    def _hosts(self, now: float) -> list[str]:
        """Return the nodes of the run, without those of the first allocation that stay lost."""
        return [*self._of_first(now), *self._joined.values()]

    def _of_first(self, now: float) -> list[str]:
        return [name for name in self.first if now - self._lost.get(name, now) < _LOST_S]

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
        first = len(self._of_first(now))
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
        coming = [job for job in jobs if job.job_id not in self._joined]
        missing = self.wanted(now) - len(self._joined) - len(coming)
        for job in pending[: max(0, -missing)]:
            self._ask("scancel", job.job_id)
            self._tell(f"no further node is needed: job {job.job_id} is cancelled")
        new = min(missing, _MOST_PENDING - len(pending))
        hosts = self._hosts(now)
        excluded = ",".join([*self._submission.exclude, *hosts])
        exclude = [f"--exclude={excluded}"] if excluded else []
        there = {*hosts, *(job.asked for job in coming)}
        named = [name for name in self._submission.nodelist if name not in there]
        for number in range(new):
            nodelist = [f"--nodelist={name}" for name in named[number : number + 1]]
            self._ask("sbatch", *exclude, *nodelist, str(self._submission.further_script))
        if new > 0:
            self._tell(f"{count(new, 'further node')} asked for")


def give_back(submission: Submission, ask: Callable[..., str] = call) -> None:
    """Give back all further allocations of a run, and those that are waiting."""
    with contextlib.suppress(RunError):
        jobs = queue_of(submission.further_name, submission.further_script, ask)
        if jobs:
            ask("scancel", *(job.job_id for job in jobs))


@contextlib.contextmanager
def growing_engine(
    folder: RunFolder,
    allocation: Allocation,
    submission: Submission,
    spec: RunSpec,
    tell: Callable[[str], None],
) -> Iterator[SlurmEngine]:
    """Yield the hosts of a run, which grows by further allocations until the end of the block.

    Args:
        folder: folder of the run, whose lock this process holds.
        allocation: the allocation that the run is led in.
        submission, spec, tell: see :class:`Growth`.

    Raises:
        RunError: Slurm does not answer.
    """
    engine = SlurmEngine(folder, allocation)
    growth = Growth(engine, submission, spec, tell)
    growth.adopt()
    with _growing(growth, folder, tell):
        yield engine


@contextlib.contextmanager
def _growing(growth: Growth, folder: RunFolder, warn: Callable[[str], None]) -> Iterator[None]:
    over = threading.Event()

    def follow() -> None:
        follower = folder.follow_events()
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
