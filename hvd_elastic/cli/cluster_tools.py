"""The commands ``runclust``, ``copyclust``, ``killclust``, ``checkclust``, ``hvd-elastic trust``.

``hvd-elastic cluster run|copy|kill|check|trust`` calls the same functions. Exit status: 0 if all
hosts succeeded, 1 if something failed and was reported by host, 2 for wrong usage.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
import typer.main

from hvd_elastic.cli.bootstrapping import REFUSED, accept_host_keys, bootstrap_hosts
from hvd_elastic.cli.check_report import describe_health, show_health, show_links
from hvd_elastic.cli.command_output import describe_command, show_gathered, show_plan
from hvd_elastic.cli.copy_bar import copy_bar
from hvd_elastic.cli.entry import enter
from hvd_elastic.cli.host_options import Chosen, over_hosts
from hvd_elastic.cli.host_report import Printer, conclude, finish, show_result
from hvd_elastic.cli.kill_report import describe_ended, show_ended
from hvd_elastic.cli.newcomers import Newcomers
from hvd_elastic.cli.numbers import number_option, whole_number_option
from hvd_elastic.cluster.run.commands import CommandSettings, HowToRun, join_command, run_on_hosts
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.hosts.fanout import HostResult
from hvd_elastic.hosts.hostfile import Host, parse_hosts

if TYPE_CHECKING:
    from hvd_elastic.cluster.copy.job import CopySettings, Pulled
    from hvd_elastic.cluster.kill import Ended


class HostfileFirst(typer.core.TyperCommand):
    """Accepts options before and after HOSTFILE; everything after them is the user's command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = self._end_of_options(args, 0)
        if at < len(args) and args[at] != "--":
            end = self._end_of_options(args, at + 1)
            # The parser stops at the first argument, so move the hostfile next to the command.
            rest = args[end + 1 :] if args[end : end + 1] == ["--"] else args[end:]
            args = [*args[:at], *args[at + 1 : end], "--", args[at], *rest]
        return super().parse_args(ctx, args)

    def _end_of_options(self, args: Sequence[str], index: int) -> int:
        valued = {
            name
            for parameter in self.params
            if getattr(parameter, "nargs", 0) == 1 and not getattr(parameter, "is_flag", True)
            for name in parameter.opts
        }
        while index < len(args) and args[index].startswith("-") and args[index] != "--":
            index += 2 if args[index] in valued else 1
        return min(index, len(args))


@over_hosts()
def run(
    chosen: Chosen,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="One word is shell text ('ls | wc -l'); several are a program and its arguments.",
        ),
    ],
    gather: Annotated[
        bool,
        typer.Option("--gather", "-b", help="Show output at the end, the same of many hosts once."),
    ] = False,
    timeout: Annotated[
        float | None,
        number_option(
            "--timeout", "-t", least=0.1, metavar="SECONDS", help="For the command on each host."
        ),
    ] = None,
    total_timeout: Annotated[
        float | None,
        number_option(
            "--total-timeout", least=0.1, metavar="SECONDS", help="For all hosts together."
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            "-e",
            metavar="NAME[=VALUE]",
            help="Set a variable there, to this shell's value if none is given; may be repeated.",
        ),
    ] = None,
    cwd: Annotated[
        str | None,
        typer.Option("--cwd", metavar="DIR", help="Run in this folder (default: the home)."),
    ] = None,
    sudo: Annotated[
        bool, typer.Option("--sudo", help="Run as root, by a sudo that asks for no password.")
    ] = False,
    retries: Annotated[
        int,
        whole_number_option("--retries", least=0, help="Further attempts to connect to a host."),
    ] = 0,
    no_stdin: Annotated[
        bool,
        typer.Option("--no-stdin", "-n", help="No input for the command; else it gets this one's."),
    ] = False,
) -> None:
    """Run a shell command on every host; show output as it arrives, with the host's name.

    Ctrl-C ends the command on every host, with everything that it started.

    For example:

      runclust hosts uptime

      runclust hosts --gather --hosts 'gpu[01-04]' -t 60 'nvidia-smi -L | wc -l'

      runclust hosts --env HF_TOKEN --cwd /data -- python3 fetch.py

      runclust hosts 'cat > job.yaml' < job.yaml
    """
    text = join_command(command)
    how = HowToRun(_read_environment(env or ()), cwd or "", sudo)
    if chosen.dry_run:
        show_plan(chosen, text, how)
        return
    settings = CommandSettings(how, chosen.fanout, timeout, total_timeout, retries)
    printer = Printer(chosen.hosts)
    on_lines = None if chosen.as_json or gather else printer.lines
    has_stdin = not no_stdin and sys.stdin is not None and not sys.stdin.isatty()
    has_stdin = has_stdin and not _is_nothing(0)
    # Not sys.stdin: a background thread that reads it would delay the end of this process.
    with open(0, "rb", buffering=0, closefd=False) if has_stdin else nullcontext() as stdin:
        results = run_on_hosts(
            chosen.hosts, text, chosen.ssh, settings, stdin, on_lines, printer.waiting
        )
        finish(
            chosen,
            results,
            printer,
            describe_command,
            gather=partial(show_gathered, chosen.hosts) if gather and not chosen.as_json else None,
            tell_reasons=True,
        )


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


@over_hosts()
def copy(
    chosen: Chosen,
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="[SRC] DST",
            help="SRC: a file or folder here, or on --from HOST; none with --pull. DST: its place "
            "on every host, absolute or ~/…; inside it if it ends in /.",
        ),
    ],
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove at DST what SRC has not.")
    ] = False,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="PATTERN",
            help="Leave files out (*.tmp, cache, data/old*), and alone at DST; may be repeated.",
        ),
    ] = None,
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Compare contents, not size and time.")
    ] = False,
    bwlimit: Annotated[
        float,
        number_option("--bwlimit", metavar="MB/S", help="Most that each host sends; 0: no limit."),
    ] = 0.0,
    compress: Annotated[
        bool, typer.Option("--compress/--no-compress", help="Compress where it pays.")
    ] = True,
    plain: Annotated[
        bool, typer.Option("--plain", help="Do not encrypt: for a network that you trust.")
    ] = False,
    shard: Annotated[
        bool, typer.Option("--shard", help="Give each host only its part: every n-th file.")
    ] = False,
    source_host: Annotated[
        str | None, typer.Option("--from", metavar="HOST", help="The host that has SRC.")
    ] = None,
    pull: Annotated[
        str | None,
        typer.Option(
            "--pull",
            metavar="COMMAND",
            help="Instead of SRC: what brings the files of a shared store to {dst}.",
        ),
    ] = None,
    listed: Annotated[
        str | None,
        typer.Option(
            "--list",
            metavar="FILE",
            help="With --pull: the files there (-: stdin), a path a line, or size, tab, path. Each "
            "host fetches a share of them: {path} for each, or {list}.",
        ),
    ] = None,
    jobs: Annotated[
        int, whole_number_option("--jobs", least=1, help="Of --pull with {path}, at a time.")
    ] = 8,
) -> None:
    """Copy a file or folder to every host; it is sent once and passed on from host to host.

    Only files that differ (by size and time) are sent, and each is verified by SHA-256 before it
    gets its name. Repeat the command after an interruption to continue.

    For example:

      copyclust hosts train.py '~/job/'

      copyclust hosts /data/digits /data/digits --delete --exclude '*.tmp'

      copyclust hosts /data/digits /data/digits --from gpu07 --bwlimit 50

      copyclust hosts --pull 'aws s3 sync s3://bucket/set {dst}' /data/set

      copyclust hosts --pull 'aws s3 cp s3://bucket/set/{path} {dst}/{path}' --list names /data/set
    """
    from hvd_elastic.cli.copy_report import copied_in_words, describe_copied
    from hvd_elastic.cluster.copy.copying import CopySettings, copy_to_hosts

    if not places[0]:
        # Path would turn it into the current folder.
        name = "source" if pull is None else "destination"
        raise UsageError(f"{name} '': it is empty. Is a variable of your script not set?")
    for pattern in exclude or ():
        if any(host.name == pattern for host in chosen.hosts):
            raise UsageError(
                f"--exclude {pattern}: {pattern} is a host, and --exclude leaves out files. Leave "
                f"the host out by --exclude-hosts {pattern}, a file of this name by "
                f"--exclude /{pattern}"
            )
    settings = CopySettings(
        delete=delete,
        exclude=tuple(exclude or ()),
        checksum=checksum,
        plain=plain,
        compress=compress,
        bytes_per_s=bwlimit * 1e6,
        shard=shard,
        dry_run=chosen.dry_run,
        fanout=chosen.fanout,
    )
    start, pulled = None, None
    if pull is not None:
        pulled, target = _read_pull(pull, places, listed, jobs, settings, source_host)
        source: Path | Pulled = pulled
    else:
        start = _find_host(chosen.hosts, source_host) if source_host else None
        source, target = _read_places(places, listed, start)
    printer = Printer(chosen.hosts)
    newcomers = Newcomers(chosen, printer.note)
    chosen = replace(chosen, hosts=newcomers.hosts)
    with copy_bar(quiet=chosen.as_json) as show:
        finish(
            chosen,
            copy_to_hosts(
                chosen.hosts,
                source,
                target,
                chosen.ssh,
                settings,
                start,
                show,
                lambda path: printer.note(f"{path}: neither file, folder nor link; left out"),
                newcomers,
            ),
            printer,
            lambda result: describe_copied(result, target, pulled is not None),
            lambda result: copied_in_words(result, chosen, printer, pulled),
        )


def _read_places(
    places: Sequence[str], listed: str | None, source_host: Host | None
) -> tuple[Path, str]:
    """Return the source and the destination."""
    from hvd_elastic.cluster.copy.copying import check_destination, check_source

    if listed is not None:
        raise UsageError("--list says what --pull fetches; give --pull COMMAND")
    if len(places) != 2:
        raise UsageError("give SRC and DST, or --pull COMMAND and DST; see copyclust --help")
    source = Path(places[0])
    target = check_destination(source, places[1])
    if source_host is None:
        source = source.expanduser().absolute()
        check_source(source)
    return source, target


def _read_pull(
    command: str,
    places: Sequence[str],
    listed: str | None,
    jobs: int,
    settings: CopySettings,
    source_host: str | None,
) -> tuple[Pulled, str]:
    """Return what to fetch, and the destination."""
    from hvd_elastic.cluster.copy.copying import Pulled, check_destination
    from hvd_elastic.cluster.copy.pull import check_pull, read_list

    if len(places) != 1:
        raise UsageError("with --pull give DST alone; the command says where the files come from")
    given = {"--checksum": settings.checksum, "--shard": settings.shard, "--from": source_host}
    for name, value in given.items():
        if value not in (None, False):
            raise UsageError(f"{name} does not go with --pull; leave it out")
    check_pull(command, listed is not None)
    files = None
    if listed is not None:
        try:
            list_path = Path(listed).expanduser()
            data = sys.stdin.buffer.read() if listed == "-" else list_path.read_bytes()
        except OSError as error:
            raise UsageError(f"--list {listed}: {error.strerror}") from error
        files = read_list(data, settings.exclude)
    target = check_destination(Path(places[0]), places[0].rstrip("/") or "/")
    return Pulled(command, files, jobs), target


def _find_host(hosts: Sequence[Host], text: str) -> Host:
    """Return the host of that name from the hostfile, or else a host parsed from the text."""
    known = next((host for host in hosts if host.name == text), None)
    return known or parse_hosts(text, "--from").hosts[0]


@over_hosts()
def kill(
    chosen: Chosen,
    run_id: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="End what this run left.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="End every run's processes.")] = False,
    strays: Annotated[
        bool,
        typer.Option(
            "--strays", help="End workers that a dead torchrun, mpirun or horovodrun left."
        ),
    ] = False,
    user_processes: Annotated[
        str | None,
        typer.Option(
            "--user-processes",
            metavar="PATTERN",
            help="End your processes whose command line matches this regular expression.",
        ),
    ] = None,
    grace: Annotated[
        float, number_option("--grace", metavar="SECONDS", help="Between TERM and KILL.")
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
    from hvd_elastic.cluster.kill import Target, kill_run

    if [run_id is not None, every, strays, user_processes is not None].count(True) != 1:
        raise UsageError(
            "say what to end: --run RUN for one run (hvd-elastic list shows them), --all, "
            "--strays, or --user-processes PATTERN"
        )
    if run_id == "":
        raise UsageError("--run '': it is empty. Is a variable of your script not set?")
    if user_processes is not None:
        _check_pattern(user_processes)
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
    return bool(result.answer.processes or files)


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


@over_hosts(without=["dry_run"])
def check(
    chosen: Chosen,
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="PATH", help="Python there (default: the leader's path)."),
    ] = None,
    folder: Annotated[
        list[str] | None,
        typer.Option(
            "--folder", metavar="PATH", help="A folder that a run writes to; may be repeated."
        ),
    ] = None,
    code: Annotated[
        Path | None,
        typer.Option(
            "--code", metavar="PATH", help="A file or folder with the same Python code everywhere."
        ),
    ] = None,
    network_interface: Annotated[
        str | None,
        typer.Option(
            "--network-interface", metavar="NAME", help="Of the ring (default: that of ssh)."
        ),
    ] = None,
    network: Annotated[
        bool, typer.Option("--network/--no-network", help="Measure the network between the hosts.")
    ] = True,
    gpus: Annotated[
        bool,
        typer.Option("--gpus/--no-gpus", help="Look at GPUs (no: the job trains on processors)."),
    ] = True,
    bootstrap: Annotated[
        bool,
        typer.Option("--bootstrap", help="First accept host keys and bring your own key there."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="With --bootstrap: accept without asking.")
    ] = False,
) -> None:
    """Report for every host what would break a run on it, and what to do about it.

    Checks connection, Python, packages, code, CUDA, GPUs, folders, memory, limits, clock, names,
    interfaces and stray processes; then whether hosts reach one another, and how fast.

    For example:

      checkclust hosts

      checkclust hosts --code . --folder /data --python /opt/venv/bin/python --json

      checkclust hosts --bootstrap
    """
    from hvd_elastic.cluster.check.health import CheckSettings, check_cluster

    if code is not None and not code.exists():
        raise UsageError(f"--code {code}: there is no such file or folder on this machine")
    settings = CheckSettings(
        python,
        tuple(folder or ()),
        None if code is None else str(code.absolute()),
        network_interface,
        network,
        chosen.fanout,
        gpus,
    )
    if bootstrap:
        bootstrap_hosts(chosen, yes)
    started = time.monotonic()
    printer = Printer(chosen.hosts)
    found = check_cluster(chosen.hosts, chosen.ssh, settings, printer.passing)
    printer.clear()
    for result in found.hosts:
        show_result(result, printer, chosen.as_json, describe_health, tell_failures=False)
        if not chosen.as_json:
            show_health(result, printer, chosen.verbose)
    show_links(found.links, printer, chosen.as_json)
    conclude(chosen, found.hosts, printer, seconds=time.monotonic() - started)


@over_hosts(without=["hosts", "exclude_hosts", "dry_run", "identity"])
def trust(
    chosen: Chosen,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Accept without asking.")] = False,
) -> None:
    """Show the hosts' key fingerprints and accept them into the project's own known_hosts.

    Compare each with the host's own (on it: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub).
    A key that has changed is never accepted here.

    For example:

      hvd-elastic trust hosts
    """
    shown = accept_host_keys(chosen, yes)
    if any(entry.state in REFUSED for entry in shown):
        raise typer.Exit(1)


_PASS_ON = {"allow_interspersed_args": False}

cluster = typer.Typer(
    name="cluster",
    help="Run, copy, kill and check on all hosts of a hostfile.",
    no_args_is_help=True,
    add_completion=False,
)
cluster.command("run", cls=HostfileFirst, context_settings=_PASS_ON)(run)
cluster.command("copy")(copy)
cluster.command("kill")(kill)
cluster.command("check")(check)
cluster.command("trust")(trust)


def runclust_main() -> None:
    """Entry point of ``runclust``."""
    _main("runclust", run, HostfileFirst, _PASS_ON)


def copyclust_main() -> None:
    """Entry point of ``copyclust``."""
    _main("copyclust", copy)


def killclust_main() -> None:
    """Entry point of ``killclust``."""
    _main("killclust", kill)


def checkclust_main() -> None:
    """Entry point of ``checkclust``."""
    _main("checkclust", check)


def _is_nothing(descriptor: int) -> bool:
    """Return whether a descriptor is /dev/null; it need not be sent, since hosts have their own."""
    return os.fstat(descriptor).st_rdev == os.stat(os.devnull).st_rdev  # noqa: PTH116


def _main(
    name: str,
    function: Callable[..., None],
    cls: type[typer.core.TyperCommand] = typer.core.TyperCommand,
    settings: dict[str, Any] | None = None,
) -> None:
    app = typer.Typer(add_completion=False)
    app.command(
        name, cls=cls, context_settings={"help_option_names": ["-h", "--help"], **(settings or {})}
    )(function)
    # Batch systems end a process with TERM; handle it like Ctrl-C, which stops the hosts' commands.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    enter(name, typer.main.get_command(app))
