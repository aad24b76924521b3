"""Print the output of a tool over many hosts: lines as they come, results, and a summary."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer

from hvd_elastic.cli.cluster.host_options import HostOptions
from hvd_elastic.cli.output import print_json_line
from hvd_elastic.cli.start import INTERRUPTED
from hvd_elastic.formatting import count, duration_words, printable, unfiltered
from hvd_elastic.hosts.fanout import HostResult, Outcome
from hvd_elastic.hosts.hostfile import Host, fold_hosts

COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
PATIENCE_S = 1.0
"""Time after which a host that others wait for is named."""
_WHO = re.compile(r"host \S+( \([^)]*\))?: ")
_CLEAR = "\r\x1b[K"


class Printer:
    """Prints lines of many hosts to one terminal, without mixing them.

    Attributes:
        gone: whether output is not possible any more, since its reader has gone (``| head``).
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._lock = threading.Lock()
        self._passes = False
        self.gone = False
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

    def lines(self, host: Host, stream: str, text: str, *, raw: bool = False) -> None:
        """Print lines of a host, each after its name, in one write.

        Args:
            stream: ``stdout`` or ``stderr``.
            text: the lines; bytes that are no UTF-8 as surrogates, which are written as they came.
            raw: whether control characters have their effect.
        """
        text = text if raw else printable(text)
        # A host that joined later has no prefix.
        prefix = self._prefix.get(host.name, f"{host.name}: ")
        self._print(prefix + text.replace("\n", f"\n{prefix}"), stream)

    def print_note(self, text: str) -> None:
        """Print a line of the tool itself."""
        self._print(printable(text), "stderr")

    def waiting(self, running: Mapping[str, float], queued: int) -> None:
        """Show the hosts that take long, on a terminal, in a line that the next one replaces.

        Args:
            running: time since the start of each host that has begun and not ended [s].
            queued: number of hosts that have not begun.

        Raises:
            BrokenPipeError: the reader of the output has gone.
        """
        if self.gone:
            raise BrokenPipeError
        slow = {name: seconds for name, seconds in running.items() if seconds >= PATIENCE_S}
        if not slow:
            return
        text = f"waiting for {fold_hosts(slow)} ({max(slow.values()):.0f} s)"
        if queued:
            text += f", {queued} not begun"
        self.passing(text)

    def passing(self, text: str) -> None:
        """Show a line that the next one replaces; only on a terminal."""
        if not sys.stderr.isatty():
            return
        with self._lock:
            text = printable(text)[: shutil.get_terminal_size().columns - 1]
            print(f"{_CLEAR}{text}", end="", file=unfiltered(sys.stderr), flush=True)
            self._passes = True

    def clear(self) -> None:
        """Remove the line of :meth:`passing`."""
        with self._lock:
            self._clear()

    def close(self) -> None:
        """Drop all further output.

        A thread of a host that was given up could otherwise write while the interpreter ends,
        which would abort it.
        """
        with self._lock:
            self.gone = True

    def _clear(self) -> None:
        if self._passes:
            print(_CLEAR, end="", file=unfiltered(sys.stderr), flush=True)
            self._passes = False

    def _print(self, text: str, stream: str) -> None:
        with self._lock:
            if self.gone:
                return
            self._clear()
            try:
                to = unfiltered(sys.stdout if stream == "stdout" else sys.stderr)
                to.flush()
                to.buffer.write(f"{text}\n".encode("utf-8", "surrogateescape"))
                to.buffer.flush()
            except BrokenPipeError:
                # An exception in the thread of a host would get lost.
                self.gone = True


def show_result(
    result: HostResult[Any],
    printer: Printer,
    as_json: bool,
    describe: Callable[[HostResult[Any]], dict[str, Any]],
    word: Callable[[HostResult[Any]], str] | None = None,
    *,
    tell_failures: bool,
) -> None:
    """Print the result of one host.

    Args:
        as_json: whether to print a JSON object instead of text.
        describe: function that returns the tool's fields of the JSON object.
        word: function that returns the line for a success; None: no line.
        tell_failures: whether to print a line for a failure.
    """
    if as_json:
        print_json_line(
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
        if tell_failures:
            printer.print_note(_name_host(result))
    elif word is not None:
        printer.lines(result.host, "stdout", word(result))


def _name_host(result: HostResult[Any]) -> str:
    lead = f"host {result.host.name}"
    return result.error if result.error.startswith(lead) else f"{lead}: {result.error}"


def finish(
    chosen: HostOptions,
    results: Iterable[HostResult[Any]],
    printer: Printer,
    describe: Callable[[HostResult[Any]], dict[str, Any]],
    word: Callable[[HostResult[Any]], str] | None = None,
    gather: Callable[[list[HostResult[Any]]], None] | None = None,
    tell_reasons: bool = False,
) -> None:
    """Print results as they come and a summary, then end the command with its exit status.

    Args:
        describe, word: see :func:`show_result`.
        gather: function that prints all results at the end, instead of failures as they come.
        tell_reasons: whether the summary lists the reasons and times of failures.
    """
    seen: list[HostResult[Any]] = []
    interrupted = False
    started = time.monotonic()
    try:
        try:
            for result in results:
                # Append first, so that after Ctrl-C a printed host counts as ended.
                seen.append(result)
                tell = gather is None
                show_result(result, printer, chosen.as_json, describe, word, tell_failures=tell)
        except KeyboardInterrupt:
            interrupted = True
            # Closing the generator ends what it has started on the hosts.
            getattr(results, "close", lambda: None)()
        printer.clear()
        if gather is not None:
            gather(seen)
        if tell_reasons and not chosen.as_json and (len(chosen.hosts) > 1 or gather is not None):
            for line in reasons_in_words(seen):
                printer.print_note(line)
        conclude(chosen, seen, printer, time.monotonic() - started, interrupted=interrupted)
    finally:
        printer.close()


def reasons_in_words(results: Sequence[HostResult[Any]]) -> list[str]:
    """Return a line for each reason of failures, with the hosts and times.

    >>> from hvd_elastic.hosts.hostfile import Host
    >>> reasons_in_words(
    ...     [HostResult(Host(f"n{i}"), Outcome.FAILED, i, error="exit status 3") for i in (1, 2)]
    ... )
    ['failed: n[1-2]: exit status 3 (1.0 s to 2.0 s)']
    """
    groups: dict[tuple[str, str], list[HostResult[Any]]] = {}
    for result in results:
        if not result.ok:
            # The advice in the error was printed when it happened.
            reason = _WHO.sub("", result.error, count=1).partition(". ")[0]
            groups.setdefault((result.outcome.value, reason), []).append(result)
    lines = []
    for (outcome, reason), some in groups.items():
        times = sorted(result.seconds for result in some)
        took = " to ".join(dict.fromkeys(map(duration_words, (times[0], times[-1]))))
        names = fold_hosts([result.host.name for result in some])
        lines.append(f"{outcome}: {names}: {reason} ({took})")
    return lines


def conclude(
    chosen: HostOptions,
    results: Sequence[HostResult[Any]],
    printer: Printer,
    seconds: float,
    *,
    interrupted: bool = False,
) -> None:
    """Print the summary and end the command with its exit status."""
    names: dict[str, list[str]] = {}
    for result in results:
        names.setdefault(result.outcome.value, []).append(result.host.name)
    seen = {result.host.name for result in results}
    missing = [host.name for host in chosen.hosts if host.name not in seen]
    if missing:
        names["interrupted"] = missing
    if chosen.as_json:
        print_json_line(
            {
                "kind": "summary",
                "hosts": len(chosen.hosts),
                "states": {state: len(some) for state, some in names.items()},
                "seconds": round(seconds, 3),
            }
        )
    elif len(chosen.hosts) > 1 or any(not result.ok for result in results) or missing:
        parts = [
            f"{len(some)} {state}" + ("" if state == "ok" else f" ({fold_hosts(some)})")
            for state, some in names.items()
        ]
        hosts = count(len(chosen.hosts), "host")
        printer.print_note(f"{hosts} in {duration_words(seconds)}: {', '.join(parts)}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(result.outcome is not Outcome.OK for result in results):
        raise typer.Exit(1)
