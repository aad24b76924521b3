"""Finds, starts and stops keepers: who calls hosts through one, and who has it keep them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

from hvd_elastic.cluster import keep_socket
from hvd_elastic.cluster.kept import KeptHosts
from hvd_elastic.config import home
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.ssh_config import needs_folder, read_config_text

__all__ = ["attach", "attach_through", "stop_keepers"]

# For a keeper to load what it needs and greet, or to end.
ANSWER_S = 30.0
# One that is about to end may hang up twice: what holds its connections, then what takes calls.
ATTEMPTS = 3
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from hvd_elastic.cli.keeping import main; main()"
)


def attach(options: SshOptions, keep_s: float | None) -> KeptHosts | None:
    """The hosts of this user's keeper; None where there is none and none is to be.

    Args:
        options: how the call connects.
        keep_s: how long hosts shall be kept after this call, None: no others than are kept.

    Raises:
        HvdElasticError: no keeper can be started.
    """
    if _needs_folder(options):
        return None
    folder = keep_socket.open_folder(make=keep_s is not None)
    if folder is None:
        if keep_s is None:
            return None
        raise HvdElasticError(
            f"--keep: {home() / 'keepers'} must be a folder of this user that nobody else can use "
            "(mode 700). Mend it, or set HVD_ELASTIC_HOME to another folder"
        )
    try:
        for _ in range(ATTEMPTS if keep_s is not None else 1):
            sock = _call(folder, start=keep_s is not None)
            kept = None if sock is None else _greet(sock, options, keep_s, asks=True)
            if kept is not None:
                return kept
    finally:
        os.close(folder)
    if keep_s is not None:
        raise _keeper_ended()
    return None


def attach_through(
    sock: socket.socket, options: SshOptions, keep_s: float | None
) -> KeptHosts | None:
    """As :func:`attach`, with a connection that a keeper has given."""
    if _needs_folder(options):
        sock.close()
        return None
    kept = _greet(sock, options, keep_s, asks=False)
    if kept is None and keep_s is not None:
        raise _keeper_ended()
    return kept


def _needs_folder(options: SshOptions) -> bool:
    """Whether the call must connect itself, since a keeper runs in another folder."""
    return needs_folder(read_config_text(options.config_path))


def _greet(
    sock: socket.socket, options: SshOptions, keep_s: float | None, asks: bool
) -> KeptHosts | None:
    """None: that keeper has ended."""
    sock.settimeout(ANSWER_S)
    try:
        if asks:
            keep_socket.send_request(sock, [keep_socket.ATTACH, keep_socket.identity()])
        kept = KeptHosts(sock, options, keep_s)
    except (OSError, EOFError):
        sock.close()
        return None
    sock.settimeout(None)
    return kept


def _keeper_ended() -> HvdElasticError:
    return HvdElasticError(
        "--keep: the keeper of connections has ended. Try again; if it does so every time, "
        f"{home() / 'keepers' / 'log'} may say why"
    )


def stop_keepers() -> int:
    """Ends all that is kept as soon as no call uses it; returns how many keepers were told.

    Waits for those that no call uses.
    """
    folder = keep_socket.open_folder()
    if folder is None:
        return 0
    told = 0
    try:
        for name in keep_socket.socket_names(folder):
            sock = keep_socket.call_keeper(folder, name, socket.socket)
            if sock is None:
                continue
            told += 1
            with sock, contextlib.suppress(OSError):
                keep_socket.send_request(sock, [keep_socket.STOP])
                sock.settimeout(ANSWER_S)
                # It answers where calls go on, and hangs up when it ends.
                sock.recv(1)
    finally:
        os.close(folder)
    return told


def _call(folder: int, start: bool) -> socket.socket | None:
    name = keep_socket.socket_name(keep_socket.identity())
    sock = keep_socket.call_keeper(folder, name, socket.socket)
    if sock is not None or not start:
        return sock
    lock = os.open("lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        # Two calls at a time would start two.
        fcntl.flock(lock, fcntl.LOCK_EX)
        sock = keep_socket.call_keeper(folder, name, socket.socket)
        if sock is None:
            _start_keeper(folder, name)
            sock = keep_socket.call_keeper(folder, name, socket.socket)
        return sock
    finally:
        os.close(lock)


def _start_keeper(folder: int, name: str) -> None:
    """Starts a keeper; from then on calls can be made, and wait until it is there."""
    # What one that was killed has left.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    package = str(Path(__file__).resolve().parents[2])
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(keep_socket.socket_path(folder, name))
            listener.listen(64)
            subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, package, str(folder), name],
                stdin=listener.fileno(),
                stdout=log,
                stderr=log,
                cwd="/",
                env={**os.environ, "HVD_ELASTIC_HOME": str(home().absolute())},
                start_new_session=True,
                pass_fds=[folder],
            )
        finally:
            os.close(log)
