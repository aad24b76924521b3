"""Lead a run in this process, or in one of its own that outlives this one."""

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
from typing import Any

import typer

from hvd_elastic.errors import HvdElasticError
from hvd_elastic.hosts.engine import Engine
from hvd_elastic.leader.spec import RunSpec, forwarded_environment
from hvd_elastic.records.run_folder import RunFolder

STARTED = b"started"
"""What a leader in the background sends when the run has begun."""


def lead(
    spec: RunSpec,
    folder: RunFolder,
    *,
    resumed: bool,
    as_json: bool,
    forget: bool = False,
    on_start: Callable[[], None] = lambda: None,
    engine: AbstractContextManager[Engine] | None = None,
) -> int:
    """Lead a run to its end; return the exit status.

    Args:
        spec: specification of the run.
        folder: run folder.
        resumed: whether the run had a leader before.
        as_json: print every event as a JSON line.
        forget: remove the folder if another leader leads the run and this one started nothing.
        on_start: called at each event; the first call means that the run has begun.
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

        def show_event(event: Any) -> None:
            on_start()
            if as_json:
                view.print(json.dumps(event), keep=True)
            else:
                view.show(event)

        def show_output(host: str, slot: int, line: str) -> None:
            if not as_json:
                view.output(host, slot, line)

        finish, gave_way = leader.lead(
            spec, folder, environment, show_event, show_output, resumed=resumed, engine=engine
        )
    if finish.status == "failed" and any(folder.logs.iterdir()):
        print(f"logs of the workers: {folder.logs}", file=sys.stderr)
    if gave_way and forget:
        shutil.rmtree(folder.path, ignore_errors=True)
    return {"succeeded": 0, "stopped": 130}.get(finish.status, 1)


def fork_leader(
    spec: RunSpec,
    folder: RunFolder,
    *,
    resumed: bool,
    prepare: Callable[[], Callable[[bytes], None]],
) -> int:
    """Fork a leader in a session of its own, whose output goes to leader.log.

    Args:
        spec: specification of the run.
        folder: run folder.
        resumed: whether the run had a leader before.
        prepare: called first in the new process; returns a function that is told :data:`STARTED`
            once the run has begun, or the exit status and the error if it does not begin.

    Returns:
        The process id of the leader.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        tell = prepare()
        log = os.open(folder.leader_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.pop("COLUMNS", None)
        status = _lead_or_tell(spec, folder, resumed, tell)
    except BaseException:  # noqa: BLE001  (a forked child must not return into its parent's code)
        traceback.print_exc()
    finally:
        os._exit(status)


def _lead_or_tell(
    spec: RunSpec, folder: RunFolder, resumed: bool, tell: Callable[[bytes], None]
) -> int:
    started = False

    def on_start() -> None:
        nonlocal started
        if not started:
            started = True
            tell(STARTED)

    try:
        return lead(spec, folder, resumed=resumed, as_json=False, on_start=on_start)
    except HvdElasticError as error:
        if started:
            print(f"error: {error}", file=sys.stderr)
        else:  # the run may have another leader, whose log it is
            tell(f"{error.exit_status} error: {error}".encode())
        return error.exit_status


def begin_leader(
    spec: RunSpec, folder: RunFolder, environment: Mapping[str, str], resumed: bool
) -> int:
    """Fork a leader from a daemon; return its process id.

    Args:
        spec: specification of the run.
        folder: run folder.
        environment: environment of the leader, which passes it on to the workers.
        resumed: whether the run had a leader before.
    """
    home = os.environ.get("HVD_ELASTIC_HOME")

    def prepare() -> Callable[[bytes], None]:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The lock, the socket and the database stay the daemon's alone.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        with contextlib.suppress(OSError):  # the agents say that the folder is missing
            os.chdir(spec.cwd)
        os.environ.clear()
        os.environ.update(environment)
        os.environ.pop("HVD_ELASTIC_HOME", None)
        if home is not None:
            os.environ["HVD_ELASTIC_HOME"] = home
        return lambda text: None if text == STARTED else print(text.decode(), file=sys.stderr)

    return fork_leader(spec, folder, resumed=resumed, prepare=prepare)


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


def lead_in_background(spec: RunSpec, folder: RunFolder, *, resumed: bool) -> None:
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
