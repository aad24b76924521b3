"""Run one task on many hosts: limited number at a time, a deadline each, results as they come.

Each host has a thread of its own, not one of a pool: a pool waits for its threads at exit, so one
host that hangs would block the whole command. Here a host is given up at its deadline, and the next
host starts.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from hvd_elastic.errors import HostUnreachableError, HvdElasticError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import CommandTimeoutError

# Each host takes a thread and a connection here, so their number is limited.
DEFAULT_FANOUT = 64
# Maximum wait for tasks that are stopped at the end.
STOP_S = 8.0
# Interval of the calls of ``on_wait``.
TICK_S = 0.5

T = TypeVar("T")

log = logging.getLogger(__name__)


class Outcome(Enum):
    """Result or error of a task on a host."""

    OK = "ok"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class HostResult(Generic[T]):
    """Result of a task on one host.

    Attributes:
        outcome: how the task ended.
        seconds: duration [s].
        value: return value of the task; None if it raised or was given up.
        error: why it failed; "" if it did not.
        exception: the exception that it raised, if any.
    """

    host: Host
    outcome: Outcome
    seconds: float
    value: T | None = None
    error: str = ""
    exception: BaseException | None = None

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def answer(self) -> T:
        """The value, for callers who know that there is one."""
        assert self.value is not None, "ask for it only when the task returned"
        return self.value


class Stopper:
    """Collects the actions that stop what a task has started (a remote command, a connection)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actions: list[Callable[[], object]] = []
        self.stopped = False

    def add_action(self, action: Callable[[], object]) -> None:
        """Add an action; if the task has been stopped already, run it at once."""
        with self._lock:
            if not self.stopped:
                self._actions.append(action)
                return
        action()

    def stop(self) -> None:
        """Run the actions, the last added one first."""
        with self._lock:
            self.stopped = True
            actions, self._actions = self._actions[::-1], []
        for action in actions:
            try:
                action()
            except (HvdElasticError, OSError, EOFError) as error:
                log.debug("stopping: %s", error)


@dataclass
class _Running:
    host: Host
    started: float
    stopper: Stopper


def fan_out(
    hosts: Iterable[Host],
    task: Callable[[Host, Stopper], T],
    fanout: int = DEFAULT_FANOUT,
    timeout_s: float | None = None,
    assess: Callable[[T], tuple[Outcome, str]] | None = None,
    on_wait: Callable[[Mapping[str, float], int], None] | None = None,
) -> Iterator[HostResult[T]]:
    """Run a task on every host and yield each result as soon as it is known.

    If the caller stops iterating (as after Ctrl-C), running tasks are stopped and no more start.

    Args:
        hosts: hosts to run it on.
        task: called in a thread with the host and a :class:`Stopper`.
        fanout: maximum number of hosts at a time, >= 1.
        timeout_s: limit for each host, counted from its own start [s].
        assess: returns the outcome and the reason for a returned value; without it all are OK.
        on_wait: called every half second with the seconds since the start of each running host, and
            the number of hosts that have not started.

    Yields:
        One result for each host, in the order in which they end.
    """
    if fanout < 1:
        raise ValueError(f"fanout is {fanout}; it must be at least 1")
    waiting = deque(hosts)
    running: dict[str, _Running] = {}
    ended: queue.Queue[HostResult[T]] = queue.Queue()
    try:
        while waiting or running:
            while waiting and len(running) < fanout:
                host = waiting.popleft()
                entry = _Running(host, time.monotonic(), Stopper())
                running[host.name] = entry
                threading.Thread(
                    target=_run_task,
                    args=(task, entry, assess, ended),
                    name=f"task on {host.name}",
                    daemon=True,
                ).start()
            result = _next_result(ended, running, timeout_s, TICK_S if on_wait else None)
            if result is None:
                if timeout_s is not None:
                    yield from _give_up_late(running, timeout_s)
                if on_wait is not None:
                    now = time.monotonic()
                    on_wait(
                        {name: now - entry.started for name, entry in running.items()}, len(waiting)
                    )
            # A result of a host that was given up already is dropped.
            elif running.pop(result.host.name, None) is not None:
                yield result
    finally:
        _stop_all([entry.stopper for entry in running.values()])


def _run_task(
    task: Callable[[Host, Stopper], T],
    entry: _Running,
    assess: Callable[[T], tuple[Outcome, str]] | None,
    ended: queue.Queue[HostResult[T]],
) -> None:
    host = entry.host

    def seconds() -> float:
        return time.monotonic() - entry.started

    result: HostResult[T]
    try:
        value = task(host, entry.stopper)
        outcome, reason = assess(value) if assess else (Outcome.OK, "")
        result = HostResult(host, outcome, seconds(), value, reason)
    except HvdElasticError as error:
        outcome = Outcome.FAILED
        if isinstance(error, HostUnreachableError):
            outcome = Outcome.UNREACHABLE
        elif isinstance(error, CommandTimeoutError):
            outcome = Outcome.TIMED_OUT
        result = HostResult(host, outcome, seconds(), None, str(error), error)
    except Exception as error:  # an unexpected error must count as the result of its host
        log.debug("task on %s", host.name, exc_info=True)
        message = f"host {host.name}: {type(error).__name__}: {error}"
        result = HostResult(host, Outcome.FAILED, seconds(), None, message, error)
    ended.put(result)


def _next_result(
    ended: queue.Queue[HostResult[T]],
    running: dict[str, _Running],
    timeout_s: float | None,
    most_s: float | None,
) -> HostResult[T] | None:
    """Wait for the next result; None at the next deadline or after ``most_s``."""
    wait_s = most_s
    if timeout_s is not None:
        next_deadline = min(entry.started for entry in running.values()) + timeout_s
        left_s = max(0.0, next_deadline - time.monotonic())
        wait_s = left_s if most_s is None else min(left_s, most_s)
    with contextlib.suppress(queue.Empty):
        return ended.get(timeout=wait_s)
    return None


def _give_up_late(running: dict[str, _Running], timeout_s: float) -> Iterator[HostResult[T]]:
    now = time.monotonic()
    late = {name: entry for name, entry in running.items() if now - entry.started >= timeout_s}
    for name, entry in late.items():
        del running[name]
        # Stopping can hang just as the task did, so it is not waited for.
        threading.Thread(target=entry.stopper.stop, name=f"stop {name}", daemon=True).start()
        yield HostResult(
            entry.host,
            Outcome.TIMED_OUT,
            now - entry.started,
            error=f"host {name}: not done within {timeout_s:g} s",
        )


def _stop_all(stoppers: list[Stopper]) -> None:
    threads = [threading.Thread(target=stopper.stop, daemon=True) for stopper in stoppers]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + STOP_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
