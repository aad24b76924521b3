"""``hvd-elastic run``: starts or resumes a run and leads it, in the foreground or background."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from hvd_elastic.cli.run_options import (
    RunOptions,
    check_sizes,
    check_slots,
    check_ssh_config,
    check_tensorboard_option,
    raise_together,
    ssh_config_for,
)
from hvd_elastic.config import runs_folder
from hvd_elastic.errors import HvdElasticError, RunError, UsageError
from hvd_elastic.hosts.hostfile import parse_hostfile
from hvd_elastic.leader.spec import RunSpec, forwarded_environment
from hvd_elastic.records.run_folder import RunFolder, check_run_id
from hvd_elastic.records.summary import summarize
from hvd_elastic.records.tensorboard import TensorBoardWriter

# Parameters that may be given with --resume; the run keeps all others from its start.
_WITH_RESUME = {
    *("resume", "command", "hostfile", "ssh_config", "np", "max_np", "detach", "json_output"),
}


def _takes_run_options(
    function: Callable[[typer.Context, RunOptions], None],
) -> Callable[..., None]:
    """Return a typer command whose options are the fields of :class:`RunOptions`."""

    @functools.wraps(function)
    def command(context: typer.Context, **given: Any) -> None:
        function(context, RunOptions(**given))

    options = inspect.signature(RunOptions, eval_str=True).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("context", keyword, annotation=typer.Context)
    parameters = [context, *(option.replace(kind=keyword) for option in options)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


@_takes_run_options
def run(context: typer.Context, options: RunOptions) -> None:
    """Train a script on the hosts of a hostfile, elastically.

    The script imports [bold]hvd_elastic.torch[/bold]. Edit the hostfile during the run to add or
    remove hosts; a host that fails is left out and used again when it answers.

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
        _check_not_complete(folder)
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
    if options.detach:
        _lead_in_background(spec, folder, resumed=resumed)
        return
    made_now = folder.began_elsewhere and not folder.events.exists()
    json_output = options.json_output
    status = lead(spec, folder, resumed=resumed, json_output=json_output, forget=made_now)
    raise typer.Exit(status)


def _folder_to_resume(options: RunOptions) -> RunFolder:
    """Return the run's folder, created from its hosts' records if another machine led the run."""
    run_id, hostfile = options.resume or "", options.hostfile
    if (runs_folder() / check_run_id(run_id)).is_dir():
        return RunFolder.open(run_id)
    if hostfile is None:
        try:
            return RunFolder.open(run_id)
        except RunError as error:
            raise RunError(
                f"{error}\nIf another machine led it, which is gone, its hosts know it: "
                f"hvd-elastic run --resume {run_id} --hostfile HOSTFILE"
            ) from error
    from hvd_elastic.hosts.ssh import SshOptions
    from hvd_elastic.leader.recovery import WHAT_IS_TRUSTED, find_run

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


def _check_not_complete(folder: RunFolder) -> None:
    if summarize(folder.read_events()).status == "succeeded":
        raise RunError(
            f"run {folder.run_id} has finished: there is nothing to resume. Look at it with: "
            f"hvd-elastic report {folder.run_id}"
        )


def _check_resume_options(context: typer.Context) -> None:
    """Raise UsageError for options that a resumed run would otherwise ignore."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            if parameter.name not in _WITH_RESUME:
                raise UsageError(
                    f"{parameter.opts[0]} cannot be given with --resume: the run keeps what it was "
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


def lead(
    spec: RunSpec,
    folder: RunFolder,
    *,
    resumed: bool,
    json_output: bool,
    forget: bool = False,
    on_start: Callable[[], None] = lambda: None,
) -> int:
    """Lead a run to its end; return the exit status.

    Args:
        spec: specification of the run.
        folder: run folder.
        resumed: whether the run had a leader before.
        json_output: print every event as a JSON line.
        forget: remove the folder if another leader leads the run and this one started nothing.
        on_start: called at each event; the first call means that the run has begun.
    """
    from hvd_elastic.leader.leader import Leader
    from hvd_elastic.views.terminal import LastingView, unless_nobody_reads

    def warn(message: str) -> None:
        show_event({"t": time.time(), "kind": "warning", "message": message})

    with (
        folder.take_lead(),
        LastingView(live=False if json_output else None) as view,
        TensorBoardWriter(folder.tensorboard, warn) as board,
    ):

        def show_event(event: Any) -> None:
            on_start()
            if json_output:
                with unless_nobody_reads():
                    print(json.dumps(event), flush=True)
            else:
                view.show(event)
            if spec.tensorboard:
                board.note(event)

        def show_output(host: str, slot: int, line: str) -> None:
            if not json_output:
                view.print(f"[{host}:{slot}] {line}")

        environment = forwarded_environment(os.environ)
        engine = None
        if spec.engine == "slurm":
            from hvd_elastic.slurm.allocation import own_allocation
            from hvd_elastic.slurm.commands import clean_environment
            from hvd_elastic.slurm.engine import SlurmEngine

            spec = replace(spec, hostfile=str(folder.hosts))
            environment = clean_environment(environment)
            engine = SlurmEngine(folder.hosts, own_allocation(os.environ))
        leader = Leader(
            spec, folder, environment, show_event, show_output, resumed=resumed, engine=engine
        )
        finish = leader.run()
    if finish.status == "failed" and any(folder.logs.iterdir()):
        print(f"logs of the workers: {folder.logs}", file=sys.stderr)
    if leader.gave_way and forget:
        shutil.rmtree(folder.path, ignore_errors=True)
    return {"succeeded": 0, "stopped": 130}.get(finish.status, 1)


_STARTED = b"started"  # what a forked leader sends when the run has begun


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
    if said == _STARTED:
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
    sys.stdout.flush()
    answer, to_terminal = os.pipe()
    child = os.fork()
    if child:
        os.close(to_terminal)
        _await_leader(child, answer, folder)
        return
    os.close(answer)
    os.setsid()
    log = os.open(folder.leader_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.pop("COLUMNS", None)
    started = False

    def tell(text: bytes) -> None:
        with contextlib.suppress(OSError):  # after Ctrl-C, the other end of the pipe is closed
            os.write(to_terminal, text)
        os.close(to_terminal)

    def on_start() -> None:
        nonlocal started
        if not started:
            started = True
            tell(_STARTED)

    try:
        status = lead(spec, folder, resumed=resumed, json_output=False, on_start=on_start)
    except HvdElasticError as error:
        status = error.exit_status
        if started:
            print(f"error: {error}", file=sys.stderr)
        else:  # the run may have another leader, whose log it is
            tell(f"{status} error: {error}".encode())
    except BaseException:  # noqa: BLE001  (a forked child must not return into its parent's code)
        traceback.print_exc()
        status = 1
    os._exit(status)
