"""A call through a keeper: it runs in a process that has everything loaded, on this one's terminal.

Imports next to nothing (see ``keep_socket``). What the words mean is not looked at here: the
keeper's process parses them with the same code, and says when the call is none for it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import os
import sys

from hvd_elastic.cluster import keep_socket

TYPE_CHECKING = False  # typing is slow to load
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BEGUN", "ELSEWHERE", "call"]

# The answer: it has begun; then its exit status, or that it has to be run here.
BEGUN, ELSEWHERE = b"b", b"\xff"
ANSWER_BYTES = 2
LOST = 1
# What is asked for that is not begun after so long is done here.
BEGIN_S = 10.0


def call(words: Sequence[str]) -> int | None:
    """The exit status of ``runclust`` with these words; None: it has to be run here."""
    folder = keep_socket.open_folder()
    if folder is None:
        return None
    try:
        own = keep_socket.identity()
        sock = keep_socket.call_keeper(folder, keep_socket.socket_name(own), _socket.socket)
        if sock is None:
            return None
        try:
            return _call(sock, own, words)
        finally:
            sock.close()
    finally:
        os.close(folder)


def _call(sock: _socket.socket, own: bytes, words: Sequence[str]) -> int | None:
    told: list[int] = []

    def tell(number: int, _frame: object) -> None:
        told.append(number)
        try:  # noqa: SIM105  # contextlib is slow to load
            sock.send(bytes([number]))
        except OSError:
            pass

    here = os.open(".", os.O_PATH)
    try:
        keep_socket.send_request(sock, _request(own, words), [0, 1, 2, here])
    except OSError:
        # The keeper has ended meanwhile, or one of the three is closed.
        return None
    finally:
        os.close(here)
    # The process that runs the call hears of Ctrl-C from here, and of the end of this one.
    before = {number: _signal.getsignal(number) for number in (_signal.SIGINT, _signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not _signal.SIG_IGN:
            _signal.signal(number, tell)
    answer = _read_answer(sock)
    if answer[1:] == ELSEWHERE or not answer:
        for number, handler in before.items():
            _signal.signal(number, handler)
        for number in told:  # nobody has answered it
            os.kill(os.getpid(), number)
        return None
    if len(answer) < ANSWER_BYTES:
        print("error: the keeper is gone, and with it what ran on the hosts", file=sys.stderr)
        return LOST
    return answer[1]


def _read_answer(sock: _socket.socket) -> bytes:
    answer = b""
    sock.settimeout(BEGIN_S)
    try:
        while len(answer) < ANSWER_BYTES:
            try:
                data = sock.recv(ANSWER_BYTES)
            except TimeoutError:
                # From here on it cannot say that it begins, and so it does not.
                sock.shutdown(_socket.SHUT_RD)
                data = sock.recv(ANSWER_BYTES)
            if not data:
                break
            answer += data
            sock.settimeout(None)
    except OSError:
        pass
    return answer


def _request(own: bytes, words: Sequence[str]) -> list[bytes]:
    texts = [text for each in (sys.stdout, sys.stderr) for text in (each.encoding, each.errors)]
    return [
        keep_socket.RUN,
        own,
        *(str(text).encode() for text in texts),
        str(len(words)).encode(),
        *map(os.fsencode, words),
        *(name + b"=" + value for name, value in os.environb.items()),
    ]
