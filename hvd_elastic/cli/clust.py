"""``runclust``, ``copyclust``, ``killclust``, ``checkclust``, and ``hvd-elastic trust``.

The same functions stand behind ``hvd-elastic cluster run|copy|kill|check|trust``. Exit status:
0 all hosts well, 1 something failed and was reported by host, 2 wrong usage.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from hvd_elastic.cli.copy_bar import copy_bar
from hvd_elastic.cli.entry import enter
from hvd_elastic.cli.host_options import Chosen, over_hosts
from hvd_elastic.cli.numbers import number_option
from hvd_elastic.cli.start import INTERRUPTED
from hvd_elastic.cluster.commands import join_command, run_on_hosts
from hvd_elastic.cluster.fanout import HostResult, Outcome
from hvd_elastic.cluster.hostfile import Host, fold_hosts, parse_hosts
from hvd_elastic.cluster.ssh import is_local
from hvd_elastic.errors import UsageError
from hvd_elastic.words import count

__all__ = [
    "check",
    "checkclust_main",
    "cluster",
    "cluster_app",
    "copy",
    "copyclust_main",
    "kill",
    "killclust_main",
    "run",
    "runclust_main",
    "trust",
]

COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class _HostfileFirst(typer.core.TyperCommand):
    """Lets options stand before or after HOSTFILE; after them everything is the user's command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-"):
            end = self._end_of_options(args, 1)
            # The parser stops at the first argument: the hostfile must come right before the rest.
            rest = args[end + 1 :] if args[end : end + 1] == ["--"] else args[end:]
            args = [*args[1:end], "--", args[0], *rest]
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
    timeout: Annotated[
        float | None,
        number_option("--timeout", "-t", least=0.1, metavar="SECONDS", help="For the command."),
    ] = None,
) -> None:
    """Run a shell command on every host, output as it comes, each line under its host's name.

    Ctrl-C ends the command on every host.

    For example:

      runclust hosts uptime

      runclust hosts --hosts 'gpu[01-04]' -t 60 'nvidia-smi -L | wc -l'

      runclust hosts --json -- python3 -c 'print(6 * 7)'
    """
    text = join_command(command)
    if chosen.dry_run:
        _show_plan(chosen, text)
        return
    printer = _Printer(chosen.hosts)
    on_line = None if chosen.as_json else printer.line
    results = run_on_hosts(chosen.hosts, text, chosen.ssh, chosen.fanout, timeout, on_line)

    def describe(result: HostResult[Any]) -> dict[str, Any]:
        value = result.value
        return {
            "exit_status": value.exit_status if value else None,
            "stdout": value.stdout.decode("utf-8", errors="replace") if value else "",
            "stderr": value.stderr.decode("utf-8", errors="replace") if value else "",
        }

    _finish(chosen, results, printer, describe)


@over_hosts(excludes_files=True)
def copy(
    chosen: Chosen,
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A file or folder here (or on --from HOST).")
    ],
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="Its place on every host: absolute or ~/…; inside it if it ends in /.",
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
            help="Leave these out (*.tmp, cache, data/old*), and alone at DST; may be repeated.",
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
) -> None:
    """Copy a file or folder to every host: sent once, passed on from host to host.

    Only what differs (by size and time) is sent, and a file gets its name when its SHA-256 is
    right. Repeated after an interruption it goes on where it was.

    For example:

      copyclust hosts train.py '~/job/'

      copyclust hosts /data/digits /data/digits --delete --exclude '*.tmp'

      copyclust hosts /data/digits /data/digits --from gpu07 --bwlimit 50
    """
    from hvd_elastic.cluster.copy import (
        CopySettings,
        check_destination,
        check_source,
        copy_to_hosts,
    )

    target = check_destination(source, destination)
    start = _find_host(chosen.hosts, source_host) if source_host else None
    if start is None:
        source = source.expanduser().absolute()
        check_source(source)
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
    printer = _Printer(chosen.hosts)

    def describe(result: HostResult[Any]) -> dict[str, Any]:
        value = result.value
        return {
            "destination": target,
            "files": value.files if value else 0,
            "bytes": value.size_bytes if value else 0,
            "resumed_bytes": value.resumed_bytes if value else 0,
            "skipped": value.skipped if value else 0,
            "touched": value.touched if value else 0,
            "removed": list(value.removed) if value else [],
            "problems": list(value.problems) if value else [],
        }

    def word(result: HostResult[Any]) -> str:
        value = result.answer
        parts = [f"{count(value.files, 'file')}, {value.size_bytes / 1e6:.1f} MB"]
        parts[0] += " to copy" if chosen.dry_run else " copied"
        if not chosen.dry_run:
            parts[0] += f" ({value.size_bytes / 1e6 / max(result.seconds, 1e-3):.1f} MB/s)"
        parts.append(f"{value.skipped} there already")
        if value.touched:
            parts.append(f"{value.touched} of other time or mode only")
        if value.removed:
            parts.append(f"{len(value.removed)} {'to remove' if chosen.dry_run else 'removed'}")
            for path in value.removed if chosen.dry_run or chosen.verbose else ():
                printer.line(result.host, "stdout", f"remove {path}")
        return ", ".join(parts)

    with copy_bar(quiet=chosen.as_json) as show:
        results = copy_to_hosts(
            chosen.hosts,
            source,
            target,
            chosen.ssh,
            settings,
            start,
            show,
            lambda path: printer.note(f"{path}: neither file, folder nor link; left out"),
        )
        _finish(chosen, results, printer, describe, word)


def _find_host(hosts: Sequence[Host], text: str) -> Host:
    """The host of that name with what the hostfile says of it, or as the text itself says."""
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
    grace: Annotated[
        float, number_option("--grace", metavar="SECONDS", help="Between TERM and KILL.")
    ] = 5.0,
) -> None:
    """End your own processes of a run, with their descendants, on every host; nothing else.

    They are found by HVD_ELASTIC_RUN_ID in their environment, not by name; with --strays by what
    other launchers put there, and only where no living process holds them.

    For example:

      killclust hosts --run digits-1 --dry-run

      killclust hosts --run digits-1

      killclust hosts --strays --dry-run
    """
    from hvd_elastic.cluster.procs import kill_run

    if [run_id is not None, every, strays].count(True) != 1:
        raise UsageError(
            "say what to end: --run RUN for one run (hvd-elastic list shows them), --all, or "
            "--strays"
        )
    printer = _Printer(chosen.hosts)
    results = kill_run(
        chosen.hosts, run_id, chosen.ssh, grace, chosen.dry_run, chosen.fanout, strays
    )

    def describe(result: HostResult[Any]) -> dict[str, Any]:
        return {"processes": [vars(process) for process in result.value or ()]}

    def word(result: HostResult[Any]) -> str:
        for process in result.answer:
            done = {"": "found", "left": "NOT ended"}.get(process.ended, f"{process.ended} ended")
            printer.line(result.host, "stdout", f"{done} {process.pid}  {process.command}")
        return f"{count(len(result.answer), 'process')} {'found' if chosen.dry_run else 'ended'}"

    _finish(chosen, results, printer, describe, word)


@over_hosts(without=["dry_run"])
def check(
    chosen: Chosen,
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="PATH", help="Python there (default: the leader's path)."),
    ] = None,
) -> None:
    """Say of every host whether it is fit for a run.

    Looked at: connection, Python, packages, disk, clock, cores.

    For example:

      checkclust hosts

      checkclust hosts --python /opt/venv/bin/python --json
    """
    from hvd_elastic.cluster.health import Level, check_hosts

    printer = _Printer(chosen.hosts)

    def describe(result: HostResult[Any]) -> dict[str, Any]:
        checks = result.value.checks if result.value else ()
        return {
            "checks": [
                {"name": item.name, "level": item.level.value, "detail": item.detail}
                for item in checks
            ]
        }

    def word(result: HostResult[Any]) -> str:
        if result.answer.level is Level.OK and not chosen.verbose:
            return "fit"
        for item in result.answer.checks:
            if chosen.verbose or item.level is not Level.OK:
                text = f"{item.level.value:8}{item.name}: {item.detail}"
                printer.line(result.host, "stdout", text)
        return "fit" if result.answer.level is Level.OK else "fit, with warnings"

    checked = check_hosts(chosen.hosts, chosen.ssh, python, chosen.fanout)
    results = list(_report(checked, printer, chosen.as_json, describe, word))
    if not chosen.as_json:
        _show_table(chosen.hosts, results)
    _end(chosen, results, printer)


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
    from hvd_elastic.cluster.ssh import own_known_hosts
    from hvd_elastic.cluster.trust import ShownKey, TrustState, trust_hosts

    def confirm(unknown: list[ShownKey]) -> bool:
        if not chosen.as_json:
            width = max(len(entry.host) for entry in unknown)
            for entry in unknown:
                kind = entry.key.key_type if entry.key else ""
                print(f"{entry.host:{width}}  {kind}  {entry.fingerprint}", flush=True)
        if yes:
            return True
        if chosen.as_json or not sys.stdin.isatty():
            return False
        print(f"Accept {count(len(unknown), 'key')}? [y/N] ", end="", flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    shown = trust_hosts(chosen.hosts, chosen.ssh, confirm, chosen.fanout)
    counts = Counter(entry.state for entry in shown)
    for entry in shown:
        if chosen.as_json:
            _print_json(
                {
                    "kind": "host",
                    "host": entry.host,
                    "state": entry.state.value,
                    "key_type": entry.key.key_type if entry.key else None,
                    "fingerprint": entry.fingerprint or None,
                    "error": entry.message,
                }
            )
        elif entry.message:
            print(f"{entry.host}: {entry.state.value}: {entry.message}", file=sys.stderr)
    if not chosen.as_json:
        words = [f"{count} {state.value}" for state, count in counts.items()]
        print(
            f"{count(len(shown), 'host')}: {', '.join(words)} ({own_known_hosts()})",
            file=sys.stderr,
        )
        if counts[TrustState.DECLINED] and not sys.stdin.isatty():
            print("not accepted: run it on a terminal, or with --yes", file=sys.stderr)
    if any(counts[s] for s in (TrustState.DECLINED, TrustState.REFUSED, TrustState.UNREACHABLE)):
        raise typer.Exit(1)


_PASS_ON = {"allow_interspersed_args": False}

cluster = typer.Typer(
    name="cluster",
    help="Run, copy, kill and check on all hosts of a hostfile.",
    no_args_is_help=True,
    add_completion=False,
)
cluster.command("run", cls=_HostfileFirst, context_settings=_PASS_ON)(run)
cluster.command("copy")(copy)
cluster.command("kill")(kill)
cluster.command("check")(check)
cluster.command("trust")(trust)
cluster_app = cluster


def runclust_main() -> None:
    """Entry point of ``runclust``."""
    _main("runclust", run, _HostfileFirst, _PASS_ON)


def copyclust_main() -> None:
    """Entry point of ``copyclust``."""
    _main("copyclust", copy)


def killclust_main() -> None:
    """Entry point of ``killclust``."""
    _main("killclust", kill)


def checkclust_main() -> None:
    """Entry point of ``checkclust``."""
    _main("checkclust", check)


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
    # A batch system ends us with TERM: the hosts are told as for Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    enter(name, typer.main.get_command(app))


class _Printer:
    """Lines of many hosts on one terminal, whole lines only."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._lock = threading.Lock()
        width = max(len(host.name) for host in hosts)
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._prefix = {
            host.name: (
                f"\x1b[{COLOURS[index % len(COLOURS)]}m{host.name:>{width}}\x1b[0m: "
                if colour
                else f"{host.name}: "
            )
            for index, host in enumerate(hosts)
        }

    def line(self, host: Host, stream: str, text: str) -> None:
        with self._lock:
            file = sys.stdout if stream == "stdout" else sys.stderr
            print(f"{self._prefix[host.name]}{text}", file=file, flush=True)

    def note(self, text: str) -> None:
        with self._lock:
            print(text, file=sys.stderr, flush=True)


def _show_plan(chosen: Chosen, text: str) -> None:
    for host in chosen.hosts:
        how = "here" if is_local(host, chosen.ssh) else "ssh"
        if chosen.as_json:
            _print_json({"kind": "plan", "host": host.name, "how": how, "what": text})
        else:
            print(f"{host.target} ({how}): {text}")


def _report(
    results: Iterable[HostResult[Any]],
    printer: _Printer,
    as_json: bool,
    describe: Callable[[HostResult[Any]], dict[str, Any]],
    word: Callable[[HostResult[Any]], str] | None = None,
) -> Iterator[HostResult[Any]]:
    """Shows each result as it comes and passes it on."""
    for result in results:
        if as_json:
            _print_json(
                {
                    "kind": "host",
                    "host": result.host.name,
                    "state": result.outcome.value,
                    **describe(result),
                    "seconds": round(result.seconds, 3),
                    "error": result.error,
                }
            )
        elif not result.ok:
            printer.note(_name_host(result))
        elif word is not None:
            printer.line(result.host, "stdout", word(result))
        yield result


def _name_host(result: HostResult[Any]) -> str:
    lead = f"host {result.host.name}"
    return result.error if result.error.startswith(lead) else f"{lead}: {result.error}"


def _finish(
    chosen: Chosen,
    results: Iterable[HostResult[Any]],
    printer: _Printer,
    describe: Callable[[HostResult[Any]], dict[str, Any]],
    word: Callable[[HostResult[Any]], str] | None = None,
) -> None:
    seen: list[HostResult[Any]] = []
    interrupted = False
    started = time.monotonic()
    try:
        for result in _report(results, printer, chosen.as_json, describe, word):
            seen.append(result)  # noqa: PERF402  # what was seen before Ctrl-C counts
    except KeyboardInterrupt:
        interrupted = True
        printer.note("interrupted: stopping what still runs")
        # Ends the generator, and with it what it started on the hosts.
        getattr(results, "close", lambda: None)()
    _end(chosen, seen, printer, interrupted, time.monotonic() - started)


def _end(
    chosen: Chosen,
    results: Sequence[HostResult[Any]],
    printer: _Printer,
    interrupted: bool = False,
    seconds: float | None = None,
) -> None:
    """The summary and the exit status."""
    names: dict[str, list[str]] = {}
    for result in results:
        names.setdefault(result.outcome.value, []).append(result.host.name)
    seen = {result.host.name for result in results}
    missing = [host.name for host in chosen.hosts if host.name not in seen]
    if missing:
        names["interrupted"] = missing
    if chosen.as_json:
        _print_json(
            {
                "kind": "summary",
                "hosts": len(chosen.hosts),
                "states": {state: len(some) for state, some in names.items()},
            }
        )
    elif len(chosen.hosts) > 1 or any(not result.ok for result in results) or missing:
        parts = [
            f"{len(some)} {state}" + ("" if state == "ok" else f" ({fold_hosts(some)})")
            for state, some in names.items()
        ]
        after = "" if seconds is None else f" in {seconds:.1f} s"
        printer.note(f"{count(len(chosen.hosts), 'host')}{after}: {', '.join(parts)}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(result.outcome is not Outcome.OK for result in results):
        raise typer.Exit(1)


def _show_table(hosts: Sequence[Host], results: Sequence[HostResult[Any]]) -> None:
    """All hosts in hostfile order, one a line."""
    by_name = {result.host.name: result for result in results}
    names: dict[str, None] = {}
    for result in results:
        names.update((item.name, None) for item in (result.value.checks if result.value else ()))
    rows = [["HOST", "STATE", *(name.upper() for name in names)]]
    for host in hosts:
        result = by_name[host.name]
        found = {item.name: item for item in (result.value.checks if result.value else ())}
        cells = []
        for name in names:
            item = found.get(name)
            mark = {"ok": "", "warning": "? ", "failed": "! "}[item.level.value] if item else ""
            cells.append(mark + item.detail.split(",")[0].split(" (")[0] if item else "-")
        state = result.value.level.value if result.value else result.outcome.value
        rows.append([host.name, state, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)
