"""Implement ``runclust``: run a command on every host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hvd_elastic.cli.cluster.command_output import describe_command, show_gathered, show_plan
from hvd_elastic.cli.cluster.host_options import HostOptions
from hvd_elastic.cli.cluster.host_report import Printer, finish
from hvd_elastic.cli.options import argument, command, number_option, option, whole_number_option
from hvd_elastic.errors import UsageError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.tools.run.commands import CommandSettings, HowToRun, join_command, run_on_hosts


@command(HostOptions, pass_on=True)
def run(
    chosen: HostOptions,
    command: Annotated[
        list[str],
        argument(
            "One word is shell text ('ls | wc -l'); several are a program and its arguments.",
            "COMMAND...",
        ),
    ],
    gather: Annotated[
        bool, option("show output at the end, equal output of several hosts once", "--gather", "-b")
    ] = False,
    timeout: Annotated[
        float | None,
        number_option(
            "time limit for the command on each host",
            "--timeout",
            "-t",
            least=0.1,
            metavar="SECONDS",
        ),
    ] = None,
    total_timeout: Annotated[
        float | None,
        number_option(
            "time limit for all hosts together", "--total-timeout", least=0.1, metavar="SECONDS"
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        option(
            "set a variable there, to this shell's value if none is given; may be repeated",
            "--env",
            "-e",
            metavar="NAME[=VALUE]",
        ),
    ] = None,
    cwd: Annotated[
        str | None, option("run in this folder (default: home)", "--cwd", metavar="DIR")
    ] = None,
    sudo: Annotated[
        bool, option("run as root, with a sudo that asks for no password", "--sudo")
    ] = False,
    retries: Annotated[
        int, whole_number_option("further attempts to connect to a host", "--retries", least=0)
    ] = 0,
    pty: Annotated[
        bool, option("give this terminal to the command, on the one host of --hosts", "--pty")
    ] = False,
    stdin_each: Annotated[
        str | None,
        option("input file of each host; {host} in its name", "--stdin-each", metavar="FILE"),
    ] = None,
    no_stdin: Annotated[
        bool,
        option("give the command no input (default: a copy of this input)", "--no-stdin", "-n"),
    ] = False,
) -> None:
    """Run a shell command on every host; show output as it arrives, with the host's name.

    Ctrl-C ends the command on every host, with everything that it started.

    For example:

      runclust hosts uptime

      runclust hosts --gather --hosts 'gpu[01-04]' -t 60 'nvidia-smi -L | wc -l'

      runclust hosts --env HF_TOKEN --cwd /data -- python3 fetch.py

      runclust hosts 'cat > job.yaml' < job.yaml

      runclust hosts --stdin-each 'settings/{host}.yaml' 'cat > job.yaml'

      runclust hosts --hosts gpu3 --pty htop
    """
    if stdin_each is not None and no_stdin:
        raise UsageError("--stdin-each gives the command an input, --no-stdin none: give one")
    text = join_command(command)
    how = HowToRun(_read_environment(env or ()), cwd or "", sudo)
    if chosen.dry_run:
        show_plan(chosen, text, how)
        return
    if pty:
        given = {
            "--gather": gather,
            "--timeout": timeout is not None,
            "--total-timeout": total_timeout is not None,
            "--retries": retries > 0,
            "--stdin-each": stdin_each is not None,
            "--no-stdin": no_stdin,
            "--json": chosen.as_json,
        }
        _run_with_terminal(
            chosen, text, how, [flag for flag, is_given in given.items() if is_given]
        )
        return
    settings = CommandSettings(how, chosen.fanout, timeout, total_timeout, retries)
    printer = Printer(chosen.hosts)
    # What the user's own command prints may have colours.
    on_lines = None if chosen.as_json or gather else partial(printer.lines, raw=True)
    has_stdin = not no_stdin and sys.stdin is not None and not sys.stdin.isatty()
    has_stdin = has_stdin and not _is_nothing(0) and stdin_each is None
    inputs = None if stdin_each is None else _inputs(stdin_each, chosen.hosts)
    # Not sys.stdin: a background thread that reads it would delay the end of this process.
    with open(0, "rb", buffering=0, closefd=False) if has_stdin else nullcontext() as stdin:
        results = run_on_hosts(
            chosen.hosts, text, chosen.ssh, settings, stdin, on_lines, printer.waiting, inputs
        )
        finish(
            chosen,
            results,
            printer,
            describe_command,
            gather=partial(show_gathered, chosen.hosts) if gather and not chosen.as_json else None,
            tell_reasons=True,
        )


def _inputs(pattern: str, hosts: Sequence[Host]) -> dict[str, Path]:
    """Return the file that each host reads, by its name."""
    if "{host}" not in pattern:
        raise UsageError(
            f"--stdin-each '{pattern}' has no {{host}}, so all hosts would have the same; write "
            f"{{host}} for the name of each, or < {pattern}"
        )
    found = {host.name: Path(pattern.replace("{host}", host.name)).expanduser() for host in hosts}
    missing = [str(path) for path in found.values() if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UsageError(f"--stdin-each: there is no file {', '.join(missing[:3])}{more}")
    return found


def _run_with_terminal(
    chosen: HostOptions, text: str, how: HowToRun, others: Sequence[str]
) -> None:
    from hvd_elastic.hosts.terminal import run_in_terminal

    if len(chosen.hosts) != 1:
        raise UsageError(f"--pty is for one host, not {len(chosen.hosts)}: name it with --hosts")
    if not how.is_plain:
        raise UsageError("--pty does not go with --env, --cwd and --sudo: write them in COMMAND")
    if others:
        raise UsageError(f"--pty does not go with {', '.join(others)}: leave out one of them")
    status = run_in_terminal(chosen.hosts[0], text, chosen.ssh)
    if status:
        raise typer.Exit(status)


def _read_environment(words: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name.isidentifier() or not name.isascii():
            raise UsageError(f"--env '{word}': write NAME=VALUE, or NAME for this shell's value")
        if not equals and name not in os.environ:
            raise UsageError(f"--env {name}: this shell has no such variable; write {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def _is_nothing(descriptor: int) -> bool:
    """Return whether a descriptor is /dev/null; it need not be sent, since hosts have their own."""
    return os.fstat(descriptor).st_rdev == os.stat(os.devnull).st_rdev  # noqa: PTH116
