"""``hvd-elastic run``: starts or resumes a run and leads it, in the foreground or background."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from io import FileIO
from pathlib import Path

import typer

from hvd_elastic.cli.jobs.naming import run_id_of
from hvd_elastic.cli.options import command, given_options
from hvd_elastic.cli.runs.run_options import RunOptions, check_ssh_config
from hvd_elastic.engines.base import CLOUD, INSIDE
from hvd_elastic.errors import HvdElasticError, RunError, UsageError
from hvd_elastic.hosts.connection import Engine
from hvd_elastic.leader.resuming import Resumption
from hvd_elastic.leader.spec import RunSpec, forwarded_environment
from hvd_elastic.records.events import as_record
from hvd_elastic.records.json_lines import without_nan
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import ReadEvent

Work = Callable[[Callable[[], None]], int]
"""Work, which calls what it is given as soon as it has begun, and returns an exit status."""
_BEGUN = b"begun"


def fork_with_log(log: Path, work: Callable[[], int]) -> int:
    """Fork a process in a session of its own, whose output goes to a log; return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (file, 1), (file, 2)):
            os.dup2(source, target)
        os.environ.pop("COLUMNS", None)
        status = work()
    except HvdElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        status = error.exit_status
    except BaseException:  # noqa: BLE001  (a forked child must not return into its parent's code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def begin_in_background(name: str, log: Path, work: Work) -> None:
    """Have a process of its own do work; return when it has begun.

    Args:
        name: what does the work, for messages.

    Raises:
        typer.Exit: it could not begin; the reason was printed.
    """
    answer, to_terminal = os.pipe()

    def tell(text: bytes) -> None:
        nonlocal to_terminal
        # Later, nobody reads any more, and the descriptor may be that of another file.
        number, to_terminal = to_terminal, -1
        if number >= 0:
            with contextlib.suppress(OSError):  # after Ctrl-C, the other end of the pipe is closed
                os.write(number, text)
            os.close(number)

    def do_and_tell() -> int:
        os.close(answer)
        try:
            return work(lambda: tell(_BEGUN))
        except HvdElasticError as error:
            if to_terminal < 0:
                raise
            tell(f"{error.exit_status} error: {error}".encode())
            return error.exit_status

    child = fork_with_log(log, do_and_tell)
    os.close(to_terminal)
    with open(answer, "rb") as told:  # noqa: PTH123
        try:
            said = told.read()
        except KeyboardInterrupt:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGINT)
            raise
    if said != _BEGUN:
        status, _, text = said.decode(errors="replace").partition(" ")
        print(text or f"error: the {name} ended before it began; see {log}", file=sys.stderr)
        raise typer.Exit(int(status or 1))


def lead(
    spec: RunSpec,
    folder: RunFolder,
    *,
    resumed: bool,
    as_json: bool,
    forget: bool = False,
    on_start: Callable[[], None] = lambda: None,
    lock: FileIO | None = None,
    engine: AbstractContextManager[Engine] | None = None,
) -> int:
    """Lead a run to its end; return the exit status.

    Args:
        forget: remove the folder if another leader leads the run and this one started nothing.
        on_start: called at each event; the first call means that the run has begun.
        lock: of the run, which this process holds already; None: it is taken.
        engine: has the hosts of the run, and is entered when this process has its lock; None: they
            are found as its specification says.
    """
    from hvd_elastic.leader import leader
    from hvd_elastic.views.terminal import LastingView

    environment = forwarded_environment(os.environ)
    if spec.engine is not None:
        from hvd_elastic.engines.base import engine_named

        source = engine_named(spec.engine)
        engine = engine or source.lead(folder, os.environ)
        environment = source.clean(environment)
        spec = replace(spec, hostfile=str(folder.hosts))
    view = LastingView(live=False if as_json else None)
    with view:

        def show_event(event: ReadEvent) -> None:
            on_start()
            if as_json:
                view.print(json.dumps(without_nan(as_record(event))), keep=True)
            else:
                view.show(event)

        def show_output(host: str, slot: int, line: str) -> None:
            if not as_json:
                view.output(host, slot, line)

        finish, gave_way = leader.lead(
            *(spec, folder, environment, show_event, show_output),
            resumed=resumed,
            lock=lock,
            engine=engine,
        )
    if finish.status == "failed" and any(folder.logs.iterdir()):
        print(f"logs of the workers: {folder.logs}", file=sys.stderr)
    if gave_way and forget:
        shutil.rmtree(folder.path, ignore_errors=True)
    return {"succeeded": 0, "stopped": 130}.get(finish.status, 1)


def lead_in_background(spec: RunSpec, folder: RunFolder, *, resumed: bool) -> None:
    """Have a leader of its own lead a run, whose output goes to leader.log.

    Raises:
        typer.Exit: the leader could not begin; the reason was printed.
    """

    def work(begun: Callable[[], None]) -> int:
        return lead(spec, folder, resumed=resumed, as_json=False, on_start=begun)

    begin_in_background("leader", folder.leader_log, work)
    print(folder.run_id)
    print(
        f"running in the background: hvd-elastic attach {folder.run_id}, "
        f"hvd-elastic stop {folder.run_id}",
        file=sys.stderr,
    )


def begin_leader(
    spec: RunSpec,
    folder: RunFolder,
    environment: Mapping[str, str],
    resumed: bool,
    beside: Callable[[], object] = lambda: None,
) -> int:
    """Fork a leader from a daemon; return its process id.

    The run is led from the fork on, however long the leader's start takes: were its lock taken by
    the leader, a daemon that begins meanwhile would start a second one.

    Args:
        environment: environment of the leader, which passes it on to the workers.
        beside: called in the leader before it leads.
    """
    home = os.environ.get("HVD_ELASTIC_HOME")
    lock = None
    with contextlib.suppress(RunError):  # another process leads it, as the forked one will tell
        lock = folder.take_lead(for_child=True)

    def work() -> int:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The lock, the socket and the database stay the daemon's alone.
        kept = 2 if lock is None else lock.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        if lock is not None:
            folder.name_leader(lock)
        with contextlib.suppress(OSError):  # the agents say that the folder is missing
            os.chdir(spec.cwd)
        os.environ.clear()
        os.environ.update(environment)
        os.environ.pop("HVD_ELASTIC_HOME", None)
        os.environ.pop("COLUMNS", None)
        if home is not None:
            os.environ["HVD_ELASTIC_HOME"] = home
        beside()
        return lead(spec, folder, resumed=resumed, as_json=False, lock=lock)

    with lock or contextlib.nullcontext():  # the forked process has it too
        return fork_with_log(folder.leader_log, work)


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

      hvd-elastic run --cloud lab --policy goodput -- python train.py

      hvd-elastic run --resume resnet

    Exit status: 0 if training finished, 1 if it failed, 2 for wrong usage, 130 if it was stopped.
    """
    resumed = options.resume is not None
    if options.resume is not None:
        _check_resume_options(context)
        check_ssh_config(options.ssh_config)
        resumption = Resumption(
            run_id_of(options.resume),
            options.hostfile,
            options.ssh_config,
            options.np,
            options.max_np,
            options.command or (),
        )
        folder = resumption.find_folder(lambda line: print(line, file=sys.stderr))
        spec = resumption.spec_of(folder, [*INSIDE, CLOUD.rstrip(":")], options.hosts)
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
        for said in filter(None, (options.says_size(), options.says_python())):
            print(said, file=sys.stderr)
    if options.detach:
        lead_in_background(spec, folder, resumed=resumed)
        return
    made_now = folder.began_elsewhere and not folder.events.exists()
    as_json = options.as_json
    status = lead(spec, folder, resumed=resumed, as_json=as_json, forget=made_now)
    raise typer.Exit(status)


def _check_resume_options(context: typer.Context) -> None:
    """Raise UsageError for options that a resumed run would otherwise ignore."""
    for name, flag in given_options(context).items():
        if name not in _WITH_RESUME:
            raise UsageError(
                f"{flag} cannot be given with --resume: the run keeps what it was "
                "started with. Valid beside --resume: --hostfile, --ssh-config, --np, "
                "--max-np, --detach, --json."
            )
