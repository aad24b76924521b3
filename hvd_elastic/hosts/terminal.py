"""Run a command on one host with this terminal as its own."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shlex
import signal
import subprocess
import sys
import termios
import tty
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hvd_elastic.errors import SshError, UsageError
from hvd_elastic.hosts.account import command_shell
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.ssh import SshConnection, SshOptions, is_local

if TYPE_CHECKING:
    import paramiko


_TELL_STATUS = 'trap : INT QUIT; "${SHELL:-/bin/sh}" -c "$0"; exit $?'
"""Shell text that runs its argument, and tells by its status by which signal that ended."""


def run_in_terminal(host: Host, command: str, options: SshOptions) -> int:
    """Run a command with this terminal; return its exit status.

    It is 128 + N after signal N, and 255 if the connection is lost.

    Args:
        command: shell text; it is run in the home folder.

    Raises:
        UsageError: standard input and output are no terminal.
        SshError: the host cannot be reached, or gives no terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("standard input and output are no terminal here, which it needs")
    if is_local(host, options):
        account = pwd.getpwuid(os.getuid())
        home = account.pw_dir if os.path.isdir(account.pw_dir) else "/"  # noqa: PTH112
        with _keys_are_its_own():
            status = subprocess.call([command_shell(account), "-c", command], cwd=home)
        return status if status >= 0 else 128 - status
    from paramiko import SSHException

    with contextlib.closing(SshConnection(host, options)) as connection:
        try:
            channel = connection.client.get_transport().open_session()
            channel.get_pty(os.environ.get("TERM", "vt100"), *os.get_terminal_size(0))
            channel.exec_command(shlex.join(["/bin/sh", "-c", _TELL_STATUS, command]))
        except (SSHException, OSError, EOFError) as error:
            raise SshError(f"host {host.name}: it gives no terminal: {error}") from error
        with _raw_terminal() as resized:
            _pass_on(channel, resized)
        status = int(channel.recv_exit_status())
        return status if status >= 0 else 255


@contextlib.contextmanager
def _keys_are_its_own() -> Iterator[None]:
    r"""Have Ctrl-C and Ctrl-\ end the command of this terminal alone, until the block ends."""
    numbers = (signal.SIGINT, signal.SIGQUIT)
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _raw_terminal() -> Iterator[int]:
    """Have the terminal pass all keys on, until the block ends.

    Yields:
        A descriptor that can be read when the terminal has changed its size.
    """
    resized, tells = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def note(_number: int, _frame: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(tells, b"x")

    kept = termios.tcgetattr(0)
    before = signal.signal(signal.SIGWINCH, note)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # keys pressed before are kept
        yield resized
    finally:
        signal.signal(signal.SIGWINCH, before)
        termios.tcsetattr(0, termios.TCSADRAIN, kept)
        os.close(resized)
        os.close(tells)


def _pass_on(channel: paramiko.Channel, resized: int) -> None:
    """Pass keys to the host, its output here, and the size of the terminal, until the end."""
    waits_for: list[Any] = [channel, 0, resized]
    while True:
        ready, _, _ = select.select(waits_for, [], [])
        if channel in ready:
            data = channel.recv(1 << 16)
            if not data:
                return
            while data:
                data = data[os.write(1, data) :]
        if resized in ready:
            os.read(resized, 4096)
            with contextlib.suppress(Exception):  # it has ended
                channel.resize_pty(*os.get_terminal_size(0))
        if 0 in ready:
            keys = os.read(0, 4096)
            if keys:
                with contextlib.suppress(OSError):  # it has ended
                    channel.sendall(keys)
            else:
                waits_for.remove(0)
