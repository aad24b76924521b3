"""What `bench`, `plan` and `demo` have started ends with them, also by a signal."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.paths import LIMIT_S

BEGIN = """
import contextlib, os, signal, subprocess, sys
from pathlib import Path
from types import SimpleNamespace

number = int(sys.argv[1])
signal.signal(number, signal.SIG_DFL)  # nohup may have set it
"""
RUN = """
from hvd_elastic.bench import background_run

asked = []
folder = SimpleNamespace(
    run_id="r",
    follow_events=lambda: None,
    leader_alive=lambda: not asked,
    ask_leader=lambda what, _: asked.append(what),
)
background_run.RunFolder = SimpleNamespace(open=lambda run_id: folder)

def run(*_, **__):
    if sys.argv[2:]:
        os.kill(os.getpid(), number)
    return SimpleNamespace(returncode=0, stdout="r")

background_run.subprocess = SimpleNamespace(run=run, PIPE=0, DEVNULL=0)
try:
    with background_run.BackgroundRun(Path("hosts"), ["true"], 1, [], "the probe"):
        os.kill(os.getpid(), number)
finally:
    print("ended", *asked, signal.getsignal(number) is signal.SIG_DFL)
"""
DEMO = """
from rich.console import Console
from hvd_elastic.bench import demo

@contextlib.contextmanager
def up(*_, **__):
    try:
        yield SimpleNamespace(hosts=["a", "b", "c"], loopback=True, folder=Path("nowhere"))
    finally:
        print("ended", "stop", True)

demo.VirtualCluster = SimpleNamespace(up=up)
demo.prepare_data = lambda *_: os.kill(os.getpid(), number)
demo.play(Console(file=sys.stderr), True, 1, False)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("program", "more"),
    [(RUN, []), (RUN, ["while it starts"]), (DEMO, [])],
    ids=["run", "start", "demo"],
)
def test_a_signal_ends_what_was_started(
    program: str, more: list[str], number: signal.Signals
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, str(int(number)), *more],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 128 + number, done.stderr
    assert done.stdout == "ended stop True\n"
