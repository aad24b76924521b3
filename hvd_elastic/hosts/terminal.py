"""Run a command on one host with this terminal as its own."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
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


def run_in_terminal(host: Host, command: str, options: SshOptions) -> int:
    """Run a command with this terminal; return its exit status, 255 if the connection is lost.

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
        return subprocess.call([command_shell(account), "-c", command], cwd=home)
    from paramiko import SSHException

    with contextlib.closing(SshConnection(host, options)) as connection:
        try:
            channel = connection.client.get_transport().open_session()
            channel.get_pty(os.environ.get("TERM", "vt100"), *shutil.get_terminal_size())
            channel.exec_command(command)
        except (SSHException, OSError, EOFError) as error:
            raise SshError(f"host {host.name}: it gives no terminal: {error}") from error
        with _raw_terminal(channel):
            _pass_on(channel)
        status: int = channel.recv_exit_status()
        return status if status >= 0 else 255


@contextlib.contextmanager
def _raw_terminal(channel: paramiko.Channel) -> Iterator[None]:
    """Have the terminal pass all keys on, and the host know its size, until the block ends."""

    def resize(_number: int, _frame: Any) -> None:
        with contextlib.suppress(Exception):  # it has ended
            channel.resize_pty(*shutil.get_terminal_size())

    kept = termios.tcgetattr(0)
    before = signal.signal(signal.SIGWINCH, resize)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # keys pressed before are kept
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
        termios.tcsetattr(0, termios.TCSADRAIN, kept)


def _pass_on(channel: paramiko.Channel) -> None:
    """Pass keys to the host and its output here, until the command has ended."""
    waits_for: list[Any] = [channel, 0]
    while True:
        ready, _, _ = select.select(waits_for, [], [])
        if channel in ready:
            data = channel.recv(1 << 16)
            if not data:
                return
            while data:
                data = data[os.write(1, data) :]
        if 0 in ready:
            keys = os.read(0, 4096)
            if keys:
                with contextlib.suppress(OSError):  # it has ended
                    channel.sendall(keys)
            else:
                waits_for = [channel]
