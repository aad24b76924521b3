"""Small Python programs of this package, run by a host's own python3 without installing anything.

The program and its input travel on stdin, so neither shows in a process list, and what a host must
have is a Python, not this package.
"""

from __future__ import annotations

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

PROGRAMS = "hvd_elastic.hosts.programs"
"""The package of programs that stand alone."""

_LOADER = (
    "import sys, zlib; "
    "exec(compile(zlib.decompress(sys.stdin.buffer.read(int(sys.argv[1]))), sys.argv[2], 'exec'))"
)
_OWN_IMPORT = re.compile(r"^from (hvd_elastic\.[\w.]+) import", re.MULTILINE)
# Modules of this package under their own names, on a host that has the package not.
_MODULES = """import sys, types
for name, text in {modules!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main()
"""
COMMAND_NOT_FOUND = 127


def run_script(
    connection: Connection,
    name: str,
    payload: Any,
    timeout_s: float | None = 60.0,
    python: str = "python3",
) -> Any:
    """Runs ``programs/<name>.py`` on the host with a JSON input; returns its JSON output.

    Raises:
        SshError: there is no such python on the host, or the program failed; shows its last lines.
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
        return json.loads(result.stdout)
    except ValueError:
        tail = (result.stderr or result.stdout).decode("utf-8", errors="replace").strip()
        last = "\n".join(tail.splitlines()[-5:]) or f"exit status {result.exit_status}"
        raise SshError(f"host {host}: {name} failed: {last}") from None


def start_program(connection: Connection, name: str, python: str = "python3") -> RemoteProcess:
    """Starts a program of this package, which reads what the caller writes to its stdin.

    Args:
        connection: the host.
        name: a module (``hvd_elastic.…``) whose ``main`` is called. Nothing of this package need be
            there: the modules that it imports are sent with it.
        python: the interpreter there; it is started without its site-packages.

    Raises:
        SshError: no command can be started there.
    """
    source = _pack_program(name)
    argv = [python, "-I", "-S", "-c", _LOADER, str(len(source)), name.rpartition(".")[2]]
    process = connection.start_python(argv)
    # Where there is no Python nobody reads it.
    with contextlib.suppress(OSError, EOFError):
        process.stdin.write(source)
    return process


@functools.cache
def _pack_program(name: str) -> bytes:
    """The same for all hosts, and small: it goes to each of them over the leader's own link."""
    modules: dict[str, str] = {}

    def add(module: str) -> None:
        text = source_of(module)
        for imported in _OWN_IMPORT.findall(text):
            if imported not in modules:
                add(imported)
        modules[module] = text  # after those that it imports

    add(name)
    return zlib.compress(_MODULES.format(modules=[*modules.items()]).encode())


def source_of(module: str) -> str:
    """Returns the text of a module of this package."""
    package, *inside = module.split(".")
    return resources.files(package).joinpath("/".join(inside) + ".py").read_text("utf-8")


def no_python(host: str, python: str) -> SshError:
    """What is said when a host has no such interpreter."""
    return SshError(
        f"host {host}: no {python} there. Install Python 3 on it, or name another with --python"
    )
