"""Holds one command on a host: when its leader goes away, nothing that the command started stays.

It is the child subreaper of the command (prctl(2)), so whatever the command starts, however it
detaches, is a descendant of this process, found and ended with it. A command that ends by itself
leaves its background children alone, as under ssh.

Its leader writes a call of ``main`` after this text.
Input (stdin, from then on): pieces of the command's input, each a length (4 bytes, big endian) and
that many bytes; length 0 is the end of the input. The end of stdin itself: end the command.
Output: the command's own stdout and stderr; before it on stderr one line, ``MARK`` and "started",
or why it could not be. Exit status: the command's, 128 + N after signal N.

Few imports: on many hosts at a time on one machine, what this loads is what a command costs.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import pwd
import select
import sys
import time

MARK = b"\x01hvd-elastic-command "
SUBREAPER = 36
# Looked up here and not for each command: one process may fork many holders.
PRCTL = ctypes.CDLL(None).prctl
SIGKILL, SIGPIPE, SIGTERM, SIGCONT, SIGXFSZ = 9, 13, 15, 18, 25
HELD_BYTES = 1 << 18
PAUSE_S = 0.02
LAST_S = 5.0


def say(text: str) -> None:
    """One line to the leader."""
    os.write(2, MARK + text.encode("utf-8", "replace") + b"\n")


def start(command: str, env: dict[str, str], cwd: str, feeds: bool) -> tuple[int, int]:
    """Starts the command; returns its pid and the way into its stdin (-1: none)."""
    account = pwd.getpwuid(os.getuid())
    shell = account.pw_shell or "/bin/sh"
    if cwd == "~" or cwd.startswith("~/"):
        cwd = account.pw_dir + cwd[1:]
    if cwd:
        os.chdir(cwd)
    inside, way_in = os.pipe() if feeds else (os.open("/dev/null", os.O_RDONLY), -1)
    pid = os.posix_spawn(
        shell,
        [shell, "-c", command],
        {**os.environ, **env},
        file_actions=[(os.POSIX_SPAWN_DUP2, inside, 0)],
        setsid=True,
        # Python ignores these, and what is ignored stays so in what is started.
        setsigdef=[SIGPIPE, SIGXFSZ],
    )
    os.close(inside)
    return pid, way_in


def descendants() -> list[int]:
    """All that came of the command and still lives."""
    parents = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  # pathlib is slow to load
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] not in (b"Z", b"X"):
                parents[int(name)] = int(fields[1])
    found: list[int] = []
    below = {os.getpid()}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found += below
    return found


def signal_all(pids: list[int], number: int) -> None:
    """Signals those that can be; another user's, of a setuid program, cannot."""
    for pid in pids:
        try:  # noqa: SIM105  # contextlib is slow to load
            os.kill(pid, number)
        except OSError:
            pass


def end_all(grace_s: float) -> None:
    """TERM, after the grace time KILL, until nothing is left; what is forked meanwhile included."""
    begin = time.monotonic()
    told: set[int] = set()
    while time.monotonic() - begin < grace_s + LAST_S:
        left = descendants()
        if not left:
            return
        if time.monotonic() - begin >= grace_s:
            signal_all(left, SIGKILL)
        else:
            new = [pid for pid in left if pid not in told]
            signal_all(new, SIGTERM)
            signal_all(new, SIGCONT)  # a stopped process cannot end
            told.update(new)
        time.sleep(PAUSE_S)


def feed(way_in: int) -> None:
    """Passes the input on until the leader is gone or has had enough."""
    if way_in >= 0:
        os.set_blocking(way_in, False)
    arrived, waiting, ends = b"", b"", False
    while True:
        poll = select.poll()
        # The end of stdin is seen even while there is no room for more.
        poll.register(0, select.POLLRDHUP | (select.POLLIN if len(arrived) < HELD_BYTES else 0))
        if way_in >= 0 and waiting:
            poll.register(way_in, select.POLLOUT)
        events = dict(poll.poll())
        if events.get(0, 0) & select.POLLIN:
            data = os.read(0, 1 << 16)
            if not data:
                return
            arrived += data
        elif events.get(0, 0):
            return
        while len(waiting) < HELD_BYTES and len(arrived) >= 4 and not ends:
            size = int.from_bytes(arrived[:4], "big")
            if len(arrived) < 4 + size:
                break
            waiting, arrived = waiting + arrived[4 : 4 + size], arrived[4 + size :]
            ends = size == 0
        if way_in >= 0 and waiting:
            try:
                waiting = waiting[os.write(way_in, waiting) :]
            except BlockingIOError:
                pass
            except OSError:
                ends, waiting = True, b""
        if way_in >= 0 and ends and not waiting:
            os.close(way_in)
            way_in = -1
        if way_in < 0:
            arrived = b""


def main(command: str, env: dict[str, str], cwd: str, feeds: bool, grace_s: float) -> None:
    """Holds the command until it ends, or ends it.

    Args:
        command: shell text.
        env: variables set for it.
        cwd: the folder it runs in; "" is where this program runs.
        feeds: whether input will come.
        grace_s: seconds between TERM and KILL.
    """
    PRCTL(SUBREAPER, 1, 0, 0, 0)
    try:
        pid, way_in = start(command, env, cwd, feeds)
    except OSError as error:
        say(f"{error.filename or 'the shell'}: {error.strerror}")
        sys.exit(1)
    say("started")
    ending = _thread.allocate_lock()

    def wait_for_it() -> None:
        _, status = os.waitpid(pid, 0)
        code = os.WTERMSIG(status) + 128 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        # Held for good by the main thread once it ends what is left.
        with ending:
            os._exit(code)

    _thread.start_new_thread(wait_for_it, ())
    feed(way_in)
    with ending:
        end_all(grace_s)
        os._exit(128 + SIGTERM)
