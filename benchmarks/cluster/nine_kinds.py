"""A worker that starts processes of eight more kinds, as training scripts do, and then waits.

``python nine_kinds.py FILE [KINDS]`` writes a line with process id and kind for each process to
FILE. It uses only the standard library, so that any launcher can run it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

WAIT_S = 600.0
# Properties of a process: session = in its own session; twice = grandchild whose parent has ended;
# python, sleep = executes that program; cleared = without our environment; deaf = ignores TERM.
KINDS: dict[str, frozenset[str]] = {
    "forked": frozenset(),
    "in a session of its own": frozenset({"session"}),
    "forked twice": frozenset({"session", "twice"}),
    "another Python": frozenset({"python"}),
    "another program": frozenset({"sleep"}),
    "without our environment": frozenset({"python", "cleared"}),
    "another program, forked twice": frozenset({"session", "twice", "sleep"}),
    "deaf to TERM, forked twice": frozenset({"session", "twice", "deaf"}),
}


def start(kind: str, how: frozenset[str], told: Path) -> None:
    """Start one process of a kind."""
    if os.fork():
        return
    if "session" in how:
        os.setsid()
    if "twice" in how and os.fork():
        os._exit(0)
    if "deaf" in how:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(kind, told)
    environment = {"PATH": os.environ["PATH"]} if "cleared" in how else dict(os.environ)
    if "python" in how:
        wait = f"import time; time.sleep({WAIT_S})"
        os.execve(sys.executable, [sys.executable, "-S", "-c", wait], environment)
    if "sleep" in how:
        os.execvpe("sleep", ["sleep", str(WAIT_S)], environment)
    time.sleep(WAIT_S)
    os._exit(0)


def tell(kind: str, told: Path) -> None:
    """Append a line for this process to the file."""
    with told.open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {kind}\n")


def main() -> None:
    """Start the processes of all kinds, or of the first KINDS."""
    told = Path(sys.argv[1])
    most = int(sys.argv[2]) if len(sys.argv) > 2 else len(KINDS)
    for kind, how in list(KINDS.items())[:most]:
        start(kind, how, told)
    tell("the worker", told)
    time.sleep(WAIT_S)


if __name__ == "__main__":
    main()
