"""``hvd-elastic ray up|status|exec|down``: a Ray cluster on the hosts of a hostfile."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_elastic.cli.cluster.command_output import describe_command
from hvd_elastic.cli.cluster.host_options import HostOptions
from hvd_elastic.cli.cluster.host_report import Printer, finish
from hvd_elastic.cli.options import argument, command, group_of, number_option, option, port_option
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import bytes_words, count
from hvd_elastic.hosts.fanout import HostResult, Outcome
from hvd_elastic.hosts.hostfile import parse_hostfile

_WITHOUT = ["dry_run", "identity"]


@command(HostOptions, but=_WITHOUT)
def up(
    chosen: HostOptions,
    python: Annotated[
        str | None,
        option("Python with Ray there (default: this one's path).", "--python", metavar="PATH"),
    ] = None,
    port: Annotated[int, port_option("Of the head; 0: a free one.")] = 0,
    object_store: Annotated[
        float | None,
        number_option(
            "Of each node (default: 30 % of its memory).", "--object-store", metavar="MB"
        ),
    ] = None,
) -> None:
    """Start a node on every host that has none; the first host is the head.

    Call it again after adding hosts to the hostfile: the cluster grows by them, and trainings on
    it with them. Each node has its processor cores or cpus=, its GPUs, and a resource "slots".

    For example:

      hvd-elastic ray up hosts

      hvd-elastic ray up hosts --object-store 2000 --python /opt/venv/bin/python
    """
    from hvd_elastic.engines.ray.nodes import ClusterRecord, NodeSettings, Started, bring_up

    store_bytes = None if object_store is None else int(object_store * 1e6)
    settings = NodeSettings(python or sys.executable, port, store_bytes)
    record, printer = ClusterRecord(chosen.hostfile), Printer(chosen.hosts)

    def describe(result: HostResult[Started]) -> dict[str, Any]:
        value = result.value
        return {"address": value.address, "new": value.new, "ray": value.ray} if value else {}

    def word(result: HostResult[Started]) -> str:
        value = result.answer
        done = "Ray" if value.new else "is up already: Ray"
        return f"{done} {value.ray} at {value.address}"

    with record.locked(lambda: printer.print_note(_WAITING)):
        finish(
            chosen,
            bring_up(record, chosen.hosts, chosen.ssh, settings, chosen.fanout),
            printer,
            describe,
            word,
        )


_WAITING = "waiting for another command that changes this cluster"


@command(HostOptions, but=_WITHOUT)
def status(chosen: HostOptions) -> None:
    """Say which nodes are up, and how much memory their processes use.

    Exit status: 0 if the nodes of all hosts are up.

    For example:

      hvd-elastic ray status hosts --json
    """
    from hvd_elastic.engines.ray.nodes import ClusterRecord, Looked, look_at

    cluster = ClusterRecord(chosen.hostfile).require()
    printer = Printer(chosen.hosts)

    def assess(result: HostResult[Looked]) -> HostResult[Looked]:
        if result.value is None or result.value.state == "up":
            return result
        advice = f"start it with: hvd-elastic ray up {chosen.hostfile}"
        return replace(
            result, outcome=Outcome.FAILED, error=f"the node is {result.value.state}; {advice}"
        )

    def describe(result: HostResult[Looked]) -> dict[str, Any]:
        return {"is_head": result.host.name == cluster.head.name, **_fields(result.value)}

    def word(result: HostResult[Looked]) -> str:
        value = result.answer
        head = f"head at {cluster.address}, " if result.host.name == cluster.head.name else ""
        return f"{head}{count(value.processes, 'process')}, {bytes_words(value.bytes)}"

    looked = look_at(cluster, chosen.hosts, chosen.ssh, chosen.fanout)
    finish(chosen, map(assess, looked), printer, describe, word)


@command(HostOptions, but=[*_WITHOUT, "only_hosts", "exclude_hosts", "fanout"], pass_on=True)
def exec_(
    chosen: HostOptions,
    command: Annotated[
        list[str], argument("Such as python driver.py, and its arguments.", "COMMAND...")
    ],
    here: Annotated[
        bool, option("Run it on this machine, connected to the head (ray://).", "--here")
    ] = False,
    cwd: Annotated[
        str | None, option("Folder on the head (default: the current one).", "--cwd", metavar="DIR")
    ] = None,
) -> None:
    """Run a driver script on the head, with RAY_ADDRESS and the token set.

    Ctrl-C ends it with all that it has started. Exit status: the command's with --here;
    else 1 if it is not 0.

    For example:

      hvd-elastic ray exec hosts -- python train_on_ray.py --epochs 3

      hvd-elastic ray exec hosts --here -- python train_on_ray.py
    """
    from hvd_elastic.engines.ray.nodes import ClusterRecord
    from hvd_elastic.tools.run.commands import (
        CommandSettings,
        HowToRun,
        join_command,
        run_on_hosts,
    )

    record = ClusterRecord(chosen.hostfile)
    cluster = record.require()
    if here:
        if cwd is not None:
            raise UsageError("--cwd is a folder on the head; leave it out with --here")
        variables = cluster.outside_variables(record.token_file)
        try:
            done = subprocess.run(command, env={**os.environ, **variables})
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be run: {error.strerror}") from error
        raise typer.Exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)
    head = chosen.over([cluster.head])
    printer = Printer(head.hosts)
    how = HowToRun(cluster.variables, cwd or str(Path.cwd()))
    # So that "python" is the one with Ray.
    path = shlex.quote(str(Path(cluster.settings.python).parent))
    text = f'PATH={path}:"$PATH"; {join_command(command)}'
    on_lines = None if chosen.as_json else printer.lines
    has_stdin = sys.stdin is not None and not sys.stdin.isatty()
    with open(0, "rb", buffering=0, closefd=False) if has_stdin else nullcontext() as file:
        finish(
            head,
            run_on_hosts(head.hosts, text, chosen.ssh, CommandSettings(how), file, on_lines),
            printer,
            describe_command,
        )


@command(HostOptions, but=_WITHOUT)
def down(chosen: HostOptions) -> None:
    """End the nodes that ray up has started on these hosts, and no other process.

    They are found by a variable in their environment, so also where the head was killed; other Ray
    clusters on the hosts stay. Hosts that are no longer in the hostfile are included.

    For example:

      hvd-elastic ray down hosts

      hvd-elastic ray down hosts --hosts gpu07
    """
    from hvd_elastic.engines.ray.nodes import ClusterRecord, take_down

    record = ClusterRecord(chosen.hostfile)
    printer = Printer(chosen.hosts)
    with record.locked(lambda: printer.print_note(_WAITING)):
        cluster = record.read()
        if cluster is None:
            printer.print_note(
                f"no Ray cluster was started from {chosen.hostfile}: there is nothing to end"
            )
            return
        in_file = {host.name for host in parse_hostfile(chosen.hostfile)}
        hosts = [*chosen.hosts, *(host for host in cluster.hosts if host.name not in in_file)]

        def word(result: HostResult[int]) -> str:
            return f"{count(result.answer, 'process')} ended"

        finish(
            chosen.over(hosts),
            take_down(record, cluster, hosts, chosen.ssh, chosen.fanout),
            printer,
            lambda result: {} if result.value is None else {"ended": result.value},
            word,
        )


def _fields(value: object) -> dict[str, Any]:
    return {} if value is None else dict(vars(value))


ray = group_of(
    "A Ray cluster on the hosts of a hostfile, with a token, on ports and in a folder of its own.",
    {"up": up, "status": status, "exec": exec_, "down": down},
)
