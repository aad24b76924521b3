"""Run a command on a host under ``programs/hold_command.py``, which ends it with its leader.

Environment, folder and input are sent on the stdin of that program (the holder), so none of their
values appears on a command line.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import os
import shlex
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import MAGIC_NUMBER

from hvd_elastic.errors import SshError
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.remote_python import COMMAND_NOT_FOUND, PROGRAMS, no_python, source_of
from hvd_elastic.programs import hold_command
from hvd_elastic.tools.run.input_spool import PIECE_BYTES

# Reads its program from stdin and not a byte more, since the command's input follows. The program
# is sent as compiled code, and as compressed source for another Python version. It is a single
# line, since csh accepts no other.
_LOADER = (
    "import marshal, posix, sys; s = b''; a, b, c = map(int, sys.argv[1:4]); "
    'exec("while len(s) < c: s += posix.read(0, c - len(s)) or sys.exit(1)"); '
    "m = sys.modules['_frozen_importlib_external'].MAGIC_NUMBER.hex() == sys.argv[4]; "
    "exec(marshal.loads(s[:a]) if m else __import__('zlib').decompress(s[a:b])); "
    "main(*marshal.loads(s[b:]))"
)
_AS_ROOT = '[ "$(id -u)" = 0 ] || exec sudo -n -- "$@"; exec "$@"'
PYTHON = "python3"
# Every Python 3 can read this version.
MARSHAL_VERSION = 2
# Time between TERM and KILL on the host.
GRACE_S = 2.0
# Time after that in which the holder must have ended.
STOP_S = 4.0
# Maximum wait for output that reports whether the command was started.
DRAIN_S = 2.0
# Limit of output kept while looking for that report.
SPOKEN_BYTES = 64 * 1024
STARTED = "started"


@dataclass(frozen=True)
class HowToRun:
    """Environment, folder and user of a command on its host.

    Attributes:
        env: variables to set for it.
        cwd: folder to run it in; "" for the user's home.
        sudo: whether to run it as root, with ``sudo -n`` if the user is not root.
    """

    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str = ""
    sudo: bool = False

    @property
    def is_plain(self) -> bool:
        """Return whether the command runs just as sshd would run it."""
        return not (self.env or self.cwd or self.sudo)


class NotHeldError(SshError):
    """The holder could not start, for example without Python on the host; nor did the command."""


@functools.cache
def _read_holder() -> tuple[bytes, bytes]:
    """Return the holder as compiled code and as compressed source, with the modules it may need."""
    later = {name: source_of(f"{PROGRAMS}.{name}") for name in ("processes", "pass_input")}
    text = f"{source_of(hold_command.__name__)}\nLATER = {later!a}"
    code = compile(text, "hold_command.py", "exec", dont_inherit=True, optimize=2)
    return marshal.dumps(code), zlib.compress(text.encode())


class HeldCommand:
    """A shell command running on a host.

    Args:
        connection: connection to the host.
        command: shell text, for the user's login shell.
        how: environment, folder and user.
        feeds: whether :meth:`feed` and :meth:`end_input` will be called.
        on_stdout, on_stderr: called with each piece of its output, in threads of their own.

    Raises:
        SshError: no command can be started there.
    """

    def __init__(
        self,
        connection: Connection,
        command: str,
        how: HowToRun,
        feeds: bool,
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None],
    ) -> None:
        self._host = connection.host.name
        self._how = how
        self._feeds = feeds
        self._on_stderr = on_stderr
        self._begins = b""
        self._said: str | None = None
        env = {os.fsencode(name): os.fsencode(value) for name, value in how.env.items()}
        arguments = (os.fsencode(command), env, os.fsencode(how.cwd), feeds, GRACE_S)
        code, text = _read_holder()
        source = code + text + marshal.dumps(arguments, MARSHAL_VERSION)
        sizes = [len(code), len(code) + len(text), len(source)]
        argv = [PYTHON, "-I", "-S", "-c", _LOADER, *map(str, sizes), MAGIC_NUMBER.hex()]
        if how.sudo:
            command = f"exec {shlex.join(['sh', '-c', _AS_ROOT, 'sh', *argv])}"
            self._process = connection.start(command, self._listen, on_stdout)
        else:
            self._process = connection.start_python(argv, self._listen, on_stdout)
        # Without Python on the host nobody reads it, and the shell's exit status shows why.
        with contextlib.suppress(OSError, EOFError):
            self._process.stdin.write(source)

    def feed(self, data: bytes) -> None:
        """Send input to the command; blocks while it does not read.

        Raises:
            BrokenPipeError: the command or the connection is gone.
        """
        for at in range(0, len(data), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            self._process.stdin.write(len(piece).to_bytes(4, "big") + piece)

    def end_input(self) -> None:
        if not self._feeds:
            return  # it reads /dev/null
        with contextlib.suppress(OSError, EOFError):
            self._process.stdin.write(bytes(4))

    def wait(self, timeout_s: float | None) -> int:
        """Wait for the end of the command and return its exit status.

        It is 128 + N after signal N, and -1 if the connection was lost.

        Raises:
            TimeoutError: it is still running.
            NotHeldError: the holder did not start, for example without Python on the host.
            SshError: the command could not be started: no such folder, sudo asks for a password, …;
                or it is not known whether it was.
        """
        status = self._process.wait(timeout_s)
        # The holder's message, or the shell's error, may still be on its way.
        is_all = self._said is not None or self._process.wait_drained(DRAIN_S)
        if self._said == STARTED or (self._said is None and status < 0):
            return status
        if self._said is None and not is_all:  # a second start might be one too many
            raise SshError(
                f"host {self._host}: it is not known whether the command has run, since its output "
                f"has not arrived (exit status {status}). Look there before you repeat it"
            )
        raise self._why_not(status)

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait for all output and return whether it arrived; a background child can delay it."""
        return self._process.wait_drained(timeout_s)

    def stop(self) -> bool:
        """End the command and everything that it started.

        Returns:
            Whether that is known; False if the host does not answer.
        """
        # The holder ends everything when its stdin ends, also a command that runs as root.
        self._process.stdin.close()
        try:
            self._process.wait(GRACE_S + STOP_S)
        except TimeoutError:
            return self._process.stop()
        self._process.close()
        return True

    def close(self) -> None:
        """Close the pipes to the command; if it is still running, its holder ends it."""
        self._process.close()

    def _listen(self, data: bytes) -> None:
        """Receive stderr and take out what the holder prints before the command's output."""
        if self._said is None:
            self._begins += data
            before, _, after = self._begins.partition(hold_command.MARK)
            word, newline, after = after.partition(b"\n")
            if not newline:
                self._begins = self._begins[-SPOKEN_BYTES:]
                return
            self._begins = b""
            self._said = word.decode("utf-8", "replace")
            data = before + after
        if data:
            self._on_stderr(data)

    def _why_not(self, status: int) -> SshError:
        if self._said is not None:
            return SshError(f"host {self._host}: {self._said}")
        lines = self._begins.decode("utf-8", "replace").strip().splitlines()
        last = lines[-1] if lines else f"exit status {status}"
        if not self._how.sudo:
            if status == COMMAND_NOT_FOUND or "not found" in last.lower():
                return NotHeldError(str(no_python(self._host, PYTHON)))
            return NotHeldError(
                f"host {self._host}: no command can be started by its {PYTHON}: {last}"
            )
        if status == COMMAND_NOT_FOUND and "sudo" in last:
            return SshError(
                f"host {self._host}: there is no sudo. Log in as root: root@{self._host} in the "
                "hostfile, or User in the ssh configuration"
            )
        return SshError(
            f"host {self._host}: sudo does not run it without asking ({last}). Nobody is asked for "
            "passwords here: allow the user NOPASSWD in its sudoers (visudo), or log in as root"
        )
