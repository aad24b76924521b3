"""Implement ``killclust``: end what crashed runs left on every host, and nothing else."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from hvd_elastic.cli.cluster.host_options import HostOptions
from hvd_elastic.cli.cluster.host_report import Printer, finish
from hvd_elastic.cli.jobs.naming import run_id_of
from hvd_elastic.cli.options import command, number_option, option
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import bytes_words, count
from hvd_elastic.hosts.fanout import HostResult

if TYPE_CHECKING:
    from hvd_elastic.tools.kill import Ended


@command(HostOptions)
def kill(
    chosen: HostOptions,
    run_id: Annotated[
        str | None, option("end what this run, or a job's run, has left", "--run", metavar="RUN")
    ] = None,
    every: Annotated[bool, option("end the processes of every run", "--all")] = False,
    strays: Annotated[
        bool, option("end workers that a dead torchrun, mpirun or horovodrun left", "--strays")
    ] = False,
    user_processes: Annotated[
        str | None,
        option(
            "end your processes whose command line matches this regular expression",
            "--user-processes",
            metavar="PATTERN",
        ),
    ] = None,
    grace: Annotated[
        float, number_option("time between TERM and KILL", "--grace", metavar="SECONDS")
    ] = 5.0,
) -> None:
    """End your own processes of a run, with their descendants, on every host.

    Processes are found by HVD_ELASTIC_RUN_ID in their environment, not by name. --strays finds
    workers of other launchers by their environment, and only if their launcher has ended. Then
    temporary folders, shared memory, locks and sockets that dead runs left and nobody uses are
    removed.

    For example:

      killclust hosts --run digits-1 --dry-run

      killclust hosts --run digits-1

      killclust hosts --strays --dry-run
    """
    from hvd_elastic.tools.kill import Target, kill_run

    if [run_id is not None, every, strays, user_processes is not None].count(True) != 1:
        raise UsageError(
            "say what to end, by one of: --run RUN for one run (hvd-elastic list shows them), "
            "--all, --strays, --user-processes PATTERN"
        )
    if run_id == "":
        raise UsageError("--run '': it is empty. Is a variable of your script not set?")
    if user_processes is not None:
        _check_pattern(user_processes)
    if run_id is not None:
        run_id = run_id_of(run_id)
    printer = Printer(chosen.hosts)
    target = Target(run_id, strays, user_processes)
    seen: list[HostResult[Ended]] = []

    def keep_results() -> Iterator[HostResult[Ended]]:
        for result in kill_run(
            chosen.hosts, target, chosen.ssh, grace, chosen.dry_run, chosen.fanout
        ):
            seen.append(result)
            yield result

    finish(
        chosen,
        keep_results(),
        printer,
        describe_ended,
        lambda result: show_ended(result, printer, chosen.dry_run),
    )
    if run_id is not None and not any(map(_has_traces, seen)):
        _check_run_is_known(run_id)


def _has_traces(result: HostResult[Ended]) -> bool:
    # Only a temporary folder shows which run left it.
    files = [file for file in result.answer.files if file.kind == "temporary folder"]
    return bool(result.answer.processes or result.answer.others or files)


def _check_run_is_known(run_id: str) -> None:
    from hvd_elastic.config import runs_folder
    from hvd_elastic.records.run_folder import list_runs

    known = [run.run_id for run in list_runs()]
    if run_id not in known:
        alike = difflib.get_close_matches(run_id, known, 1)
        hint = f"Did you mean '{alike[0]}'?" if alike else "Is it misspelt?"
        raise RunError(
            f"no host has a process or folder of a run '{run_id}', and there is no such run in "
            f"{runs_folder()}. {hint} See: hvd-elastic list"
        )


def _check_pattern(text: str) -> None:
    try:
        wanted = re.compile(text)
    except re.error as error:
        raise UsageError(f"--user-processes '{text}': {error}; write \\. for a dot") from error
    if wanted.search("") is not None:
        raise UsageError(f"--user-processes '{text}' matches everything; name the program")


def describe_ended(result: HostResult[Ended]) -> dict[str, Any]:
    """Return the fields of this tool in the JSON object of a host."""
    value = result.value
    return {
        "processes": [vars(process) for process in value.processes] if value else [],
        "files": [vars(file) for file in value.files] if value else [],
        "gpus": list(value.gpus) if value else [],
        "others": list(value.others) if value else [],
    }


def show_ended(result: HostResult[Ended], printer: Printer, dry_run: bool) -> str:
    """Print a line for each process, file and holder of GPU memory; return the summary."""
    ended = result.answer
    for process in ended.processes:
        done = {"": "found", "left": "NOT ended"}.get(process.ended, f"{process.ended} ended")
        printer.lines(result.host, "stdout", f"{done} {process.pid}  {process.command}")
    for line in ended.others:
        printer.lines(result.host, "stdout", f"left alone, of another HVD_ELASTIC_HOME: {line}")
    for file in ended.files:
        done = "found" if dry_run else "removed"
        text = f"{done} {file.kind} {file.path}  {bytes_words(file.bytes)}"
        printer.lines(result.host, "stdout", text)
    for line in ended.gpus:
        printer.lines(result.host, "stdout", f"memory still held: {line}")
    text = f"{count(len(ended.processes), 'process')} {'found' if dry_run else 'ended'}"
    if ended.files:
        size = bytes_words(sum(file.bytes for file in ended.files))
        text += f", {len(ended.files)} left behind {'found' if dry_run else 'removed'} ({size})"
    return text
