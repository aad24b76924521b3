"""``hvd-elastic debug``: a terminal for pdb in a worker that stands at ``breakpoint()``."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from hvd_elastic.cli.jobs.naming import open_run
from hvd_elastic.cli.options import RequiredRun
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.leader.hostfile_watch import hosts_of
from hvd_elastic.leader.spec import RunSpec


def debug(
    run: RequiredRun,
    worker: Annotated[
        str, typer.Argument(metavar="HOST:SLOT", help="The worker, as the warning names it.")
    ],
) -> None:
    """Join a worker that stands at breakpoint() in the training script: its pdb, here.

    The other ranks wait meanwhile, and no deadline counts for it. When you leave (Ctrl-D, quit),
    training continues; so it does after Ctrl-C. Where no worker stands yet, this waits for it.

    Examples:
      hvd-elastic debug digits-3 node2:0
    """
    from hvd_elastic.hosts.remote_python import start_program
    from hvd_elastic.hosts.ssh import SshOptions, connect

    folder = open_run(run)
    folder.need_leader("debug")
    spec = RunSpec.from_dict(folder.read_run(), folder.run_id)
    if spec.engine is not None:
        raise RunError(
            f"the hosts of run {folder.run_id} belong to {spec.engine}, and a debugger is joined "
            "by ssh: start the script with --np 1 on this machine, or use a hostfile"
        )
    found = re.fullmatch(r"(.+):(\d+)", worker)
    known = {host.name: host for host in hosts_of(spec)}
    if found is None or found[1] not in known or int(found[2]) >= known[found[1]].slots:
        raise UsageError(
            f"{worker} is no worker of run {folder.run_id}; name one as HOST:SLOT, with a host of "
            f"{', '.join(list(known)[:8])}"
        )
    config = None if spec.ssh_config is None else Path(spec.ssh_config)
    program = "hvd_elastic.programs.join_debugger"
    with connect(known[found[1]], SshOptions(config_path=config)) as connection:
        process = start_program(connection, program)
        process.stdin.write(json.dumps([folder.run_id, found[1], int(found[2])]).encode() + b"\n")

        def pass_input() -> None:
            with contextlib.suppress(OSError, EOFError):
                for line in sys.stdin:
                    process.stdin.write(line.encode())
                process.stdin.close()

        threading.Thread(target=pass_input, daemon=True).start()
        while output := process.stdout.read(1 << 16):
            sys.stdout.write(output.decode(errors="replace"))
            sys.stdout.flush()
        if status := process.wait():
            raise RunError(f"host {found[1]}: {process.last_line or f'exit status {status}'}")
