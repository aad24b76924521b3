"""Print what ``runclust`` reports (plan, gathered output, JSON), and the progress of copies."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hvd_elastic.cli.cluster.host_options import HostOptions
from hvd_elastic.cli.output import print_json_line
from hvd_elastic.formatting import bytes_words, unfiltered
from hvd_elastic.hosts.fanout import HostResult
from hvd_elastic.hosts.hostfile import Host, fold_hosts
from hvd_elastic.hosts.ssh import is_local
from hvd_elastic.tools.run.commands import CommandResult, HowToRun

if TYPE_CHECKING:
    from hvd_elastic.tools.copy.copying import CopyProgress


RULE = "-" * 15


def show_plan(chosen: HostOptions, text: str, how: HowToRun) -> None:
    """Print what would run on which host; of the environment only the names."""
    for host in chosen.hosts:
        way = "here" if is_local(host, chosen.ssh) else "ssh"
        if chosen.as_json:
            print_json_line(
                {
                    "kind": "plan",
                    "host": host.name,
                    "how": way,
                    "what": text,
                    "sudo": how.sudo,
                    "cwd": how.cwd,
                    "env": sorted(how.env),
                }
            )
            continue
        parts = [way]
        parts += ["as root by sudo"] if how.sudo else []
        parts += [f"in {how.cwd}"] if how.cwd else []
        parts += [f"with {', '.join(sorted(how.env))}"] if how.env else []
        print(f"{host.target} ({', '.join(parts)}): {text}")


def describe_command(result: HostResult[CommandResult]) -> dict[str, Any]:
    """Return the fields of this tool in the JSON object of a host."""
    value = result.value
    return {
        "exit_status": value.exit_status if value and not value.timed_out else None,
        "stdout": value.stdout.decode("utf-8", errors="replace") if value else "",
        "stderr": value.stderr.decode("utf-8", errors="replace") if value else "",
        "left_out_bytes": value.left_out_bytes if value else 0,
    }


def show_gathered(hosts: Sequence[Host], results: Sequence[HostResult[CommandResult]]) -> None:
    """Print each distinct output once, under the names of its hosts; stderr goes to stderr.

    Args:
        hosts: all hosts, in the order of the output.
        results: results of the hosts that answered, in any order.
    """
    by_name = {result.host.name: result for result in results if result.value is not None}
    outputs: dict[tuple[str, int, bytes], list[HostResult[CommandResult]]] = {}
    errors: dict[bytes, list[HostResult[CommandResult]]] = {}
    for host in hosts:
        if host.name in by_name:
            result = by_name[host.name]
            value = result.answer
            key = (result.outcome.value, value.exit_status, value.stdout_fingerprint)
            outputs.setdefault(key, []).append(result)
            errors.setdefault(value.stderr_fingerprint, []).append(result)
    for some in outputs.values():
        value = some[0].answer
        if value.stdout:
            why = "" if some[0].ok else f": {some[0].error}"
            print(f"{RULE}\n{_fold(some)} ({len(some)}){why}\n{RULE}", flush=True)
            # Write the original bytes, which need not be UTF-8, and may have colours.
            sys.stdout.buffer.write(value.stdout.removesuffix(b"\n") + b"\n")
            sys.stdout.buffer.flush()
    for some in errors.values():
        for line in some[0].answer.stderr.decode("utf-8", errors="replace").splitlines():
            print(f"{_fold(some)}: {line}", file=unfiltered(sys.stderr))
    cut = [result for result in by_name.values() if result.answer.left_out_bytes]
    if cut:
        most = bytes_words(max(result.answer.left_out_bytes for result in cut))
        print(
            f"{_fold(cut)}: up to {most} more left out; without --gather all is shown",
            file=sys.stderr,
        )


def _fold(results: Sequence[HostResult[CommandResult]]) -> str:
    return fold_hosts([result.host.name for result in results])


MOST_NAMED = 8


@contextlib.contextmanager
def copy_bar(*, quiet: bool) -> Iterator[Callable[[CopyProgress], None] | None]:
    """Return a context with a function that shows a :class:`CopyProgress`; None off a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[states]}"),
    )
    console = Console(file=unfiltered(sys.stderr))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("copy", total=None, states="")

        def show(now: CopyProgress) -> None:
            progress.update(
                bar,
                completed=now.done_bytes,
                total=now.total_bytes or None,
                states=states_in_words(now.states),
            )

        yield show


def states_in_words(states: dict[str, str]) -> str:
    """Return the state of each host; for many hosts the number in each state, in steps of 10 %.

    >>> states_in_words({"a": "done", "b": "42%"})
    'a done, b 42%'
    >>> states_in_words({f"n{i}": "done" if i else "42%" for i in range(9)})
    '1 at 40%, 8 done'
    """
    if len(states) <= MOST_NAMED:
        return ", ".join(f"{name} {state}" for name, state in states.items())
    counts: Counter[str] = Counter()
    for state in states.values():
        if state.endswith("%"):
            state = f"at {int(state[:-1]) // 10 * 10}%"
        counts[state] += 1
    return ", ".join(f"{number} {state}" for state, number in counts.items())
