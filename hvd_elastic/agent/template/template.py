"""Starts the template of a run on a host, and has it fork workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvd_elastic.agent.worker_start import OWN_VARIABLES, PLACEHOLDER, WorkerStart, start_process

_PROGRAM = """
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
from hvd_elastic.agent.template.process import main
main({modules!r}, {program!r})
"""
_ROOM_FOR_NUMBERS = 16
"""Letters by which the name and the slot of a later worker may be longer than the last one's."""
_TITLE = "hvd_elastic-template"
_FORK_LIMIT_S = 10.0
"""Longest wait for a fork, which takes some hundredths of a second and longer on a busy host."""
_SHOWN_BYTES = 4096
_LEAST_LIMIT_S, _LIMIT_FACTOR = 30.0, 3.0
"""A fork may take this long, and this many times as long as a worker that was started directly."""
_MOST_FAILURES = 2
"""Forks in a row that fail before they are ready, after which all workers are started directly: one
may fail for a cause of its own, such as a host that is busy or a file server that is away."""
# Names of interpreters, options without a value that a fork can obey, and options with one.
_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?t?")
_FLAGS = re.compile(r"-[bBdEIOPqRsSu]+")
_WITH_VALUE = ("-X", "-W")


class UnsuitableError(Exception):
    """No worker can be forked for a command; the message says why."""


class PythonCommand(NamedTuple):
    """A command that starts a script with Python.

    Attributes:
        program: the script, or ``-m`` and a module, and its arguments.
    """

    interpreter: tuple[str, ...]
    program: tuple[str, ...]


class Template:
    """The template of a run on this host: a process that has imported what its workers import.

    Without one, :meth:`fork` returns None.
    """

    def __init__(self) -> None:
        self._start: WorkerStart | None = None
        self._modules: Sequence[str] = ()
        self._direct_s = 0.0
        self._process: _Process | None = None
        self._trouble = self._untold = ""
        self._failures = 0

    @property
    def start_limit_s(self) -> float:
        """Time that a fork may take until it can train [s]."""
        return max(_LEAST_LIMIT_S, _LIMIT_FACTOR * self._direct_s)

    def learn(
        self, start: WorkerStart, modules: Sequence[str], took_s: float, *, is_fork: bool = False
    ) -> None:
        """Note how the last worker was started, what it has imported, and how long that took."""
        self._start, self._modules = start, modules
        if is_fork:
            self._failures = 0
        else:
            self._direct_s = max(self._direct_s, took_s)

    def warm(self) -> None:
        """Start the process for workers like the last one, unless it exists or is not possible."""
        if self._start is None or self._trouble:
            return
        if self._process is not None:
            if self._process.start.is_like(self._start):
                return
            self.close()
        try:
            self._process = _Process(self._start, self._modules, self.give_up)
        except (UnsuitableError, OSError) as error:
            self.give_up(str(error))

    def fork(self, start: WorkerStart, output: int, failure_timeout_s: float) -> int | None:
        """Fork a worker and return its process id; None: it has to be started directly.

        Args:
            output: descriptor for its output, to which is written once why there is no template.
            failure_timeout_s: time after which the host counts as lost. The event loop, and with it
                the heartbeats, waits for the fork at most half as long.
        """
        limit_s = min(_FORK_LIMIT_S, failure_timeout_s / 2)
        process = self._process
        if process is not None and process.is_ready and process.start.is_like(start):
            try:
                pid = process.fork(start, output, limit_s)
            except TimeoutError:  # a later worker's comes from another one
                self._replace(f"no fork within {limit_s:g} s")
                pid = None
            if pid is not None:
                return pid
        if self._untold:
            text = f"hvd-elastic: this worker is started without a template: {self._untold}\n"
            with contextlib.suppress(OSError):
                os.write(output, text.encode())
            self._untold = ""
        return None

    def failed(self, trouble: str) -> None:
        """End the process after a forked worker has failed; after some in a row, for good."""
        self._failures += 1
        if self._failures < _MOST_FAILURES:
            self._replace(trouble)
        else:
            self.give_up(f"{trouble}, {_MOST_FAILURES} times in a row")

    def give_up(self, trouble: str) -> None:
        """End the process, and start none any more; the log of the next worker says why."""
        if not self._trouble:
            self._trouble = self._untold = trouble
        self.close()

    def _replace(self, trouble: str) -> None:
        """End the process; :meth:`warm` starts another one."""
        self._untold = f"{trouble}; the next one has another template"
        self.close()

    def close(self) -> None:
        """End the process; workers that are forked already continue."""
        if self._process is not None:
            self._process.close()
            self._process = None


class _Process:
    """The process itself.

    Args:
        modules: names of the modules to import, in order.
        on_trouble: called with the reason when it cannot fork workers any more.

    Raises:
        UnsuitableError: the command cannot be run in a fork.
        OSError: no process could be started.
    """

    def __init__(
        self, start: WorkerStart, modules: Sequence[str], on_trouble: Callable[[str], None]
    ) -> None:
        command = parse_python_command(start.command, start.variables)
        self.start = start
        self.is_ready = False
        self._on_trouble = on_trouble
        self._said = b""
        # As long as the arguments of a worker, which replace these in a fork.
        room = sum(len(os.fsencode(word)) + 1 for word in command.program) - len("-\0\0")
        padding = [_TITLE.ljust(room, "_")[:room]] if room >= 0 else []
        variables = dict(start.variables)
        letters = _ROOM_FOR_NUMBERS
        for name in OWN_VARIABLES:
            letters += len(os.fsencode(f"{name}={variables.pop(name)}") + b"\0")
        variables[PLACEHOLDER] = "_" * (letters - len(f"{PLACEHOLDER}=\0"))
        text = _PROGRAM.format(modules=list(modules), program=command.program)
        with contextlib.ExitStack() as stack:
            program = stack.enter_context(os.fdopen(os.memfd_create(_TITLE), "r+b"))
            program.write(text.encode())
            program.seek(0)
            self._socket, theirs = socket.socketpair()
            stack.enter_context(theirs)
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            self._output = os.fdopen(read_end, "rb", buffering=0)
            output = stack.enter_context(os.fdopen(write_end, "wb"))
            self.pid = start_process(
                (*command.interpreter, "-", *padding),
                start.cwd,
                variables,
                program.fileno(),
                theirs.fileno(),
                output.fileno(),
            )
        os.set_blocking(read_end, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._read)
        loop.add_reader(self._output, self._drain)

    def close(self) -> None:
        """Have the process end, since it reads the end of its requests."""
        loop = asyncio.get_running_loop()
        for file in (self._socket, self._output):
            loop.remove_reader(file)
            file.close()

    def fork(self, start: WorkerStart, output: int, limit_s: float) -> int | None:
        """Fork a worker with this output and return its process id; None: it is not possible.

        Raises:
            TimeoutError: there is none after ``limit_s``, and there will be none.
        """
        values = "\0".join(start.variables[name] for name in OWN_VARIABLES)
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(limit_s)
            try:
                with theirs:
                    socket.send_fds(self._socket, [values.encode()], [output, theirs.fileno()])
                answer = ours.recv(_SHOWN_BYTES).decode()
                if answer.isdecimal():
                    ours.send(b"\0")
                    return int(answer)
            except TimeoutError:
                raise
            except OSError as error:
                answer = str(error)
        self._on_trouble(f"it could not be forked: {answer or 'the process has ended'}")
        return None

    def _read(self) -> None:
        said = b""
        with contextlib.suppress(OSError):
            said = self._socket.recv(_SHOWN_BYTES)
        if said == b"\0":
            self.is_ready = True
            return
        self._drain()
        lines = self._said.decode(errors="replace").strip().splitlines()
        self._on_trouble(
            said.decode(errors="replace") or ": ".join(["its process has ended", *lines[-1:]])
        )

    def _drain(self) -> None:
        """Read what the process prints, of which only the end is kept."""
        data = self._output.read(_SHOWN_BYTES)
        if data == b"":
            asyncio.get_running_loop().remove_reader(self._output)
        self._said = (self._said + (data or b""))[-_SHOWN_BYTES:]


def parse_python_command(command: Sequence[str], environment: Mapping[str, str]) -> PythonCommand:
    """Return the two parts of ``python [options] script.py …`` or ``python [options] -m module …``.

    Raises:
        UnsuitableError: it is another command, or has an option that a fork cannot obey.

    >>> parse_python_command(["python3", "-u", "train.py", "-v"], {}).program
    ('train.py', '-v')
    """
    if not _INTERPRETER.fullmatch(Path(command[0]).name):
        raise UnsuitableError(f"{command[0]} is not Python")
    if environment.get("PYTHONINSPECT"):
        raise UnsuitableError("PYTHONINSPECT is set")
    at = 1
    while at < len(command) and (_FLAGS.fullmatch(command[at]) or command[at][:2] in _WITH_VALUE):
        at += 2 if command[at] in _WITH_VALUE else 1
    program = tuple(command[at:])
    is_module = len(program) > 1 and program[0] == "-m"
    if not is_module and not (program and program[0].endswith(".py") and program[0][0] != "-"):
        raise UnsuitableError(f"{' '.join(program[:1]) or 'nothing'} is not a script (*.py) or -m")
    return PythonCommand(tuple(command[:at]), program)
