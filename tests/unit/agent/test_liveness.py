"""Real processes that work, sleep, freeze, or only seem to do something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hvd_elastic.agent.worker import Liveness
from tests.waiting import until

SILENT_S = 3.0

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


def test_who_neither_beats_nor_works_is_silent() -> None:
    """Nor who is frozen or gone, however busy it was."""
    with ExitStack() as stack:
        programs = (ASLEEP, DEADLOCKED, BUSY, BUSY, ASLEEP)
        processes = [stack.enter_context(running(program)) for program in programs]
        watched = [Liveness(process.pid) for process in processes]
        time.sleep(0.5)
        *_, frozen, gone = processes
        os.kill(frozen.pid, signal.SIGSTOP)
        gone.kill()
        gone.wait()

        def only_the_busy_one_is_alive() -> bool:
            asleep, deadlocked, busy, *ended = (
                liveness.silent_s(time.monotonic()) for liveness in watched
            )
            return busy < SILENT_S / 2 and min(asleep, deadlocked, *ended) >= SILENT_S

        # The start of each was work, and is over.
        until(only_the_busy_one_is_alive)
        watched[0].beat()
        assert watched[0].silent_s(time.monotonic()) == 0.0, "a heartbeat is enough"


def test_time_in_which_nobody_listened_does_not_count() -> None:
    with running(ASLEEP) as process:
        liveness = Liveness(process.pid)
        now = time.monotonic()
        liveness.discount(100.0)
        assert liveness.silent_s(now + 100.0) == 0.0
