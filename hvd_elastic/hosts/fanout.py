"""One task on many hosts: bounded, each with its own deadline, results as they come.

A thread a host, not a pool: a pool waits for its threads at exit, and one host that hangs in the
kernel would hold the whole command. Here it is given up at its deadline and its place goes to the
next host.
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

DEFAULT_FANOUT = 64
# What a task gets, after its deadline, to stop what it started.
STOP_S = 8.0
TICK_S = 0.5

T = TypeVar("T")

log = logging.getLogger(__name__)


class Outcome(Enum):
    """How a task ended on a host."""

    OK = "ok"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class HostResult(Generic[T]):
    """One host's outcome.

    Attributes:
        value: what the task returned; None where it raised or was given up.
        error: why not, in words; "" where all is well.
        exception: what the task raised.
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
        """The value, where there is known to be one."""
        assert self.value is not None, "ask for it only when the task returned"
        return self.value


class Stopper:
    """Where a task leaves how to stop what it started (a remote command, a connection)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actions: list[Callable[[], object]] = []
        self.stopped = False

    def add(self, action: Callable[[], object]) -> None:
        """Registers an action; when the task is stopped already it runs at once."""
        with self._lock:
            if not self.stopped:
                self._actions.append(action)
                return
        action()

    def stop(self) -> None:
        """Runs the actions, the last registered first."""
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
    judge: Callable[[T], tuple[Outcome, str]] | None = None,
    on_wait: Callable[[Mapping[str, float], int], None] | None = None,
) -> Iterator[HostResult[T]]:
    """Runs a task on every host and yields each result as it comes.

    Args:
        hosts: where.
        task: called in a thread with the host and a :class:`Stopper`.
        fanout: hosts at a time, >= 1.
        timeout_s: seconds for each host, from its own start.
        judge: gives a returned value its outcome and the reason; without it all are well.
        on_wait: told, every half second, the seconds since the start of each host that is at it,
            and how many hosts have not begun.

    Yields:
        One result a host, in the order in which they end.

    When the caller stops iterating (Ctrl-C), the tasks still running are stopped and nothing more
    is started.
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
                    args=(task, entry, judge, ended),
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
            # A result that comes after its host was given up is nobody's any more.
            elif running.pop(result.host.name, None) is not None:
                yield result
    finally:
        _stop_all([entry.stopper for entry in running.values()])


def _run_task(
    task: Callable[[Host, Stopper], T],
    entry: _Running,
    judge: Callable[[T], tuple[Outcome, str]] | None,
    ended: queue.Queue[HostResult[T]],
) -> None:
    host = entry.host

    def seconds() -> float:
        return time.monotonic() - entry.started

    result: HostResult[T]
    try:
        value = task(host, entry.stopper)
        outcome, reason = judge(value) if judge else (Outcome.OK, "")
        result = HostResult(host, outcome, seconds(), value, reason)
    except HvdElasticError as error:
        outcome = Outcome.FAILED
        if isinstance(error, HostUnreachableError):
            outcome = Outcome.UNREACHABLE
        elif isinstance(error, CommandTimeoutError):
            outcome = Outcome.TIMED_OUT
        result = HostResult(host, outcome, seconds(), None, str(error), error)
    except Exception as error:  # a defect must not leave a host unaccounted for
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
    """The next result, or None when the next deadline or ``most_s`` has come."""
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
        # Stopping can hang as the task did: nobody waits for it.
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
