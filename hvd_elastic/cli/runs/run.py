"""``hvd-elastic run``: starts or resumes a run and leads it, in the foreground or background."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from hvd_elastic.cli.jobs.naming import run_id_of
from hvd_elastic.cli.options import command, given_options
from hvd_elastic.cli.runs.leading import STARTED, fork_leader, lead
from hvd_elastic.cli.runs.run_options import (
    RunOptions,
    check_sizes,
    check_slots,
    check_ssh_config,
    check_tensorboard_option,
    raise_together,
    ssh_config_for,
)
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.hosts.hostfile import parse_hostfile
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import summarize

# Parameters that may be given with --resume; the run keeps all others from its start.
_WITH_RESUME = {
    *("resume", "command", "hostfile", "ssh_config", "np", "max_np", "detach", "as_json"),
}


@command(RunOptions, pass_on=True)
def run(options: RunOptions, context: typer.Context) -> None:
    """Train a script on the hosts of a hostfile, elastically.

    The script imports [bold]hvd_elastic.torch[/bold], or the modules for TensorFlow and Keras.
    Edit the hostfile during the run to add or remove hosts; a host that fails is left out and used
    again when it answers.

    Examples:
      hvd-elastic run -- python train.py

      hvd-elastic run --hostfile hosts -- python train.py --lr 0.1

      hvd-elastic run -H hosts --np 8 --min-np 4 --run-id resnet -- python train.py

      hvd-elastic run -H hosts --max-np 16 --policy goodput -- python train.py

      hvd-elastic run --resume resnet

    Exit status: 0 if training finished, 1 if it failed, 2 for wrong usage, 130 if it was stopped.
    """
    resumed = options.resume is not None
    if resumed:
        _check_resume_options(context)
        check_ssh_config(options.ssh_config)
        folder = _folder_to_resume(options)
        check_not_complete(folder)
        spec = _resumed_spec(folder, options)
    else:
        from hvd_elastic.checkpoint.place import check_new_place

        options.check()
        spec = options.spec()
        if options.mpi:
            from hvd_elastic.leader.mpi import run_mpi

            raise typer.Exit(run_mpi(spec, os.environ))
        if spec.checkpoint_folder is not None:
            check_new_place(spec.checkpoint_folder)  # before the run id is in use
        folder = RunFolder.create(options.run_id, spec.as_dict())
        if size := options.says_size():
            print(size, file=sys.stderr)
    if options.detach:
        _lead_in_background(spec, folder, resumed=resumed)
        return
    made_now = folder.began_elsewhere and not folder.events.exists()
    as_json = options.as_json
    status = lead(spec, folder, resumed=resumed, as_json=as_json, forget=made_now)
    raise typer.Exit(status)


def _folder_to_resume(options: RunOptions) -> RunFolder:
    """Return the run's folder, created from its hosts' records if another machine led the run."""
    run_id, hostfile = run_id_of(options.resume or ""), options.hostfile
    if (folder := RunFolder.find(run_id)) is not None:
        return folder
    if hostfile is None:
        try:
            return RunFolder.open(run_id)
        except RunError as error:
            raise RunError(
                f"{error}\nIf another machine led it, which is gone, its hosts know it: "
                f"hvd-elastic run --resume {run_id} --hostfile HOSTFILE"
            ) from error
    from hvd_elastic.hosts.ssh import SshOptions
    from hvd_elastic.leader.failover.recovery import WHAT_IS_TRUSTED, find_run

    config = ssh_config_for(hostfile, options.ssh_config)
    ssh = SshOptions(config_path=None if config is None else Path(config))
    spec = find_run(run_id, list(parse_hostfile(hostfile)), ssh)
    print(f"run {run_id} was led by another machine. What its hosts say of it:", file=sys.stderr)
    for name in WHAT_IS_TRUSTED:
        value = getattr(spec, name)
        if value:
            # Quoted as in Python, since a host may send escape sequences for the terminal.
            print(f"  {name}: {list(value) if name == 'command' else value!r}", file=sys.stderr)
    _check_folder_is_here(spec, run_id)
    # The hosts' values of these two are paths on the other machine.
    spec = replace(spec, hostfile=str(hostfile.absolute()), ssh_config=config)
    return RunFolder.create(run_id, {**spec.as_dict(), "began_elsewhere": True})


def check_not_complete(folder: RunFolder) -> None:
    """Raise RunError if the run has finished."""
    if summarize(folder.iter_events()).status == "succeeded":
        raise RunError(
            f"run {folder.run_id} has finished: there is nothing to resume. Look at it with: "
            f"hvd-elastic report {folder.run_id}"
        )


def _check_resume_options(context: typer.Context) -> None:
    """Raise UsageError for options that a resumed run would otherwise ignore."""
    for name, flag in given_options(context).items():
        if name not in _WITH_RESUME:
            raise UsageError(
                f"{flag} cannot be given with --resume: the run keeps what it was "
                "started with. Valid beside --resume: --hostfile, --ssh-config, --np, "
                "--max-np, --detach, --json."
            )


def _resumed_spec(folder: RunFolder, options: RunOptions) -> RunSpec:
    if options.command:
        raise UsageError(
            f"--resume {folder.run_id} runs the command it was started with; leave it out"
        )
    spec = RunSpec.from_dict(folder.read_run(), folder.run_id)
    np, hostfile = options.np, options.hostfile
    if spec.engine not in (None, "slurm"):
        raise RunError(
            f"run {folder.run_id} was led by a program on {spec.engine}, which alone can give it "
            "hosts: run that program again"
        )
    changes: dict[str, Any] = {}
    if hostfile is not None:
        changes["hostfile"] = str(hostfile.absolute())
    changes["ssh_config"] = ssh_config_for(hostfile, options.ssh_config) or spec.ssh_config
    if np is not None:
        changes |= {"np": np, "slots": max(np, spec.slots)}
    if options.max_np is not None:
        changes["max_np"] = options.max_np
    if hostfile is not None:
        changes["engine"] = None
    spec = replace(spec, **changes)
    # Only the sizes given now have to fit the hostfile: it may have been edited since the run
    # began, and hosts may still be added.
    asked = None
    if np is not None or hostfile is not None:
        path = spec.hostfile_path
        asked = options.hosts() if path is None or spec.engine else parse_hostfile(path)
    spares = 0 if np is None else spec.spares
    raise_together(
        lambda: check_sizes(spec.np, spec.min_np, spec.max_np, mpi=False),
        lambda: check_slots(asked, np, spec.min_np, spares),
    )
    check_tensorboard_option(spec.tensorboard, mpi=False)
    _check_folder_is_here(spec, folder.run_id)
    return spec


def _check_folder_is_here(spec: RunSpec, run_id: str) -> None:
    if not Path(spec.cwd).is_dir():
        raise RunError(
            f"run {run_id} was started in the folder {spec.cwd!r}, which is not on this machine"
        )


def _await_leader(child: int, answer: int, folder: RunFolder) -> None:
    """Wait until the forked leader has begun the run, or print why it cannot.

    Args:
        child: process id of the leader.
        answer: descriptor of a pipe from the leader.
        folder: run folder.
    """
    with open(answer, "rb") as told:
        try:
            said = told.read()
        except KeyboardInterrupt:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGINT)
            raise
    if said == STARTED:
        print(folder.run_id)
        print(
            f"running in the background: hvd-elastic attach {folder.run_id}, "
            f"hvd-elastic stop {folder.run_id}",
            file=sys.stderr,
        )
        return
    status, _, text = said.decode(errors="replace").partition(" ")
    if not text:
        status, text = "1", f"error: the leader ended before it began; see {folder.leader_log}"
    print(text, file=sys.stderr)
    raise typer.Exit(int(status))


def _lead_in_background(spec: RunSpec, folder: RunFolder, *, resumed: bool) -> None:
    """Fork a leader that survives the end of this terminal; its output goes to leader.log.

    Raises:
        typer.Exit: the leader could not begin; the reason was printed.
    """
    answer, to_terminal = os.pipe()

    def prepare() -> Callable[[bytes], None]:
        os.close(answer)
        return tell

    def tell(text: bytes) -> None:
        with contextlib.suppress(OSError):  # after Ctrl-C, the other end of the pipe is closed
            os.write(to_terminal, text)
        os.close(to_terminal)

    child = fork_leader(spec, folder, resumed=resumed, prepare=prepare)
    os.close(to_terminal)
    _await_leader(child, answer, folder)
