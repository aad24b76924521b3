"""Records what happens on a cluster, and tells of it by commands of its operator and of users.

A command gets each event as JSON on its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.jobs.job import Job
from hvd_elastic.jobs.operator_state import Drained
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.records.json_lines import EventLog

TOLD_KINDS = frozenset(
    {
        *("job_finished", "job_requeued", "time_limit_near", "job_held_long"),
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


@dataclass(frozen=True)
class NotifyCommand:
    """A command that is told of events.

    Attributes:
        text: for the shell; empty: nothing is told.
        environment: its variables; None: those of this process.
        folder: where it runs; None: where this process does.
    """

    text: str
    environment: Mapping[str, str] | None = None
    folder: str | None = None


class Notifier:
    """Runs a command for each event, one at a time; what it prints is dropped.

    It never blocks: a command that hangs is killed, and events that come too fast are dropped.

    Args:
        warn: called with what went wrong.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._waiting: deque[tuple[NotifyCommand, bytes]] = deque()
        self._running: tuple[subprocess.Popen[bytes], float] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return bool(self._waiting or self._running)

    def tell(self, command: NotifyCommand, event: Mapping[str, Any]) -> None:
        """Tell an event soon, if it is one of :data:`TOLD_KINDS`."""
        if not command.text or event["kind"] not in TOLD_KINDS:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._warn(f"--notify: {_MOST_WAITING} events wait to be told, so others are dropped")
            return
        self._waiting.append((command, json.dumps(event, default=str).encode() + b"\n"))

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
            try:
                self._running = self._start(*self._waiting.popleft()), time.monotonic()
            except OSError as error:
                self._warn(f"--notify: the command cannot be started: {error.strerror}")

    def close(self) -> None:
        """Tell what waits, for some seconds at most."""
        deadline = time.monotonic() + _LAST_S
        while self.is_busy and time.monotonic() < deadline:
            self.work()
            time.sleep(0.02)
        if self._running is not None:
            _kill(self._running[0])

    @staticmethod
    def _start(command: NotifyCommand, event: bytes) -> subprocess.Popen[bytes]:
        # Unlike a pipe it holds all that nobody reads; unlike a file it needs no space of a disk.
        with os.fdopen(os.memfd_create("event"), "w+b") as told:
            told.write(event)
            told.seek(0)
            return subprocess.Popen(
                ["/bin/sh", "-c", command.text],
                cwd=command.folder,
                env=command.environment,
                stdin=told,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )


class ClusterRecord:
    """Records the events of a cluster, has its operator's command told, and warns in the log.

    Args:
        command: shell text that is told of events; empty: none.

    Raises:
        RunError: the file of the events cannot be opened.
    """

    def __init__(self, place: ClusterFolder, command: str) -> None:
        self._cluster = place.name
        self._events = EventLog(place.events)
        self._command = NotifyCommand(command)
        self._notifier = Notifier(self.warn)
        self._told_lost: Mapping[str, str] = {}
        self._decided: dict[str, Any] = {}
        self._warned = ""

    def emit(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Record an event; one that cannot be written is warned of."""
        self._notifier.tell(self._command, self.event(kind, fields))
        try:
            self._events.append(kind, fields)
        except RunError as error:  # the first of several that are lost
            self.warn(str(error))

    def event(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return an event as it is told."""
        return {"t": time.time(), "cluster": self._cluster, "kind": kind, **fields}

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

    def lost(self, lost: Mapping[str, str], listed: Mapping[str, Host]) -> list[str]:
        """Record which hosts were lost since the last call, and which can be used again.

        Args:
            lost: hosts that are lost now, with the cause.
            listed: hosts of the hostfile.

        Returns:
            Those that were lost since then.
        """
        new = [host for host in lost if host not in self._told_lost]
        for host in new:
            self.emit("host_lost", {"host": host, "cause": lost[host]})
        for host in (self._told_lost.keys() - lost.keys()) & listed.keys():
            self.emit("host_back", {"host": host})
        self._told_lost = lost
        return new

    def drained(self, host: str, drained: Drained) -> None:
        """Record that a host is drained, or will be."""
        fields = {"reason": drained.reason, "by": drained.by, "at": drained.at}
        self.emit("host_drained", {"host": host, **fields})

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
