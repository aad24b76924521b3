"""Real processes that work, sleep, freeze, or only seem to do something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hvd_elastic.agent.liveness import Liveness

LOOKED_AT_S = 5.0

BUSY = "while True: pass"
ASLEEP = "import time; time.sleep(1000)"
# As threads do that wait for each other with time limits: awake often, and for nothing.
DEADLOCKED = "import time\nwhile True: time.sleep(0.01)"


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", f"print(flush=True)\n{program}"], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()  # its start is over
        yield process
    finally:
        process.kill()
        process.communicate()


def silence(pulse: Liveness) -> float:
    """What it amounts to after a few seconds in which somebody looked every now and then."""
    end = time.monotonic() + LOOKED_AT_S
    while time.monotonic() < end:
        time.sleep(0.1)
        pulse.silent_s(time.monotonic())
    return pulse.silent_s(time.monotonic())


@pytest.mark.parametrize("program", [ASLEEP, DEADLOCKED])
def test_who_neither_beats_nor_works_is_silent(program: str) -> None:
    with running(program) as process:
        # Its start was work, and is over.
        assert silence(Liveness(process.pid)) >= LOOKED_AT_S - 2.0


def test_who_works_is_not_silent() -> None:
    with running(BUSY) as process:
        assert silence(Liveness(process.pid)) < LOOKED_AT_S - 2.0


def test_who_is_frozen_is_silent_however_busy_it_was() -> None:
    with running(BUSY) as process:
        pulse = Liveness(process.pid)
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGSTOP)
        assert silence(pulse) >= LOOKED_AT_S - 2.0


def test_a_heartbeat_is_enough() -> None:
    with running(ASLEEP) as process:
        pulse = Liveness(process.pid)
        silence(pulse)
        pulse.beat()
        assert pulse.silent_s(time.monotonic()) == 0.0


def test_time_in_which_nobody_listened_does_not_count() -> None:
    with running(ASLEEP) as process:
        pulse = Liveness(process.pid)
        now = time.monotonic()
        pulse.discount(100.0)
        assert pulse.silent_s(now + 100.0) == 0.0


def test_a_process_that_is_gone_is_silent() -> None:
    with running(ASLEEP) as process:
        pulse = Liveness(process.pid)
    assert silence(pulse) >= LOOKED_AT_S - 2.0
