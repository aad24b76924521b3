"""Holds one command on a host: when its leader goes away, nothing that the command started stays.

It is the child subreaper of the command (prctl(2)), so whatever the command starts, however it
detaches, is a descendant of this process, found and ended with it. A command that ends by itself
leaves its background children alone, as under ssh.

Its leader calls ``main``.
Input (stdin, from then on): pieces of the command's input, each a length (4 bytes, big endian) and
that many bytes; length 0 is the end of the input. The end of stdin itself: end the command.
Output: the command's own stdout and stderr; before it on stderr one line, ``MARK`` and "started",
or why it could not be. Exit status: the command's, 128 + N after signal N.

Few imports (``posix`` is what ``os`` is made of) and little text: on many hosts at a time on one
machine, what this loads and compiles is what a command costs. What is rarely needed stands in
modules of its own, whose text the leader puts into ``LATER``.
"""

from __future__ import annotations

import _thread
import posix
import pwd
import sys

TYPE_CHECKING = False  # typing is slow to load
if TYPE_CHECKING:
    from collections.abc import Callable

MARK = b"\x01hvd-elastic-command "
LATER: dict[str, str] = {}
SUBREAPER = 36
SIGPIPE, SIGTERM, SIGXFSZ = 13, 15, 25


def become_subreaper() -> None:
    """Orphaned descendants of this process become its children (prctl(2))."""
    try:
        # Without ctypes where that is possible: loading it takes 2 ms.
        import _ctypes

        address = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # type: ignore[arg-type]
        _ctypes.call_function(address, (SUBREAPER, 1, 0, 0, 0))
    except (ImportError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def say(text: str) -> None:
    """Sends one line to the leader."""
    posix.write(2, MARK + text.encode("utf-8", "replace") + b"\n")


def start(command: bytes, env: dict[bytes, bytes], cwd: bytes, feeds: bool) -> tuple[int, int]:
    """Starts the command; returns its pid and the write end of its stdin (-1: none)."""
    account = pwd.getpwuid(posix.getuid())
    shell = account.pw_shell or "/bin/sh"
    if cwd == b"~" or cwd.startswith(b"~/"):
        home = account.pw_dir.encode(sys.getfilesystemencoding(), "surrogateescape")
        cwd = home + cwd[1:]
    if cwd:
        posix.chdir(cwd)
    inside, way_in = posix.pipe() if feeds else (posix.open("/dev/null", posix.O_RDONLY), -1)
    pid = posix.posix_spawn(
        shell,
        (shell, "-c", command),
        {**posix.environ, **env},
        file_actions=[(posix.POSIX_SPAWN_DUP2, inside, 0)],
        setsid=True,
        # Python ignores these, and what is ignored stays so in what is started.
        setsigdef=[SIGPIPE, SIGXFSZ],
    )
    posix.close(inside)
    return pid, way_in


def later(module: str) -> dict[str, Callable[..., None]]:
    """Compiles a module that is rarely needed and returns its names."""
    found: dict[str, Callable[..., None]] = {}
    exec(compile(LATER[module], f"{module}.py", "exec"), found)  # noqa: S102  # our own
    return found


def main(command: bytes, env: dict[bytes, bytes], cwd: bytes, feeds: bool, grace_s: float) -> None:
    """Holds the command until it ends, or ends it.

    Args:
        command: shell text.
        env: variables set for it.
        cwd: the folder it runs in; empty is where this program runs.
        feeds: whether input will come.
        grace_s: seconds between TERM and KILL.
    """
    become_subreaper()
    try:
        pid, way_in = start(command, env, cwd, feeds)
    except OSError as error:
        where = error.filename or "the shell"
        if type(where) is bytes:
            where = where.decode("utf-8", "replace")
        say(f"{where}: {error.strerror}")
        sys.exit(1)
    say("started")
    ending = _thread.allocate_lock()

    def wait_for_it() -> None:
        _, status = posix.waitpid(pid, 0)
        by_signal = posix.WIFSIGNALED(status)
        code = 128 + posix.WTERMSIG(status) if by_signal else posix.WEXITSTATUS(status)
        # Held for good by the main thread once it ends what is left.
        with ending:
            posix._exit(code)

    _thread.start_new_thread(wait_for_it, ())
    if way_in >= 0:
        later("pass_input")["feed"](way_in)
    else:
        while posix.read(0, 1 << 16):
            pass
    with ending:
        found = later("processes")
        found["end_processes"](found["descendants"], grace_s)
        posix._exit(128 + SIGTERM)
