"""Implement ``hvd-elastic shell``: a terminal where a job runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hvd_elastic.cli.jobs.naming import open_run
from hvd_elastic.cli.options import argument
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import count
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import RescaleStarted, RunStarted, TakenOver

if TYPE_CHECKING:
    from hvd_elastic.hosts.hostfile import Host
    from hvd_elastic.hosts.ssh import SshOptions


def shell(
    job: Annotated[
        str, argument("number, name or run id of a job or run, and a rank (0)", "JOB[.RANK]")
    ],
) -> None:
    """Open a terminal on the host of a job: a shell in its folder, with its environment.

    Examples:
      hvd-elastic shell 12

      hvd-elastic shell 12.3
    """
    from hvd_elastic.hosts.remote_python import PROGRAMS, program_text
    from hvd_elastic.hosts.terminal import run_in_terminal

    folder, rank = _parse_job(job)
    known, options = hosts_by_ssh(folder, "shell", ": open a shell there by its own means")
    name = host_of_rank(folder, rank, list(known))
    if name not in known:
        raise RunError(f"run {folder.run_id} is leaving host {name}; call again in a moment")
    source = program_text(f"{PROGRAMS}.enter_job")
    command = shlex.join(["exec", "python3", "-c", source, folder.run_id, name])
    status = run_in_terminal(known[name], command, options)
    if status:
        raise typer.Exit(status)


def hosts_by_ssh(
    folder: RunFolder, command: str, instead: str
) -> tuple[dict[str, Host], SshOptions]:
    """Return the present hosts of a run, by name, and how to log in to them.

    Args:
        command: the command that needs a leader for it.
        instead: end of the sentence for a run whose hosts belong to an engine.

    Raises:
        RunError: nobody leads the run, or its hosts belong to an engine.
        HostfileError: its hostfile cannot be used.
    """
    from hvd_elastic.hosts.ssh import SshOptions
    from hvd_elastic.leader.hostfile_watch import read_hosts
    from hvd_elastic.leader.spec import RunSpec

    folder.need_leader(command)
    spec = RunSpec.from_dict(folder.read_run(), folder.run_id)
    if spec.engine is not None:
        raise RunError(f"the hosts of run {folder.run_id} belong to {spec.engine}{instead}")
    config = None if spec.ssh_config is None else Path(spec.ssh_config)
    hosts = read_hosts(spec.hostfile_path, spec.slots, spec.exclude)
    return {host.name: host for host in hosts}, SshOptions(config_path=config)


def _parse_job(words: str) -> tuple[RunFolder, int]:
    """Return the run, and the rank that was named; a name of a job may have points too."""
    run, point, rank = words.rpartition(".")
    if not (point and rank.isdecimal()):
        return open_run(words), 0
    try:
        return open_run(words), 0
    except (RunError, UsageError):
        return open_run(run), int(rank)


def host_of_rank(folder: RunFolder, rank: int, hosts: list[str]) -> str:
    """Return the host of a rank of a run.

    Args:
        hosts: hosts of the run, for one that has not begun to train.

    Raises:
        UsageError: there is no such rank.
    """
    places = before = hosts[:1]
    for event in folder.iter_events():
        match event:
            case RunStarted():
                before, places = places, hosts[:1]
            case TakenOver():  # the ranks of the leader before this one
                places = before
            case RescaleStarted():
                slots = zip(event.hosts, event.slots, strict=True)
                places = [host for host, number in slots for _ in range(number)]
    if rank >= len(places):
        raise UsageError(f"run {folder.run_id} has {count(len(places), 'rank')}; the first is 0")
    return places[rank]
