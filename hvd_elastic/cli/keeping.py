"""The keeper: calls of ``runclust`` run in forks of it, through connections that it holds.

Two processes: this one has everything loaded and no threads, so that it can fork for each call; its
child holds the connections (``cluster/keeper.py``). Each ends with the other.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn, TextIO

import paramiko  # noqa: F401  # loaded before any fork

from hvd_elastic.cli import cluster_tools as clust
from hvd_elastic.cli.entry import enter
from hvd_elastic.cli.start import INTERRUPTED
from hvd_elastic.cli.warm import BEGUN, ELSEWHERE
from hvd_elastic.cluster import keep_socket
from hvd_elastic.cluster.keeper import Keeper
from hvd_elastic.errors import HvdElasticError

__all__ = ["main"]

# A request comes at once and whole.
REQUEST_S = 5.0
# Who has started the keeper may be killed before its call comes.
FIRST_CALL_S = 30.0
WORD_BYTES = 16


def main() -> NoReturn:
    """Stdin is the socket where calls come in; arguments: its folder's descriptor, its name."""
    folder, name = int(sys.argv[1]), sys.argv[2]
    listener = socket.socket(fileno=os.dup(0))
    # Whoever else has the socket open keeps calls waiting for nobody.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = clust.runclust_command()
    _rehearse(command)
    gc.collect()
    gc.freeze()  # so that forks share the memory of what is loaded
    if os.fork() == 0:
        ours.close()
        listener.close()
        _keep(theirs)
    theirs.close()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        _Calls(folder, name, listener, ours, keep_socket.identity(), command).serve()
    finally:
        os._exit(0)


def _rehearse(command: Any) -> None:
    """A call without hosts, so that what is loaded at the first call is loaded before any fork."""
    with contextlib.suppress(HvdElasticError):
        with command.make_context("runclust", [os.devnull, "true"]) as context:
            command.invoke(context)


def _keep(link: socket.socket) -> NoReturn:
    """Holds connections until there are none or the parent is gone."""
    keeper = Keeper(FIRST_CALL_S)
    while True:
        word, descriptors, _, _ = socket.recv_fds(link, WORD_BYTES, 1)
        if not word:
            os._exit(0)
        for descriptor in descriptors:
            sock = socket.socket(fileno=descriptor)
            if word == keep_socket.STOP:
                keeper.stop(sock)
            else:
                keeper.admit(sock)


class _Calls:
    """What comes in.

    Args:
        folder: a descriptor of where the socket has its name.
        name: of the socket.
        listener: the socket.
        link: to the process that holds the connections.
        identity: what a call must have in common with this process.
        command: what a call's words are parsed by.
    """

    def __init__(
        self,
        folder: int,
        name: str,
        listener: socket.socket,
        link: socket.socket,
        identity: bytes,
        command: Any,
    ) -> None:
        self._folder = folder
        self._name = name
        self._own = os.stat(name, dir_fd=folder).st_ino
        self._listener = listener
        self._link = link
        self._identity = identity
        self._command = command
        self._listens = True

    def serve(self) -> None:
        """Returns when the process that holds the connections has ended."""
        while True:
            sources = [self._link, self._listener] if self._listens else [self._link]
            ready, _, _ = select.select(sources, [], [])
            if self._link in ready:
                break
            sock, _ = self._listener.accept()
            sock.settimeout(REQUEST_S)
            # Whoever asks nonsense or goes away meanwhile is not answered.
            with sock, contextlib.suppress(OSError, ValueError, IndexError):
                if keep_socket.peer_is_own(sock):
                    self._answer(sock)
        self._stop_listening()

    def _answer(self, sock: socket.socket) -> None:
        parts, descriptors = keep_socket.read_request(sock)
        sock.settimeout(None)
        if parts[0] == keep_socket.STOP:
            self._stop_listening()
            socket.send_fds(self._link, [keep_socket.STOP], [sock.fileno()])
        elif parts[1] == self._identity:
            if parts[0] == keep_socket.ATTACH:
                socket.send_fds(self._link, [keep_socket.ATTACH], [sock.fileno()])
            elif parts[0] == keep_socket.RUN and os.fork() == 0:
                try:
                    self._listener.close()
                    _Call(sock, self._link, parts[2:], descriptors).run(self._command)
                except Exception:  # noqa: BLE001  # a defect, shown to the caller
                    traceback.print_exc()
                finally:
                    os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)

    def _stop_listening(self) -> None:
        """Calls that have come in and were not looked at are hung up."""
        if not self._listens:
            return
        self._listens = False
        with contextlib.suppress(OSError):
            # Another keeper may have taken the place.
            if os.stat(self._name, dir_fd=self._folder).st_ino == self._own:
                os.unlink(self._name, dir_fd=self._folder)
        self._listener.close()


def _open_output(descriptor: int, texts: list[bytes], by_line: bool) -> TextIO:
    encoding, errors = (text.decode() for text in texts)
    return open(
        descriptor,
        "w",
        buffering=1 if by_line else -1,
        encoding=encoding,
        errors=errors,
        closefd=False,
    )


class _Call:
    """One call, in a process of its own; what is done here is what the caller's process would do.

    Args:
        caller: the process in whose place this one stands.
        link: to the process that holds the connections.
        parts: encodings, the call's words, its environment.
        descriptors: the caller's stdin, stdout, stderr and folder.
    """

    def __init__(
        self, caller: socket.socket, link: socket.socket, parts: list[bytes], descriptors: list[int]
    ) -> None:
        self._caller = caller
        self._link = link
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        *streams, here = descriptors
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target)
        os.fchdir(here)
        *texts, words = parts[:5]
        # New ones: those that are there have looked at what they wrote to before.
        sys.stdout = _open_output(1, texts[:2], os.isatty(1))
        sys.stderr = _open_output(2, texts[2:], by_line=True)
        end = 5 + int(words)
        self._words = [os.fsdecode(word) for word in parts[5:end]]
        os.environ.clear()
        for pair in parts[end:]:
            name, _, value = pair.partition(b"=")
            os.environb[name] = value
        time.tzset()

    def run(self, command: Any) -> NoReturn:
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._link, [keep_socket.ATTACH], [theirs.fileno()])
            self._caller.sendall(BEGUN)
        except OSError:
            os._exit(1)  # nothing has begun: the caller does it itself
        theirs.close()
        # Held open here it would hide the end of the keeper.
        self._link.close()
        try:
            # A signal that has come already is heard of from here on, where it is answered.
            threading.Thread(target=self._listen, daemon=True).start()
            with clust.called_through(ours):
                enter("runclust", command, self._words)
        except clust.CalledElsewhere:
            answer = ELSEWHERE
        except KeyboardInterrupt:
            answer = bytes([INTERRUPTED])
        except SystemExit as end:
            answer = bytes([int(end.code or 0)])
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        with contextlib.suppress(OSError):
            self._caller.sendall(answer)
        os._exit(0)

    def _listen(self) -> None:
        """The caller passes signals on; when it is gone the call is over."""
        with contextlib.suppress(OSError):
            while number := self._caller.recv(1):
                os.kill(os.getpid(), number[0])
        os._exit(1)
