"""The work of an engine's run: a function with its arguments, or a script."""

from __future__ import annotations

import inspect
import pickle
import platform
import runpy
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_elastic.errors import ArgumentError, RunError

TASK_FILE = "task"
"""Name of the file in a host's folder with the task."""
OUTCOME_FILE = "outcome"
"""Name under which rank 0 of an elastic run saves its outcome."""
LENGTH = struct.Struct("!Q")
"""Precedes an outcome in a pipe, whose end is no sign of its end: children may hold it open."""
COMMAND = (f"python3.{sys.version_info.minor}", "-m", "hvd_elastic.engines.dial_in.run_task")
"""Command of a worker, with the interpreter of the same minor version on its host."""


@dataclass(frozen=True)
class Outcome:
    """Result or error of a task.

    Attributes:
        value: pickle of the function's value; None: this rank has none to give.
        error: traceback, or why there is no value; empty: it has succeeded.
    """

    value: bytes | None = None
    error: str = ""

    @classmethod
    def of_value(cls, value: Any, name: str) -> Outcome:
        """Return the outcome for a function's value, which may not be one that can be pickled."""
        import cloudpickle

        try:
            return cls(cloudpickle.dumps(value))
        except Exception as error:  # noqa: BLE001  # a type's own code decides what it raises
            kind = type(value).__name__
            return cls(error=f"the value of {name}(), a {kind}, cannot be pickled: {error}")

    def get(self, rank: str) -> Any:
        """Return the value.

        Args:
            rank: rank and host, for messages.

        Raises:
            RunError: there is none; says why.
        """
        if self.value is None:
            raise RunError(f"{rank}: {self.error.rstrip()}")
        return _unpickled(self.value)

    def pack(self) -> bytes:
        return pickle.dumps(self)

    @classmethod
    def unpack(cls, data: bytes) -> Outcome:
        """Return an outcome from its pickle, which came over the link of the run."""
        outcome: Outcome = _unpickled(data)
        return outcome


@dataclass(frozen=True)
class Task:
    """A function or a script, which is sent to the workers as one pickle.

    Attributes:
        name: name of the function, or path of the script, for messages.
        function: the function; None: it is a script.
        source: content of the script.
        args, kwargs: arguments of the function; those of a script are words of its command line.
    """

    name: str
    function: Callable[..., Any] | None = None
    source: bytes = b""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        train: Callable[..., Any] | str | Path,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Task:
        """Return the task for what the user has given.

        Raises:
            ArgumentError: it is neither a function nor a readable script; or it is a script, and
                there are keywords.
        """
        if callable(train):
            return cls(getattr(train, "__name__", repr(train)), train, args=args, kwargs=kwargs)
        if not isinstance(train, (str, Path)):
            raise ArgumentError(
                f"{train!r} cannot be trained: give a function, or the path of a Python script"
            )
        if kwargs:
            raise ArgumentError(
                f"the script {train} was given keyword arguments ({', '.join(kwargs)}): a script "
                "takes words of a command line, such as run('train.py', '--lr=0.01')"
            )
        try:
            source = Path(train).read_bytes()
        except OSError as error:
            raise ArgumentError(f"the script {train} cannot be read: {error.strerror}") from error
        return cls(str(Path(train).absolute()), source=source, args=tuple(map(str, args)))

    def pack(self) -> bytes:
        """Return the task as a pickle, for processes of the user that have this package.

        Raises:
            ArgumentError: something in it cannot be pickled; says what, and why.
        """
        import cloudpickle

        try:
            return bytes(cloudpickle.dumps(self))
        except Exception as error:
            raise ArgumentError(
                f"{self.name}() cannot be sent to the workers: {_why_not_pickled(self, error)}. "
                "Create it inside of the function"
            ) from error

    @classmethod
    def unpack(cls, data: bytes) -> Task:
        """Return a task that :meth:`pack` has pickled; ``data`` came over an authenticated link.

        Raises:
            RunError: this host lacks a module of it.
        """
        try:
            task: Task = _unpickled(data)
        except ModuleNotFoundError as error:
            raise RunError(
                f"host {platform.node()} has no module {error.name!r}, which the function is from "
                f"or uses. Install it for {sys.executable}, or define the function in your program "
                "or notebook itself"
            ) from error
        return task

    def run(self, folder: Path) -> Any:
        """Execute it in this process; return the function's value.

        Args:
            folder: where a script is written if this host does not have it at its path.
        """
        if self.function is not None:
            return self.function(*self.args, **self.kwargs)
        path = Path(self.name)
        if not path.is_file() or path.read_bytes() != self.source:
            path = folder / path.name
            path.write_bytes(self.source)
        sys.argv = [str(path), *self.args]
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")
        return None


def exit_status(error: SystemExit) -> int:
    """Return the exit status of an interpreter that ends with an exception of ``sys.exit()``.

    >>> [exit_status(SystemExit(code)) for code in (None, 0, 3, -1, "no data")]
    [0, 0, 3, 255, 1]
    """
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _unpickled(data: bytes) -> Any:
    # Whoever has sent it has shown the certificate of the run, and runs as the user already.
    return pickle.loads(data)  # noqa: S301


def _why_not_pickled(task: Task, error: Exception) -> str:
    """Return the variable or argument that cannot be pickled, and why."""
    import cloudpickle

    said = str(error) or type(error).__name__
    for what, value in _parts(task):
        try:
            cloudpickle.dumps(value)
        except Exception as own:  # noqa: BLE001  # a type's own code decides what it raises
            why = str(own) or type(own).__name__
            return f"{what}, a {type(value).__name__}, cannot be pickled ({why})"
    return said


def _parts(task: Task) -> Iterator[tuple[str, Any]]:
    """Yield what is pickled with a task, with its name."""
    for number, value in enumerate(task.args, 1):
        yield f"argument {number}", value
    for name, value in task.kwargs.items():
        yield f"argument {name!r}", value
    if inspect.isfunction(task.function):
        found = inspect.getclosurevars(task.function)
        for name, value in {**found.nonlocals, **found.globals}.items():
            yield f"variable {name!r}", value
