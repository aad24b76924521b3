"""Connections to hosts, for the launcher and the cluster tools alike.

:func:`connect` returns a :class:`Connection`: over ssh (paramiko), or with local processes if the
host is this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import shlex
import socket
import sys
import termios
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvd_elastic.errors import SshError
from hvd_elastic.hosts import ssh_config
from hvd_elastic.hosts.connection import Connection, SshOptions
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.known_hosts import HostKey, KeyState, KnownKey
from hvd_elastic.hosts.local import LocalConnection
from hvd_elastic.hosts.process import (
    SIGNAL_S,
    Command,
    CommandTimeoutError,
    RemoteProcess,
    Result,
    Sink,
    as_command,
    has_room,
)
from hvd_elastic.hosts.route import Route, attempting, own_known_hosts

if TYPE_CHECKING:
    import paramiko

__all__ = [
    "CommandTimeoutError",
    "Connection",
    "LocalConnection",
    "RemoteProcess",
    "Result",
    "SshConnection",
    "SshOptions",
    "connect",
    "in_order_of_jumps",
    "is_local",
    "own_address_towards",
    "own_known_hosts",
    "read_host_key",
]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

# Every command first prints its process id on stderr (removed again here), so that it can be
# signalled: without a terminal, sshd does not end a command when its client is gone. sshd makes the
# login shell a session leader, so its id is that of the process group. The command uses sh, since
# $$ and >&2 mean something else in csh and fish.
PID_MARK = b"\x01hvd-elastic-pid "
TELL_PID = """sh -c 'printf "\\001hvd-elastic-pid %s\\n" "$PPID" >&2'"""
# A Python interpreter that replaces the shell prints its own id, which needs no extra process.
PYTHON_TELLS_PID = r"""import posix; posix.write(2, b"\1hvd-elastic-pid %d\n" % posix.getpid())"""
# Maximum output of login scripts before the process id.
HELD_BYTES = 64 * 1024
# A host is lost if its kernel acknowledges nothing for this time. A host that is too busy for its
# sshd still acknowledges, and gets the longer time, as does one behind a jump host.
UNACKNOWLEDGED_S = 10.0
UNANSWERED_S = 60.0


def connect(host: Host, options: SshOptions | None = None) -> Connection:
    """Return a connection to the host: over ssh, or direct if it is this machine.

    Raises:
        HostUnreachableError: no answer in time; names host, address, port and cause.
        HostKeyError: the host key is unknown, changed or revoked.
        SshError: the host refuses the user, or the ssh configuration cannot be used.
    """
    options = options or SshOptions()
    if is_local(host, options):
        return LocalConnection(host)
    return SshConnection(host, options)


def is_local(host: Host, options: SshOptions | None = None) -> bool:
    """Return whether the host is used without ssh.

    This applies to localhost, 127.0.0.1, ::1 and this machine's own name, unless the hostfile gives
    a user or port, or the ssh configuration has an entry for that name.
    """
    if host.user is not None or host.port is not None:
        return False
    own = socket.gethostname().lower()
    if host.name.lower() not in LOOPBACK_NAMES | {own, own.partition(".")[0]}:
        return False
    config_path = options.config_path if options else None
    return not ssh_config.has_entry(ssh_config.read_config_text(config_path), host.name)


def in_order_of_jumps(hosts: Sequence[Host], options: SshOptions) -> list[list[Host]]:
    """Return hosts and their jump hosts in groups, each after those that lead to it.

    The ssh configuration names jump hosts. The network is not used.

    Raises:
        SshError: a jump leads back to itself, or the ssh configuration cannot be read.
    """

    def look_up(host: Host, depth: int) -> tuple[tuple[str, str, int], Host | None]:
        with attempting(host, options) as attempt:
            route = Route(host, options, attempt, depth)
            return (route.user, host.name, route.port), route.jump

    given = {look_up(host, 0)[0]: host for host in hosts}
    groups = [dict(given)]
    while True:
        depth = len(groups)
        found = [look_up(host, depth - 1)[1] for host in groups[0].values()]
        jumps = {look_up(jump, depth)[0]: jump for jump in found if jump is not None}
        if not jumps:
            return [[*group.values()] for group in groups]
        for group in groups:
            for key in jumps:
                group.pop(key, None)
        groups.insert(0, {key: given.get(key, jump) for key, jump in jumps.items()})


def own_address_towards(host: Host, options: SshOptions | None = None) -> str:
    """Return this machine's address on the route to the host; 127.0.0.1 if its name is unknown.

    Nothing is sent: connecting a datagram socket only looks up the route.
    """
    config = ssh_config.load_ssh_config(options.config_path if options else None)
    name = str(config.lookup(host.name).get("hostname", host.name))
    try:
        family, _, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"  # the host cannot be reached either, which is reported elsewhere


def read_host_key(
    host: Host, options: SshOptions
) -> tuple[str, HostKey, KeyState, KnownKey | None]:
    """Read the key that a host shows, without logging in.

    Returns:
        The host's name for known_hosts, its key, what is known of the key, and the line that says
        so, if one does.

    Raises:
        HostUnreachableError, HostKeyError (of a jump host), SshError: as :func:`connect`.
    """
    with attempting(host, options) as attempt:
        route = Route(host, options, attempt)
        try:
            route.open_socket()
            transport = route.make_transport(route.sock)
            try:
                transport.start_client(timeout=attempt.remaining())
                shown = transport.get_remote_server_key()
            finally:
                transport.close()
        finally:
            route.close()
        key = HostKey(shown.get_name(), shown.asbytes())
        return route.known_name, key, *route.known.check(route.known_name, key)


class SshConnection(Connection):
    """A connection to a host over ssh."""

    def __init__(self, host: Host, options: SshOptions) -> None:
        self.host = host
        self.options = options
        with attempting(host, options) as attempt:
            self._route = Route(host, options, attempt)
            try:
                self._route.open_socket()
                self._route.log_in()
            except BaseException:
                self._route.close()
                raise
        self._transport: paramiko.Transport = self._route.client.get_transport()
        sock = self._route.sock
        if isinstance(sock, socket.socket):
            self.peer_address = str(sock.getpeername()[0])

    @property
    def alive(self) -> bool:
        return self._transport.is_active()

    def answers(self) -> bool:
        # Every ssh server answers an unknown request, if only to refuse it.
        answered = threading.Event()
        asking = threading.Thread(
            target=self._ask, args=(answered,), name=f"ask {self.host.name}", daemon=True
        )
        asking.start()
        waited_s = 0.0
        while waited_s < UNANSWERED_S:
            before = self._unacknowledged()
            asking.join(UNACKNOWLEDGED_S)
            if not asking.is_alive():
                return answered.is_set()
            after = self._unacknowledged()
            if after < before:
                continue  # much input is on its way, over a slow link
            if after:
                break
            waited_s += UNACKNOWLEDGED_S
        self.close()
        return False

    def _ask(self, answered: threading.Event) -> None:
        from paramiko import SSHException

        with contextlib.suppress(OSError, EOFError, SSHException):
            self._transport.global_request("keepalive@openssh.com")
            if self.alive:
                answered.set()

    def _unacknowledged(self) -> int:
        """Return the bytes that the next machine has not acknowledged; 0 where that is unknown."""
        sock = self._route.sock
        with contextlib.suppress(OSError, ValueError):  # it is being closed
            if isinstance(sock, socket.socket):
                waiting = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))
                return int.from_bytes(waiting, sys.byteorder)
        return 0

    @property
    def client(self) -> paramiko.SSHClient:
        """The logged-in paramiko client, for libraries that need one."""
        return self._route.client

    def start(
        self, command: Command, on_stderr: Sink = None, on_stdout: Sink = None
    ) -> RemoteProcess:
        command = as_command(command)
        return self._start(f"{TELL_PID}; {command}", command, on_stderr, on_stdout)

    def start_python(
        self, argv: Sequence[str], on_stderr: Sink = None, on_stdout: Sink = None
    ) -> RemoteProcess:
        at = argv.index("-c") + 1
        command = shlex.join([*argv[:at], f"{PYTHON_TELLS_PID}; {argv[at]}", *argv[at + 1 :]])
        return self._start(f"exec {command}", shlex.join(argv), on_stderr, on_stdout)

    def _start(self, line: str, command: str, on_stderr: Sink, on_stdout: Sink) -> RemoteProcess:
        from paramiko import SSHException

        try:
            channel = self._transport.open_session(timeout=self.options.connect_timeout_s)
            channel.exec_command(line)
        except (SSHException, OSError, EOFError) as error:
            raise self._cannot_start(error) from error
        return RemoteProcess(_ChannelEnds(channel), command, self.host.name, on_stderr, on_stdout)

    def close(self) -> None:
        self._route.close()

    def _cannot_start(self, error: BaseException) -> SshError:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if not self.alive:
            cause = f"the connection is lost ({cause}); is the host still up?"
        return SshError(f"host {self.host.name}: no command can be started: {cause}")


class _ChannelEnds:
    """Pipes of a command over an ssh channel."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._pid = 0
        self._pid_known = threading.Event()
        self._held = b""

    def read_stdout(self, size: int) -> bytes:
        data: bytes = self._channel.recv(size)
        return data

    def read_stderr(self, size: int) -> bytes:
        while not self._pid_known.is_set():
            data: bytes = self._channel.recv_stderr(size)
            self._held += data
            before, _, after = self._held.partition(PID_MARK)
            pid, newline, rest = after.partition(b"\n")
            if newline:
                self._pid = int(pid) if pid.strip().isdigit() else 0
            elif data and len(self._held) < HELD_BYTES:
                continue
            else:
                before, rest = self._held, b""
            self._held = b""
            self._pid_known.set()
            if before + rest or not data:
                return before + rest
        return bytes(self._channel.recv_stderr(size))

    def write(self, data: bytes) -> None:
        from paramiko import SSHException

        try:
            self._channel.sendall(data)
        except (OSError, EOFError, SSHException) as error:
            raise BrokenPipeError(f"the command or its connection is gone ({error})") from error

    def is_ready(self) -> bool:
        sock = self._channel.transport.sock
        if not isinstance(sock, socket.socket):
            return False  # through a jump host or another program
        descriptor = sock.fileno()
        return descriptor >= 0 and self._channel.send_ready() and has_room(descriptor)

    def close_stdin(self) -> None:
        self._channel.shutdown_write()

    def wait(self, timeout: float | None) -> int | None:
        if not self._channel.status_event.wait(timeout):
            return None
        status: int = self._channel.recv_exit_status()
        return status

    def signal(self, name: str) -> None:
        # Not ssh's own signal request, which OpenSSH refuses for root and without privilege
        # separation.
        if self._pid_known.wait(SIGNAL_S) and self._pid and not self._channel.closed:
            channel = self._channel.transport.open_session(timeout=SIGNAL_S)
            channel.settimeout(SIGNAL_S)
            channel.exec_command(f"sh -c 'kill -s {name} -- -{self._pid}'")
            channel.status_event.wait(SIGNAL_S)
            channel.close()

    def close(self) -> None:
        # Closing sends a message over the connection, which may be gone.
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()
