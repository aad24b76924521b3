"""Records what happens on a cluster, and tells of it by a command of the operator.

The command gets each event as JSON on its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.jobs.job import Job
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.records.json_lines import EventLog

TOLD_KINDS = frozenset(
    {
        *("job_finished", "job_requeued", "time_limit_near"),
        *("host_lost", "host_back", "host_drained", "host_undrained", "host_unhealthy"),
    }
)
"""Kinds of events that are told."""
_LIMIT_S = 30.0
"""How long the command may take for one event [s]."""
_MOST_WAITING = 1000
"""Events that wait to be told; others are dropped."""
_MOST_REASONS = 100
"""Waiting jobs up to which the events tell why each of them waits."""
_LAST_S = 10.0
"""How long the last events are told when the daemon ends [s]."""


class Notifier:
    """Runs a command for each event, one at a time; what it prints is dropped.

    It never blocks: a command that hangs is killed, and events that come too fast are dropped.

    Args:
        command: shell text; empty: nothing is told.
        warn: called with what went wrong.
    """

    def __init__(self, command: str, warn: Callable[[str], None]) -> None:
        self._command = command
        self._warn = warn
        self._waiting: deque[bytes] = deque()
        self._running: tuple[subprocess.Popen[bytes], float] | None = None

    def tell(self, event: Mapping[str, Any]) -> None:
        """Tell an event soon, if it is one of :data:`TOLD_KINDS`."""
        if not self._command or event["kind"] not in TOLD_KINDS:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._warn(f"--notify: {_MOST_WAITING} events wait to be told, so others are dropped")
            return
        self._waiting.append(json.dumps(event, default=str).encode() + b"\n")

    def work(self) -> None:
        """Start the command for the next event, if it has ended for the last one."""
        if self._running is not None:
            process, began = self._running
            status = process.poll()
            if status is None and time.monotonic() - began <= _LIMIT_S:
                return
            self._running = None
            if status is None:
                self._warn(f"--notify: the command did not end within {_LIMIT_S:g} s: killed")
                _kill(process)
            elif status:
                self._warn(f"--notify: the command ended with exit status {status}")
        if self._waiting:
            event = self._waiting.popleft()
            try:
                self._running = self._start(event), time.monotonic()
            except OSError as error:
                self._warn(f"--notify: the command cannot be started: {error.strerror}")

    def close(self) -> None:
        """Tell what waits, for some seconds at most."""
        deadline = time.monotonic() + _LAST_S
        while (self._waiting or self._running) and time.monotonic() < deadline:
            self.work()
            time.sleep(0.02)
        if self._running is not None:
            _kill(self._running[0])

    def _start(self, event: bytes) -> subprocess.Popen[bytes]:
        with tempfile.TemporaryFile() as told:  # unlike a pipe it holds all that nobody reads
            told.write(event)
            told.seek(0)
            return subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=told,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )


class ClusterRecord:
    """Records the events of a cluster, has its operator's command told, and warns in the log.

    Args:
        command: see :class:`Notifier`.

    Raises:
        RunError: the file of the events cannot be opened.
    """

    def __init__(self, place: ClusterFolder, command: str) -> None:
        self._cluster = place.name
        self._events = EventLog(place.events)
        self._notifier = Notifier(command, self.warn)
        self._told_lost: Mapping[str, str] = {}
        self._decided: dict[str, Any] = {}
        self._warned = ""

    def emit(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Record an event; one that cannot be written is warned of."""
        self._notifier.tell({"t": time.time(), "cluster": self._cluster, "kind": kind, **fields})
        try:
            self._events.append(kind, fields)
        except RunError as error:  # the first of several that are lost
            self.warn(str(error))

    def warn(self, message: str) -> None:
        """Write a warning to the log, unless it was the last one."""
        if message != self._warned:
            self._warned = message
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError):  # the log may be on the disk that is full
                sys.stderr.write(f"{stamp} warning: {message}\n")
                sys.stderr.flush()

    def forget_warning(self) -> None:
        """Have the last warning given again if its cause comes back."""
        self._warned = ""

    def hosts(self, listed: Mapping[str, Host]) -> None:
        """Record the hosts of the hostfile and their slots."""
        self.emit("cluster_hosts", {"hosts": {host.name: host.slots for host in listed.values()}})

    def lost(self, lost: Mapping[str, str], listed: Mapping[str, Host]) -> None:
        """Record which hosts were lost since the last call, and which can be used again.

        Args:
            lost: hosts that are lost now, with the cause.
            listed: hosts of the hostfile.
        """
        for host in lost.keys() - self._told_lost.keys():
            self.emit("host_lost", {"host": host, "cause": lost[host]})
        for host in (self._told_lost.keys() - lost.keys()) & listed.keys():
            self.emit("host_back", {"host": host})
        self._told_lost = lost

    def decided(self, active: Mapping[int, Job]) -> None:
        """Record who holds which slots, and why, if that has changed."""
        held = {job.number: dict(job.held) for job in active.values() if job.held}
        waiting = [number for number in active if number not in held]
        told = {"allocations": held, "queued": waiting}
        if told != self._decided:
            self._decided = told
            named = active if len(waiting) <= _MOST_REASONS else held
            reasons = {number: active[number].reason for number in named}
            self.emit("jobs_decided", {**told, "reasons": reasons})

    def forget_decided(self) -> None:
        """Have the next decision recorded, also if it is the same."""
        self._decided = {}

    def work(self) -> None:
        """Tell of the next event, if the command has ended for the last one."""
        self._notifier.work()

    def close(self) -> None:
        """Tell of what waits, for some seconds at most, and close the file."""
        self._notifier.close()
        self._events.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
