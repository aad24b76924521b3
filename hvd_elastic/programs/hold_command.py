"""Hold one command on a host: if its leader goes away, end everything that the command started.

It is the child subreaper of the command (prctl(2)). So all processes that the command starts, even
detached ones, are its descendants, and it can find and end them. If the command ends by itself, its
background children keep running, as under ssh.

The leader calls ``main``.
Input (stdin, from then on): pieces of the command's input, each with its length (4 bytes, big
endian) in front; length 0 is the end of the input. At the end of stdin the command is ended.
Output: stdout and stderr of the command; before that, on stderr, one line of ``MARK`` and "started"
or the reason why it did not start. Exit status: the command's, 128 + N after signal N.

Loading and compiling this program is the main cost of a short command on many hosts. So it imports
little (``posix`` is the base of ``os``), and rarely needed code is in other modules, whose source
the leader puts into ``LATER``.
"""

from __future__ import annotations

import _thread
import posix
import pwd
import sys

TYPE_CHECKING = False  # importing typing is slow
if TYPE_CHECKING:
    from collections.abc import Callable

MARK = b"\x01hvd-elastic-command "
LATER: dict[str, str] = {}
SUBREAPER = 36
SIGPIPE, SIGTERM, SIGXFSZ = 13, 15, 25


def become_subreaper() -> None:
    """Make orphaned descendants of this process its children (prctl(2))."""
    try:
        # Not through ctypes where possible, since importing that takes 2 ms.
        import _ctypes

        address = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # type: ignore[arg-type]
        _ctypes.call_function(address, (SUBREAPER, 1, 0, 0, 0))
    except (ImportError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def say(text: str) -> None:
    """Send one line to the leader."""
    posix.write(2, MARK + text.encode("utf-8", "replace") + b"\n")


def start(command: bytes, env: dict[bytes, bytes], cwd: bytes, feeds: bool) -> tuple[int, int]:
    """Start the command; return its pid and the write end of its stdin (-1 for none)."""
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
        # Python ignores these signals, and a child process would inherit that.
        setsigdef=[SIGPIPE, SIGXFSZ],
    )
    posix.close(inside)
    return pid, way_in


def later(module: str) -> dict[str, Callable[..., None]]:
    """Compile a rarely needed module and return its names."""
    found: dict[str, Callable[..., None]] = {}
    exec(compile(LATER[module], f"{module}.py", "exec"), found)  # noqa: S102  # our own
    return found


def main(command: bytes, env: dict[bytes, bytes], cwd: bytes, feeds: bool, grace_s: float) -> None:
    """Hold the command until it ends, or end it when stdin ends.

    Args:
        command: shell text.
        env: variables to set for it.
        cwd: folder to run it in; empty for the current one.
        feeds: whether it gets input.
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
        # The main thread keeps this lock once it begins to end the processes.
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
