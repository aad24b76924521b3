"""A shell command on many hosts, its output line by line as it comes (``runclust``)."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterator, Sequence

from hvd_elastic.cluster.fanout import DEFAULT_FANOUT, HostResult, Stopper, fan_out
from hvd_elastic.cluster.hostfile import Host, Hostfile, expand_hosts
from hvd_elastic.cluster.process import RemoteProcess, Result, collect
from hvd_elastic.cluster.ssh import SshOptions, connect
from hvd_elastic.errors import UsageError

__all__ = ["LineSplitter", "join_command", "run_on_hosts", "select_hosts"]

# The fan-out's own deadline only catches a host that hangs where no other deadline reaches.
BACKSTOP_S = 10.0


def join_command(words: Sequence[str]) -> str:
    """The shell text for what stood on a command line.

    One word is shell text as it is (``'ls | wc -l'``); several are a program and its arguments,
    and arrive as they were typed, blanks and quotes included.

    >>> join_command(["ls | wc -l"]), join_command(["ls", "my file"])
    ('ls | wc -l', "ls 'my file'")
    """
    return words[0] if len(words) == 1 else shlex.join(words)


def select_hosts(hostfile: Hostfile, only: str | None, exclude: str | None) -> list[Host]:
    """The hosts of ``only`` (all when None) without those of ``exclude``, in hostfile order.

    Args:
        hostfile: the hosts to choose from.
        only: names as in ``gpu[01-04],login``.
        exclude: names likewise.

    Raises:
        UsageError: a name is not in the hostfile, or no host is left.
        HostfileError: a list cannot be read.
    """
    chosen = {host.name for host in hostfile}
    for flag, text in (("--hosts", only), ("--exclude", exclude)):
        if text is None:
            continue
        named = set()
        for name in expand_hosts(text):
            host = hostfile.get(name)
            if host is None:
                raise UsageError(
                    f"{flag}: host '{name}' is not in {hostfile.source} "
                    f"({', '.join(hostfile.names[:8])}{', …' if len(hostfile) > 8 else ''})"
                )
            named.add(host.name)
        chosen = chosen & named if flag == "--hosts" else chosen - named
    hosts = [host for host in hostfile if host.name in chosen]
    if not hosts:
        raise UsageError(f"--hosts and --exclude leave no host of {hostfile.source}")
    return hosts


class LineSplitter:
    """Cuts pieces of output into lines; the last one may lack its line end."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._rest = b""
        self._lock = threading.Lock()

    def feed(self, data: bytes) -> None:
        with self._lock:
            *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(line.decode("utf-8", errors="replace"))

    def finish(self) -> None:
        """Gives out what came after the last line end."""
        with self._lock:
            rest, self._rest = self._rest, b""
        if rest:
            self._emit(rest.decode("utf-8", errors="replace"))


def run_on_hosts(
    hosts: Sequence[Host],
    command: str,
    options: SshOptions,
    fanout: int = DEFAULT_FANOUT,
    timeout_s: float | None = None,
    on_line: Callable[[Host, str, str], None] | None = None,
) -> Iterator[HostResult[Result]]:
    """Runs a shell command on every host.

    Args:
        hosts: where.
        command: shell text.
        options: how to connect.
        fanout: hosts at a time.
        timeout_s: seconds for the command on each host, connecting not counted.
        on_line: is given (host, "stdout" or "stderr", line) in the thread of that host.

    Yields:
        One result a host as it ends; an exit status other than 0 is the outcome FAILED.
    """

    def run(host: Host, stopper: Stopper) -> Result:
        emit = on_line or _ignore
        out = LineSplitter(lambda line: emit(host, "stdout", line))
        err = LineSplitter(lambda line: emit(host, "stderr", line))
        with connect(host, options) as connection:

            def start(gather: Callable[[bytes], None]) -> RemoteProcess:
                def on_stderr(data: bytes) -> None:
                    gather(data)
                    err.feed(data)

                process = connection.start(command, on_stderr)
                stopper.add(process.stop)
                return process

            try:
                return collect(start, timeout_s, on_stdout=out.feed)
            finally:
                out.finish()
                err.finish()

    limit_s = None
    if timeout_s is not None:
        limit_s = options.connect_timeout_s + timeout_s + BACKSTOP_S
    return fan_out(hosts, run, fanout, limit_s, _explain_status)


def _explain_status(result: Result) -> str | None:
    if result.ok:
        return None
    if result.exit_status < 0:
        return "ended by a signal, or the connection was lost"
    return f"exit status {result.exit_status}"


def _ignore(host: Host, stream: str, line: str) -> None:
    del host, stream, line
