"""Run a task with ranks that stay the same, for functions and scripts that do not use this package.

They find what ``torchrun`` would set: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT. If a rank is lost, with its host or by a signal, all start again.
"""

from __future__ import annotations

import json
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvd_elastic.engines.dial_in.hosts import DialInHosts
from hvd_elastic.engines.dial_in.task import LENGTH, Outcome
from hvd_elastic.errors import RunError, SshError
from hvd_elastic.formatting import count
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.dial_in import DialInHost
from hvd_elastic.hosts.process import CHUNK_BYTES, RemoteProcess

MOST_RESTARTS = 3
"""How often the ranks start again after a loss, as often as Spark tries a task again."""
_CONSEQUENCES_S = 2.0
"""How long the other ranks get to end by themselves after one has failed [s]: what is seen first
may be a consequence of what comes next."""
_LAST_LINES_S = 20.0
"""How long the last lines of a rank that has ended may take to come from a busy host [s]."""
_REASON_S = 0.5
"""How long an engine may take to tell that it has ended a host on purpose [s]."""
_LOOK_S = 0.05
"""Time between two checks for that [s]."""
_EXIT_S = 20.0
"""How long an interpreter may take to exit after its task has ended [s]."""
_FREE_PORT = (
    "import socket, sys; s = socket.create_server((sys.argv[1], 0)); print(s.getsockname()[1])"
)

Show = Callable[[int, str], None]
"""Called with the rank and a line that it has printed."""


@dataclass
class _Ended:
    """The end of a rank; ``status`` is -1 if the connection to it was lost."""

    rank: int
    status: int
    outcome: Outcome | None


@dataclass(frozen=True)
class _Line:
    rank: int
    text: str


@dataclass(frozen=True)
class _Told:
    """A rank has sent its outcome, and exits."""

    rank: int


class FixedRanks:
    """A task on hosts that have dialled in, with a fixed number of ranks.

    Args:
        hosts: the hosts, which have the task as a file.
        tell: called with what the user should know.
        check: raises an error if no more hosts are to come.
    """

    def __init__(
        self,
        hosts: DialInHosts,
        size: int,
        show: Show,
        tell: Callable[[str], None],
        check: Callable[[], None],
    ) -> None:
        self._hosts, self._size = hosts, size
        self._show, self._tell, self._check = show, tell, check
        self._run_id = secrets.token_hex(4)

    def run(self) -> Any:
        """Run the task until it has ended on all ranks; return the value of rank 0.

        Raises:
            RunError: it raised an exception, or ranks were lost too often.
        """
        for restarts in range(MOST_RESTARTS + 1):
            attempt = _Attempt(self._places(), self._show)
            try:
                ended = attempt.run(self._hosts, self._run_id, restarts)
            finally:
                attempt.stop()
            lost = _first_lost(ended)
            if lost is None:
                return self._value(attempt, ended)
            if lost.status < 0:
                self._check_for(_REASON_S)
            cause = f"rank {attempt.name(lost.rank)} was lost ({_how(lost)})"
            if restarts == MOST_RESTARTS:
                raise RunError(f"{cause}; the ranks were started {restarts + 1} times")
            self._tell(
                f"{cause}: all {count(self._size, 'rank')} start again from the beginning "
                f"(restart {restarts + 1} of {MOST_RESTARTS}). Ranks that do not use hvd_elastic "
                "cannot continue without one of them"
            )
        raise AssertionError("the last round returns or raises")

    def _check_for(self, seconds: float) -> None:
        """Check for some time that more hosts are to come: the engine tells it after a loss."""
        until = time.monotonic() + seconds
        while True:
            is_over = time.monotonic() >= until  # before the last look, or there may be none
            self._check()
            if is_over:
                return
            time.sleep(_LOOK_S)

    def _places(self) -> list[tuple[DialInHost, int]]:
        """Return the host and slot of each rank, as soon as there are enough hosts."""
        places: list[tuple[DialInHost, int]] = []
        while len(places) < self._size:  # a host may go at the moment when all are there
            self._hosts.wait_for(self._size, self._check, calm_s=0.0, least=self._size)
            hosts = self._hosts.hosts
            places = [(host, slot) for host in hosts for slot in range(host.host.slots)]
        return places[: self._size]

    def _value(self, attempt: _Attempt, ended: list[_Ended]) -> Any:
        for each in ended:  # in the order in which they have failed
            if each.status or each.outcome is None or each.outcome.error:
                name = f"rank {attempt.name(each.rank)}"
                if each.outcome is None:
                    raise RunError(f"{name} ended with exit status {each.status} and gave no value")
                return each.outcome.get(name)
        (first,) = (each for each in ended if each.rank == 0)
        assert first.outcome is not None, "checked above"
        return first.outcome.get("rank 0")


class _Attempt:
    """One start of all ranks."""

    def __init__(self, places: list[tuple[DialInHost, int]], show: Show) -> None:
        self._places = places
        self._show = show
        self._events: queue.SimpleQueue[_Line | _Told | _Ended] = queue.SimpleQueue()
        self._processes: dict[int, RemoteProcess] = {}
        self._connections: dict[str, Connection] = {}

    def name(self, rank: int) -> str:
        return f"{rank} on host {self._places[rank][0].host.name}"

    def run(self, hosts: DialInHosts, run_id: str, restarts: int) -> list[_Ended]:
        """Run all ranks until they have ended; return their ends in that order.

        Ranks that had to be ended because another has failed are left out.
        """
        ended: list[_Ended] = []
        try:
            for remote, _ in self._places:
                if remote.host.name not in self._connections:
                    self._connections[remote.host.name] = hosts.connect(remote.host)
            variables = self._variables(run_id, restarts)
            for rank in range(len(self._places)):
                self._start(rank, variables[rank])
        except (SshError, BrokenPipeError) as error:
            rank = len(self._processes) if len(self._processes) < len(self._places) else 0
            return [_Ended(rank, -1, Outcome(error=str(error)))]
        limits: dict[int, float] = {}
        running = set(self._processes)
        while running:
            event = self._next(min(limits.values(), default=None))
            if isinstance(event, _Line):
                self._show(event.rank, event.text)
            elif isinstance(event, _Told):
                limits.setdefault(event.rank, time.monotonic() + _EXIT_S)
            elif isinstance(event, _Ended):
                running.discard(event.rank)
                limits.pop(event.rank, None)
                ended.append(event)
                if event.status:
                    limits = dict.fromkeys(running, time.monotonic() + _CONSEQUENCES_S)
            else:
                late = {rank for rank, limit in limits.items() if time.monotonic() >= limit}
                if any(each.status for each in ended):
                    return ended
                for rank in late:  # it has told its outcome, and hangs in its exit
                    del limits[rank]
                    self._processes[rank].signal("KILL")
        return ended

    def _next(self, limit: float | None) -> _Line | _Told | _Ended | None:
        try:
            return self._events.get(
                timeout=None if limit is None else max(0.0, limit - time.monotonic())
            )
        except queue.Empty:
            return None

    def _variables(self, run_id: str, restarts: int) -> list[dict[str, str]]:
        first = self._places[0][0]
        master = first.control.peer_address
        port = self._connections[first.host.name].run([first.python, "-c", _FREE_PORT, master])
        if not port.ok:
            raise SshError(f"host {first.host.name}: no port is free on {master}: {port.stderr!r}")
        hosts = [remote.host.name for remote, _ in self._places]
        nodes = [*dict.fromkeys(hosts)]
        return [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(slot),
                "WORLD_SIZE": str(len(self._places)),
                "LOCAL_WORLD_SIZE": str(hosts.count(remote.host.name)),
                "NODE_RANK": str(nodes.index(remote.host.name)),
                # As torchrun sets them; Lightning looks at these.
                "GROUP_RANK": str(nodes.index(remote.host.name)),
                "TORCHELASTIC_RUN_ID": run_id,
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
                "TORCHELASTIC_MAX_RESTARTS": str(MOST_RESTARTS),
                "MASTER_ADDR": master,
                "MASTER_PORT": port.text,
            }
            for rank, (remote, slot) in enumerate(self._places)
        ]

    def _start(self, rank: int, variables: dict[str, str]) -> None:
        remote, _ = self._places[rank]
        lines = _Lines(lambda text: self._events.put(_Line(rank, text)))
        process = self._connections[remote.host.name].start(
            ["exec", remote.python, "-m", "hvd_elastic.engines.dial_in.run_task"],
            on_stderr=lines.feed,
        )
        self._processes[rank] = process
        process.stdin.write(json.dumps(variables).encode() + b"\n")
        threading.Thread(
            target=self._attend, args=(rank, process, lines), name=f"rank {rank}", daemon=True
        ).start()

    def _attend(self, rank: int, process: RemoteProcess, lines: _Lines) -> None:
        """Wait for the outcome of a rank, and for its end."""
        outcome: Outcome | None = None
        head = _exactly(process, LENGTH.size)
        if len(head) == LENGTH.size:
            (length,) = LENGTH.unpack(head)
            data = _exactly(process, length)
            if len(data) == length:
                outcome = _unpacked(data)
                self._events.put(_Told(rank))
        status = process.wait()
        process.wait_drained(_LAST_LINES_S)
        lines.end()
        if outcome is not None and not outcome.error:
            status = 0  # what an interpreter does after that is of no interest
        self._events.put(_Ended(rank, status, outcome))

    def stop(self) -> None:
        """End all ranks that still run."""
        stopping = [
            threading.Thread(target=process.stop, daemon=True)
            for process in self._processes.values()
        ]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        for connection in self._connections.values():
            connection.close()


class _Lines:
    """Splits the output of a rank into whole lines."""

    def __init__(self, put: Callable[[str], None]) -> None:
        self._put = put
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self._put(line.decode("utf-8", errors="replace"))

    def end(self) -> None:
        if self._rest:
            self._put(self._rest.decode("utf-8", errors="replace"))


def _exactly(process: RemoteProcess, size: int) -> bytes:
    """Return bytes of the output of a process; fewer if it ends before."""
    data = bytearray()
    while len(data) < size:
        chunk = process.stdout.read(min(CHUNK_BYTES, size - len(data)))
        if not chunk:
            break
        data += chunk
    return bytes(data)


def _unpacked(data: bytes) -> Outcome:
    """Return the outcome of a rank; if it cannot be read, one with that error."""
    try:
        return Outcome.unpack(data)
    except Exception as error:  # noqa: BLE001  # unpickling may raise any
        return Outcome(
            error=f"its outcome cannot be read here ({type(error).__name__}: {error}). Install the "
            "same version of hvd_elastic and of Python on the host and on this machine"
        )


def _first_lost(ended: list[_Ended]) -> _Ended | None:
    """Return the first rank that was lost by no fault of the task; None: there is none."""
    return next((each for each in ended if each.status < 0 or _signal(each)), None)


def _signal(ended: _Ended) -> int:
    """Return the signal that has ended a rank; 0: none, also where its own status is above 128."""
    number = ended.status - 128
    return number if ended.outcome is None and 0 < number < signal.NSIG else 0


def _how(lost: _Ended) -> str:
    if _signal(lost):
        return f"signal {_signal(lost)}"
    if lost.outcome is not None and lost.outcome.error:
        return lost.outcome.error
    return "its host is gone"
