"""Decides whether a training command can be run in a fork of a Python process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?t?")
_FLAGS = re.compile(r"-[bBdEIOPqRsSu]+")
_WITH_VALUE = ("-X", "-W")


class UnsuitableError(Exception):
    """No worker can be forked for a command; the message says why."""


class PythonCommand(NamedTuple):
    """A command that starts a script with Python.

    Attributes:
        interpreter: the interpreter and its options.
        program: the script, or ``-m`` and a module, and its arguments.
    """

    interpreter: tuple[str, ...]
    program: tuple[str, ...]


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
