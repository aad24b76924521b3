"""Starts the processes of a run on a host; the template imports it, so it needs Python alone."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OWN_VARIABLES = ("HVD_ELASTIC_LOCAL_RANK", "HVD_ELASTIC_WORKER")
"""Variables in which the workers of a host differ; the last ones of their environment."""
PLACEHOLDER = "HVD_ELASTIC_TEMPLATE"
"""Variable of a template in place of those, and as long as they are."""
_MISSING = (
    "does not exist on this host. Copy it: copyclust HOSTFILE {path} {path} (virtual hosts have "
    "their own /tmp, /data and /run)"
)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def training_script(command: Sequence[str]) -> str | None:
    """Return the path of the script that a command gives to Python; None if none is certain.

    >>> training_script(["python", "-u", "train.py", "data.py"])
    'train.py'
    >>> training_script(["python", "-m", "train"]), training_script(["sh", "train.py"])
    (None, None)
    """
    # Only the first argument of a Python interpreter is certainly the path of a script.
    first = next((word for word in command[1:] if not word.startswith("-")), "")
    return first if "python" in Path(command[0]).name and first.endswith(".py") else None


@dataclass(frozen=True)
class WorkerStart:
    """Command, environment and folder that a worker is started with.

    Attributes:
        command: path of the program, and arguments.
        variables: environment, which ends with :data:`OWN_VARIABLES`.
    """

    command: tuple[str, ...]
    cwd: str
    variables: Mapping[str, str]

    @classmethod
    def of(cls, command: Sequence[str], cwd: str, variables: Mapping[str, str]) -> WorkerStart:
        """Return the start of a command that is looked up in ``PATH`` and in the folder.

        Raises:
            FileNotFoundError: the command, the script or the folder does not exist.
        """
        # A relative command with a slash is relative to the worker's folder, not to ours.
        named = str(Path(cwd, command[0])) if "/" in command[0] else command[0]
        program = shutil.which(named, path=variables.get("PATH"))
        if not Path(cwd).is_dir():
            raise FileNotFoundError(f"the folder {cwd} {_MISSING.format(path=cwd)}")
        if program is None:
            raise FileNotFoundError(f"there is no command {command[0]!r} on this host")
        script = training_script(command)
        if script is not None and not Path(cwd, script).is_file():
            path = Path(cwd, script)
            raise FileNotFoundError(f"the script {path} {_MISSING.format(path=path)}")
        return cls((program, *command[1:]), cwd, variables)

    @property
    def name(self) -> str:
        return self.variables[OWN_VARIABLES[1]]

    def is_like(self, other: WorkerStart) -> bool:
        """Return whether both differ in :data:`OWN_VARIABLES` alone."""

        def common(start: WorkerStart) -> tuple[object, ...]:
            return start.command, start.cwd, {**start.variables, **dict.fromkeys(OWN_VARIABLES)}

        return common(self) == common(other)

    def run(self, output: int) -> int:
        """Start the worker with ``output`` as its standard output; return its process id.

        Raises:
            OSError: the command cannot be executed.
            ValueError: a word or a variable has a null byte.
        """
        return start_process(self.command, self.cwd, self.variables, subprocess.DEVNULL, output)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies.

    Args:
        parent: id of the parent; if that has died already, this process ends now.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def start_process(
    command: Sequence[str],
    cwd: str,
    variables: Mapping[str, str],
    stdin: int,
    output: int,
    errors: int | None = None,
) -> int:
    """Start a command in its own session; the kernel kills it when this process dies.

    Args:
        command: path of the program, and arguments.
        errors: descriptor of its standard error; None: ``output``.

    Returns:
        Its process id. The caller has to reap it.

    Raises:
        OSError: the command or the folder does not exist or cannot be used.
        ValueError: a word or a variable has a null byte.
    """
    parent = os.getpid()

    def before_exec() -> None:
        # The agent has one thread, so running Python between fork and exec is safe.
        die_with_parent(parent)

    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=variables,
        stdin=stdin,
        stdout=output,
        stderr=output if errors is None else errors,
        start_new_session=True,
        preexec_fn=before_exec,  # noqa: PLW1509
    )
    process.returncode = 0  # so that subprocess does not reap it before the caller
    return process.pid
