"""Run a shell command on many hosts, with its output line by line (``runclust``)."""

from __future__ import annotations

import contextlib
import functools
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvd_elastic.errors import (
    HostfileError,
    HostUnreachableError,
    HvdElasticError,
    UsageError,
)
from hvd_elastic.hosts.connection import Connection, watched
from hvd_elastic.hosts.fanout import DEFAULT_FANOUT, HostResult, Outcome, Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host, Hostfile
from hvd_elastic.hosts.process import STRAGGLER_S, CommandTimeoutError, RemoteProcess, Result
from hvd_elastic.hosts.ssh import SshOptions, connect
from hvd_elastic.tools.run.capture import Capture
from hvd_elastic.tools.run.held_command import HeldCommand, HowToRun, NotHeldError
from hvd_elastic.tools.run.input_spool import FileInput, InputSpool

__all__ = [
    "CommandResult",
    "CommandSettings",
    "HowToRun",
    "join_command",
    "run_on_hosts",
    "select_hosts",
]

# Added to the fan-out's limit, so that it only ends hosts that hang where no other limit applies.
BACKSTOP_S = 30.0
# Pause before the second attempt to connect; it doubles with each further one.
FIRST_PAUSE_S = 0.5
# Options of the time limits.
TIMEOUT, TOTAL_TIMEOUT = "--timeout", "--total-timeout"
# Exit statuses that a shell defines; SIGNALLED + N is that of signal N.
CANNOT_EXECUTE, NOT_FOUND, SIGNALLED = 126, 127, 128
LAST_SIGNAL = 64


@dataclass(frozen=True)
class CommandSettings:
    """Settings for running a command on many hosts.

    Attributes:
        how: environment, folder and user of the command.
        fanout: maximum number of hosts at a time.
        timeout_s: limit for the command on each host, without connecting [s]; None for no limit.
        total_timeout_s: limit for all hosts together [s]; hosts not started by then time out.
        retries: number of further attempts to connect; a command that may have begun is never
            repeated.
        keep_bytes: maximum kept of each host's stdout, and of its stderr.
    """

    how: HowToRun = field(default_factory=HowToRun)
    fanout: int = DEFAULT_FANOUT
    timeout_s: float | None = None
    total_timeout_s: float | None = None
    retries: int = 0
    keep_bytes: int = 1 << 20


@dataclass(frozen=True)
class CommandResult(Result):
    """Result of a command on a host; ``stdout`` and ``stderr`` are the beginning of its output.

    Attributes:
        stdout_bytes, stderr_bytes: size of its complete output.
        stdout_fingerprint, stderr_fingerprint: equal if two hosts printed the same, kept or not.
        limit: option of the time limit at which it was stopped; ``exit_status`` is -1 then.
        stopped: whether it is known to have ended.
    """

    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdout_fingerprint: bytes = b""
    stderr_fingerprint: bytes = b""
    limit: str = ""
    stopped: bool = True

    @property
    def timed_out(self) -> bool:
        """Whether it was stopped at a time limit."""
        return bool(self.limit)

    @property
    def left_out_bytes(self) -> int:
        """Number of bytes printed that were not kept."""
        kept = len(self.stdout) + len(self.stderr)
        return self.stdout_bytes + self.stderr_bytes - kept


def join_command(words: Sequence[str]) -> str:
    """Return the shell text for the words of a command line.

    A single word is shell text already (``'ls | wc -l'``). Several are a program and its arguments,
    which are quoted so that they arrive unchanged.

    >>> join_command(["ls | wc -l"]), join_command(["ls", "my file"])
    ('ls | wc -l', "ls 'my file'")
    """
    return words[0] if len(words) == 1 else shlex.join(words)


def select_hosts(hostfile: Hostfile, only: str | None, exclude: str | None) -> list[Host]:
    """Return the hosts of ``only`` (None for all) without those of ``exclude``, in hostfile order.

    Args:
        hostfile: hosts to choose from.
        only: names such as ``gpu[01-04],login``; ``@spot`` is all hosts of that label.
        exclude: names in the same form.

    Raises:
        UsageError: a list cannot be parsed, a name or label is not in the hostfile, or no host is
            left.
    """
    chosen = {host.name for host in hostfile}
    for flag, text in (("--hosts", only), ("--exclude-hosts", exclude)):
        if text is None:
            continue
        try:
            named = {host.name for host in hostfile.choose(text)}
        except HostfileError as error:
            raise UsageError(f"{flag}: {error}") from error
        chosen = chosen & named if flag == "--hosts" else chosen - named
    hosts = [host for host in hostfile if host.name in chosen]
    if not hosts:
        raise UsageError(f"--hosts and --exclude-hosts leave no host of {hostfile.source}")
    return hosts


def run_on_hosts(
    hosts: Sequence[Host],
    command: str,
    options: SshOptions | None = None,
    settings: CommandSettings | None = None,
    stdin: Any = None,
    on_lines: Callable[[Host, str, str], None] | None = None,
    on_wait: Callable[[Mapping[str, float], int], None] | None = None,
    inputs: Mapping[str, Path] | None = None,
) -> Iterator[HostResult[CommandResult]]:
    """Run a shell command on every host.

    If the caller stops iterating, or this process ends, the command and all that it started are
    ended on all hosts. If a command ends by itself, its background children keep running.

    Args:
        command: shell text.
        settings: time limits, environment and other settings.
        stdin: binary file that the command on every host reads from the beginning; None for no
            input.
        on_lines: called with (host, "stdout" or "stderr", text) in the thread of that host; the
            text is all whole lines that arrived together, without the last line break; bytes that
            are no UTF-8 are surrogates (``surrogateescape``).
        on_wait: see :func:`hvd_elastic.hosts.fanout.fan_out`.
        inputs: instead of ``stdin``, the file that the command reads, by name of the host.

    Yields:
        One result for each host as it ends; FAILED if the exit status is not 0.
    """
    options, settings = options or SshOptions(), settings or CommandSettings()
    with contextlib.ExitStack() as stack:
        spool = None if stdin is None else stack.enter_context(InputSpool(stdin))
        task = _Task(command, options, settings, spool, inputs or {}, on_lines)
        yield from fan_out(
            hosts,
            task.run,
            settings.fanout,
            task.limit_s,
            lambda result: _assess(result, settings),
            on_wait,
        )


class _PlainCommand:
    """A command on a host without Python, started as by ``ssh HOST COMMAND``."""

    def __init__(self, process: RemoteProcess) -> None:
        self._process = process
        self.wait = process.wait
        self.wait_drained = process.wait_drained
        self.stop = process.stop
        self.close = process.close

    def feed(self, data: bytes) -> None:
        self._process.stdin.write(data)

    def end_input(self) -> None:
        self._process.stdin.close()


class _Task:
    """The task that runs the command on each host."""

    def __init__(
        self,
        command: str,
        options: SshOptions,
        settings: CommandSettings,
        spool: InputSpool | None,
        inputs: Mapping[str, Path],
        on_lines: Callable[[Host, str, str], None] | None,
    ) -> None:
        self._command = command
        self._options = options
        self._settings = settings
        self._spool = spool
        self._inputs = inputs
        self._on_lines = on_lines
        total_s = settings.total_timeout_s
        self._deadline = None if total_s is None else time.monotonic() + total_s

    @property
    def limit_s(self) -> float | None:
        """Limit for one host, after which something must hang that has no limit of its own [s]."""
        settings = self._settings
        limits = [settings.total_timeout_s] if settings.total_timeout_s is not None else []
        if settings.timeout_s is not None:
            tries = settings.retries + 1
            pauses_s = FIRST_PAUSE_S * 2**settings.retries
            limits.append(settings.timeout_s + tries * self._options.connect_timeout_s + pauses_s)
        return min(limits) + BACKSTOP_S if limits else None

    def run(self, host: Host, stopper: Stopper) -> CommandResult:
        with self._connect(host, stopper) as connection:
            started = time.monotonic()
            emit, keep_bytes = self._on_lines, self._settings.keep_bytes
            out, err = (
                Capture(keep_bytes, emit and functools.partial(emit, host, stream))
                for stream in ("stdout", "stderr")
            )
            try:
                running: HeldCommand | _PlainCommand = HeldCommand(
                    connection,
                    self._command,
                    self._settings.how,
                    self._input(host) is not None,
                    out.take_piece,
                    err.take_piece,
                )
                with watched(connection, lambda: out.size_bytes + err.size_bytes):
                    try:
                        status, stopped, limit = self._wait(host, running, stopper, (out, err))
                    except NotHeldError:
                        if not self._settings.how.is_plain:
                            raise
                        process = connection.start(self._command, err.take_piece, out.take_piece)
                        running = _PlainCommand(process)
                        status, stopped, limit = self._wait(host, running, stopper, (out, err))
                if status is not None and status < 0:
                    stopped = connection.answers()
            finally:
                out.finish()
                err.finish()
            return CommandResult(
                -1 if status is None else status,
                out.kept,
                err.kept,
                time.monotonic() - started,
                out.size_bytes,
                err.size_bytes,
                out.fingerprint,
                err.fingerprint,
                limit=limit,
                stopped=stopped,
            )

    def _wait(
        self,
        host: Host,
        running: HeldCommand | _PlainCommand,
        stopper: Stopper,
        captures: tuple[Capture, Capture],
    ) -> tuple[int | None, bool, str]:
        """Return the exit status (None if it timed out), whether it has certainly ended, and the
        option of the limit that ran out, if one did.
        """
        stopper.add_action(running.stop)
        failures: list[HvdElasticError] = []
        given = self._input(host)
        if given is None:
            running.end_input()
        else:
            threading.Thread(
                target=_feed,
                args=(running, given, failures),
                name=f"stdin of {host.name}",
                daemon=True,
            ).start()
        limit_s = self._time_left(self._settings.timeout_s)
        try:
            status = running.wait(limit_s)
        except TimeoutError:
            own = limit_s == self._settings.timeout_s
            return None, running.stop(), TIMEOUT if own else TOTAL_TIMEOUT
        except BaseException:
            running.close()
            raise
        if failures:
            raise failures[0]

        def written() -> int:
            return sum(capture.size_bytes for capture in captures)

        seen = written()
        while not running.wait_drained(STRAGGLER_S) and seen != written():
            seen = written()
        running.close()
        return status, True, ""

    def _input(self, host: Host) -> InputSpool | FileInput | None:
        path = self._inputs.get(host.name)
        return self._spool if path is None else FileInput(path)

    def _connect(self, host: Host, stopper: Stopper) -> Connection:
        given_up = threading.Event()
        stopper.add_action(given_up.set)
        for attempt in range(self._settings.retries + 1):
            try:
                time_left = self._time_left(self._options.connect_timeout_s)
                if time_left is not None and time_left <= 0:
                    raise CommandTimeoutError(
                        f"host {host.name}: its turn did not come within "
                        f"{self._settings.total_timeout_s:g} s",
                        b"",
                        b"",
                    )
                options = self._options
                if time_left is not None and time_left < options.connect_timeout_s:
                    options = replace(options, connect_timeout_s=time_left)
                return connect(host, options)
            except HostUnreachableError as error:
                last = attempt == self._settings.retries
                if last or given_up.wait(FIRST_PAUSE_S * 2**attempt):
                    if attempt:
                        raise type(error)(f"{error} ({attempt + 1} tries)") from error
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _time_left(self, limit_s: float | None) -> float | None:
        if self._deadline is None:
            return limit_s
        left_s = max(0.0, self._deadline - time.monotonic())
        return left_s if limit_s is None else min(limit_s, left_s)


def _feed(
    running: HeldCommand | _PlainCommand,
    given: InputSpool | FileInput,
    failures: list[HvdElasticError],
) -> None:
    # A command may end without reading all of its input, as head does; that is not an error.
    with contextlib.suppress(OSError, EOFError):
        try:
            for piece in given.pieces():
                running.feed(piece)
        except HvdElasticError as error:
            failures.append(error)
            running.stop()
        else:
            running.end_input()


def _assess(result: CommandResult, settings: CommandSettings) -> tuple[Outcome, str]:
    if result.timed_out:
        limit_s = {TIMEOUT: settings.timeout_s, TOTAL_TIMEOUT: settings.total_timeout_s}
        return Outcome.TIMED_OUT, f"did not end within {limit_s[result.limit]:g} s and " + (
            f"was stopped. Give it more time with {result.limit}"
            if result.stopped
            else "cannot be stopped: the host does not answer. It may still run there"
        )
    if result.ok:
        return Outcome.OK, ""
    status = result.exit_status
    if not result.stopped:
        return Outcome.UNREACHABLE, (
            "the connection is lost: the host or its network is down. "
            "The command may still run there"
        )
    if status < 0:
        return Outcome.FAILED, "the command was killed by a signal"
    meaning = {CANNOT_EXECUTE: " (cannot be executed)", NOT_FOUND: " (command not found)"}
    by_signal = SIGNALLED < status <= SIGNALLED + LAST_SIGNAL
    words = meaning.get(status, f" (signal {status - SIGNALLED})" if by_signal else "")
    return Outcome.FAILED, f"exit status {status}{words}"
