"""Run Python programs of this package with a host's own python3, without installing anything.

Program and input are sent on stdin, so neither appears in a process list. The host needs Python,
but not this package.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import re
import shlex
import zlib
from importlib import resources
from typing import Any

from hvd_elastic.errors import SshError
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.process import CommandTimeoutError, RemoteProcess, collect
from hvd_elastic.json_text import parse_json

PROGRAMS = "hvd_elastic.programs"
"""Package of the programs that are sent to hosts."""

FROM_NO_WORKING_FOLDER = "import sys; sys.path[:] = filter(None, sys.path); "
"""Beginning of a program for ``python -c`` that imports nothing from where it is started, which is
the user's home on a host."""

_LOADER = (
    f"{FROM_NO_WORKING_FOLDER}import zlib; "
    "exec(compile(zlib.decompress(sys.stdin.buffer.read(int(sys.argv[1]))), sys.argv[2], 'exec'))"
)
_OWN_IMPORT = re.compile(r"^from (hvd_elastic\.[\w.]+) import", re.MULTILINE)
# Registers the sent modules under their own names, since the host may not have this package.
_MODULES = """import sys, types
for name, text in {modules!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main()
"""
# Exit status of a shell that does not find a command.
COMMAND_NOT_FOUND = 127


def run_script(
    connection: Connection,
    name: str,
    payload: Any,
    timeout_s: float,
    python: str = "python3",
) -> Any:
    """Run ``programs/<name>.py`` on the host with a JSON input; return its JSON output.

    Raises:
        SshError: the host has no such Python, or the program failed; shows its last lines.
        CommandTimeoutError: it took too long.
    """
    source = _pack_program(f"{PROGRAMS}.{name}")
    command = shlex.join([python, "-c", _LOADER, str(len(source)), f"{name}.py"])
    stdin = source + json.dumps(payload).encode()
    host = connection.host.name
    try:
        result = collect(lambda err: connection.start(command, err), timeout_s, stdin)
    except CommandTimeoutError as error:
        message = f"host {host}: {name} did not end within {timeout_s:g} s and was stopped"
        raise CommandTimeoutError(message, error.stdout, error.stderr) from None
    if result.exit_status == COMMAND_NOT_FOUND:
        raise no_python(host, python)
    try:
        return parse_json(result.stdout)
    except ValueError:
        tail = (result.stderr or result.stdout).decode("utf-8", errors="replace").strip()
        last = "\n".join(tail.splitlines()[-5:]) or f"exit status {result.exit_status}"
        raise SshError(f"host {host}: {name} failed: {last}") from None


def start_program(connection: Connection, name: str, python: str = "python3") -> RemoteProcess:
    """Start a program of this package on the host; the caller writes its input to its stdin.

    Args:
        connection: connection to the host.
        name: module (``hvd_elastic.…``) whose ``main`` is called. The host does not need this
            package: modules of it that the program imports are sent too.
        python: Python interpreter on the host; it is started without its site-packages.

    Raises:
        SshError: no command can be started there.
    """
    source = _pack_program(name)
    argv = [python, "-I", "-S", "-c", _LOADER, str(len(source)), name.rpartition(".")[2]]
    process = connection.start_python(argv)
    # If there is no Python, nobody reads it; the caller sees that by the exit status.
    with contextlib.suppress(OSError, EOFError):
        process.stdin.write(source)
    return process


def program_text(name: str) -> str:
    """Return a program with its modules as text for ``python -c``, which leaves stdin to it.

    Others see it in process lists.
    """
    packed = base64.b64encode(_pack_program(name)).decode()
    unpacks = f"import base64, zlib; exec(zlib.decompress(base64.b64decode({packed!r})))"
    return FROM_NO_WORKING_FOLDER + unpacks


@functools.cache
def _pack_program(name: str) -> bytes:
    """Return a program with its modules, compressed for the leader's link; cached."""
    modules: dict[str, str] = {}

    def add(module: str) -> None:
        text = source_of(module)
        for imported in _OWN_IMPORT.findall(text):
            if imported not in modules:
                add(imported)
        modules[module] = text  # after the modules that it imports

    add(name)
    return zlib.compress(_MODULES.format(modules=[*modules.items()]).encode())


def source_of(module: str) -> str:
    """Return the source of a module of this package."""
    package, *inside = module.split(".")
    return resources.files(package).joinpath("/".join(inside) + ".py").read_text("utf-8")


def no_python(host: str, python: str) -> SshError:
    """Return the error for a host without this interpreter."""
    return SshError(
        f"host {host}: no {python} there. Install Python 3 on it, or name another with --python"
    )
