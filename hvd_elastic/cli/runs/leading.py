"""Lead a run in this process, or in one of its own that outlives this one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from hvd_elastic.cli.background import begin_in_background, fork_with_log
from hvd_elastic.hosts.connection import Engine
from hvd_elastic.leader.spec import RunSpec, forwarded_environment
from hvd_elastic.records.events import as_record
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import ReadEvent


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

        def show_event(event: ReadEvent) -> None:
            on_start()
            if as_json:
                view.print(json.dumps(as_record(event)), keep=True)
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

    def work() -> int:
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
        os.environ.pop("COLUMNS", None)
        if home is not None:
            os.environ["HVD_ELASTIC_HOME"] = home
        return lead(spec, folder, resumed=resumed, as_json=False)

    return fork_with_log(folder.leader_log, work)
