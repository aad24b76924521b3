"""Implement ``hvd-elastic slurm``: submit a run, and lead it in the first of its allocations."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import typer

from hvd_elastic.cli.engines import tell
from hvd_elastic.cli.engines.slurm_options import (
    NOT_HERE,
    OF_ALLOCATIONS,
    SubmitOptions,
    check_submission,
    parse_nodes,
)
from hvd_elastic.cli.options import command, given_options, group_of
from hvd_elastic.cli.runs.run import lead
from hvd_elastic.cli.start import INTERRUPTED
from hvd_elastic.config import runs_folder
from hvd_elastic.engines.slurm.allocation import call, own_allocation, require_commands
from hvd_elastic.engines.slurm.batch import Submission
from hvd_elastic.engines.slurm.growth import give_back, growing_engine, queue_of
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import count
from hvd_elastic.leader.resuming import check_not_complete
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder, check_run_id, new_run_id
from hvd_elastic.records.summary import summarize

_tell = functools.partial(tell, "slurm")
_AGAIN_S = 10.0
"""Time before a job that continues a run is submitted again [s]."""


@command(SubmitOptions, but=NOT_HERE, pass_on=True)
def submit(options: SubmitOptions, context: typer.Context) -> None:
    """Submit a run: begin with the fewest nodes, and take further ones as Slurm grants them.

    Each further node is an allocation of its own, which joins the running training, and is
    cancelled when [bold]--policy goodput[/bold] does not want it. Before the time limit of the
    first allocation the run writes a checkpoint, and continues in the next one automatically.

    Examples:
      hvd-elastic slurm submit --nodes 2-8 --time 4:00:00 -- python train.py

      hvd-elastic slurm submit --nodes 2-8 --slots-per-node 4 --sbatch=--gpus-per-node=4
      --policy goodput --run-id resnet -- python train.py

      hvd-elastic slurm submit --nodes 2 --dry-run -- python train.py

      hvd-elastic slurm submit --resume resnet --time 8:00:00
    """
    given = {*given_options(context)}
    if options.resume is not None:
        folder, submission = _again(options, given)
    else:
        options.check()
        submission = options.submission(check_run_id(options.run_id or new_run_id()))
        folder = RunFolder(runs_folder() / submission.run_id)
    # A job that continues later, or is submitted again, waits for nothing of that.
    once = submission.once if options.resume is None or "sbatch" in given else []
    if options.dry_run:
        if once:
            print(f"# --- submitted with {shlex.join(once)} ---")
        print(submission.first())
        if submission.most > submission.least:
            print(f"# --- for each further node ---\n{submission.further()}", end="")
        return
    require_commands("sbatch", "squeue", "scancel")
    if options.resume is None:
        fields = {**options.spec().as_dict(), "slurm": asdict(submission)}
        folder = RunFolder.create(submission.run_id, fields)
    try:
        with folder.take_lead():  # the files are those of the leader, if there is one
            folder.write_run({"slurm": asdict(submission)})
            submission.write_scripts()
        job_id = _sbatch(submission, once)
    except RunError:
        if options.resume is None:
            shutil.rmtree(folder.path, ignore_errors=True)  # so that the id stays free
        raise
    if options.as_json:
        print(json.dumps({"run_id": folder.run_id, "job_id": job_id}))
        return
    print(folder.run_id)
    print(
        f"job {job_id} {'begins' if options.resume is None else 'resumes'} run "
        f"{folder.run_id} on {submission.least} of at most {count(submission.most, 'node')}: "
        f"hvd-elastic status {folder.run_id}, squeue --me. "
        f"Output: {submission.log_of(job_id)}",
        file=sys.stderr,
    )


def _again(options: SubmitOptions, given: set[str]) -> tuple[RunFolder, Submission]:
    """Return a run that is submitted again, and how, with other allocations if they are given."""
    folder, submission = _submitted(options.resume or "")
    if given - {*OF_ALLOCATIONS, "resume", "dry_run", "as_json"}:
        raise UsageError(
            f"--resume {folder.run_id} resumes the run as it was started; only what it has of "
            "Slurm can be given anew: --nodes, --slots-per-node, --time, --partition, --sbatch, "
            "--leave-before, --give-back-after"
        )
    if folder.leader_alive():
        raise RunError(f"run {folder.run_id} is running: hvd-elastic status {folder.run_id}")
    check_not_complete(folder)
    for job in () if options.dry_run else queue_of(submission.job_name, submission.first_script):
        raise RunError(
            f"run {folder.run_id} has been submitted already: job {job.grant_id} is {job.state}. "
            f"Wait for it, or cancel it first: scancel {job.grant_id}"
        )
    changes = {name: getattr(options, name) for name in given & {*OF_ALLOCATIONS}}
    if "nodes" in changes:
        changes["least"], changes["most"] = parse_nodes(changes.pop("nodes"))
    if "sbatch" in changes:
        changes["sbatch"] = tuple(changes["sbatch"])
    submission = replace(submission, **changes)
    check_submission(submission)
    return folder, submission


def lead_in_allocation(run_id: str) -> None:
    """Lead a submitted run in the allocation that this process runs in (for the batch script)."""
    folder, submission = _submitted(run_id)
    past = summarize(folder.iter_events())
    if past.status == "succeeded":
        print(f"run {run_id} has finished: there is nothing to resume")
        return
    spec = RunSpec.from_dict(folder.read_run(), run_id)
    allocation = own_allocation(os.environ, submission.slots_per_node)
    submission.check_left(allocation.left_s)
    with _time_limit() as limit:
        engine = growing_engine(folder, allocation, submission, spec, _tell)
        resumed = past.attempts > 0
        status = lead(spec, folder, resumed=resumed, as_json=False, engine=engine)
    if status == INTERRUPTED and limit.is_near:
        reached = summarize(folder.iter_events()).steps
        if reached <= past.steps:
            give_back(submission)
            raise RunError(
                f"no step was trained within the time limit of job {allocation.job_id}, so the "
                "run is not submitted again. Give more time: hvd-elastic slurm submit "
                f"--resume {run_id} --time TIME"
            )
        job_id = _sbatch_again(submission)
        _tell(f"step {reached} is reached, and job {job_id} continues the run")
        return
    give_back(submission)
    raise typer.Exit(status)


def _submitted(run_id: str) -> tuple[RunFolder, Submission]:
    """Return a submitted run, and how it was submitted."""
    try:
        folder = RunFolder.open(run_id)
    except RunError as error:
        raise RunError(
            f"{error}\nA run on Slurm needs a folder that all nodes see: set HVD_ELASTIC_HOME to "
            f"one before it is submitted ({os.uname().nodename} looks in {runs_folder()})"
        ) from error
    fields = folder.read_run().get("slurm")
    if fields is None:
        raise RunError(
            f"run {run_id} was not submitted to Slurm. Resume it inside an allocation: "
            f"hvd-elastic run --resume {run_id}"
        )
    try:
        return folder, msgspec.convert(fields, Submission)
    except ValueError as error:
        raise RunError(f"run {run_id}: its run.json cannot be used ({error})") from error


def _sbatch(submission: Submission, options: Sequence[str] = ()) -> str:
    """Submit the first allocation of a run; return the number of its job."""
    printed = call("sbatch", "--parsable", *options, str(submission.first_script))
    return printed.strip().partition(";")[0]


def _sbatch_again(submission: Submission) -> str:
    """Submit the next allocation of a run; slurmctld may be away for half of the time that is left.

    Raises:
        RunError: that time is over; says how to resume the run.
    """
    deadline = time.monotonic() + submission.leave_before_s / 2
    while True:
        try:
            return _sbatch(submission)
        except RunError as error:
            if time.monotonic() + _AGAIN_S > deadline:
                go_on = f"hvd-elastic slurm submit --resume {submission.run_id}"
                raise RunError(f"{error}. The run was not submitted again: {go_on}") from error
            _tell(f"{error}; trying again in {_AGAIN_S:g} s")
        time.sleep(_AGAIN_S)


@dataclass
class _TimeLimit:
    is_near: bool = False


@contextmanager
def _time_limit() -> Iterator[_TimeLimit]:
    """Have the run stop, and write a checkpoint, when Slurm announces its time limit."""
    limit = _TimeLimit()

    def announce(_number: int, _frame: Any) -> None:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise RunError("the time limit of this job came before the run could begin: give more")
        if not limit.is_near:
            limit.is_near = True
            _tell("the time limit is near, so the run stops here and continues in another job")
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGUSR1, announce)
    try:
        yield limit
    finally:
        signal.signal(signal.SIGUSR1, before)


slurm = group_of(
    "Submit a run to Slurm, which grows and shrinks by allocations.", {"submit": submit}
)
slurm.command("lead", hidden=True)(lead_in_allocation)
