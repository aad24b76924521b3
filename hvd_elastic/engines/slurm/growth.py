"""Further allocations of a run, of one node each, as what :mod:`engines.growth` asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hvd_elastic.engines.growth import Grant, Growth, Limits, growing
from hvd_elastic.engines.slurm.allocation import RUNNING, Allocation, call, gres_of_nodes
from hvd_elastic.engines.slurm.batch import Submission, parse_left
from hvd_elastic.engines.slurm.engine import SlurmEngine
from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder

_FORMAT = "%A|%T|%N|%L|%n|%o"
_LIVE = "PENDING,CONFIGURING,RUNNING,SUSPENDED"
"""States of a job that has a node or will have one; not that of one that is about to end."""


def queue_of(name: str, script: Path, ask: Callable[..., str] = call) -> list[Grant]:
    """Return the jobs of this user that have a name and a batch script.

    The script tells a run from others of the same name, which have another home.

    Args:
        script: path of their script, as sbatch was given it.
        ask: calls one of Slurm's commands.

    Raises:
        RunError: Slurm does not answer.
    """
    options = ("--me", f"--name={name}", f"--states={_LIVE}", f"--format={_FORMAT}")
    return parse_queue(ask("squeue", "--noheader", *options), script)


def parse_queue(text: str, script: Path) -> list[Grant]:
    r"""Return the jobs with a script that squeue has printed in ``_FORMAT``.

    >>> parse_queue("7|PENDING||1:00:00||/a/b\n8|RUNNING|gpu3|UNLIMITED||/c\n", Path("/a/b"))[0]
    Grant(grant_id='7', state='PENDING', host='', left_s=3600.0, asked='', runs=False)
    """
    rows = (line.split("|", 5) for line in text.splitlines())
    return [
        Grant(job_id, state, node, parse_left(left), asked, state in RUNNING)
        for job_id, state, node, left, asked, command in rows
        if command == str(script)
    ]


class SlurmOwner:
    """Slurm's queue, as far as it has further allocations of a run.

    Args:
        engine: receives the nodes of new allocations.
        call_slurm: calls one of Slurm's commands.
    """

    host_word, grant_word = "node", "job"
    start_s: float | None = None

    def __init__(
        self, engine: SlurmEngine, submission: Submission, call_slurm: Callable[..., str] = call
    ) -> None:
        self._engine, self._submission, self._call = engine, submission, call_slurm

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._engine.hosts

    def list(self) -> list[Grant]:
        submission = self._submission
        return queue_of(submission.further_name, submission.further_script, self._call)

    def ask(self, without: Sequence[str], named: str) -> None:
        excluded = ",".join([*self._submission.exclude, *without])
        options = [f"--exclude={excluded}"] if excluded else []
        options += [f"--nodelist={named}"] if named else []
        self._call("sbatch", *options, str(self._submission.further_script))

    def cancel(self, grant_ids: Sequence[str]) -> None:
        self._call("scancel", *grant_ids)

    def join_host(self, grant: Grant) -> None:
        node = Host(grant.host, slots=self._submission.slots_per_node)
        gres = gres_of_nodes(grant.grant_id, self._call)
        self._engine.add_allocation(Allocation(grant.grant_id, (node,), gres=gres))

    def leave_host(self, grant_id: str, *, is_lost: bool = False) -> None:
        self._engine.remove_job(grant_id)

    def in_use(self, grant_id: str) -> bool:
        return self._engine.in_use(grant_id)


def growth_of(
    engine: SlurmEngine,
    submission: Submission,
    spec: RunSpec,
    tell: Callable[[str], None],
    call_slurm: Callable[..., str] = call,
) -> Growth:
    """Return what has a submitted run grow; see :class:`hvd_elastic.engines.growth.Growth`."""
    limits = Limits(
        submission.most,
        submission.slots_per_node,
        submission.leave_before_s,
        submission.give_back_after_s,
        submission.nodelist,
    )
    return Growth(SlurmOwner(engine, submission, call_slurm), limits, spec, tell)


def give_back(submission: Submission, call_slurm: Callable[..., str] = call) -> None:
    """Give back all further allocations of a run, and those that are waiting."""
    with contextlib.suppress(RunError):
        jobs = queue_of(submission.further_name, submission.further_script, call_slurm)
        if jobs:
            call_slurm("scancel", *(job.grant_id for job in jobs))


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
        submission, spec, tell: see :func:`growth_of`.

    Raises:
        RunError: Slurm does not answer.
    """
    engine = SlurmEngine(folder, allocation)
    growth = growth_of(engine, submission, spec, tell)
    growth.adopt()
    with growing(growth, folder, tell):
        yield engine
