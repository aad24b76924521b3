"""The leader's lease on the checkpoint folder, which keeps two leaders of one run apart.

Two leaders of one run normally find each other on the hosts that both use. If they use different
hosts, they share only ``--checkpoint-dir``, so each leader keeps a small lease file there and
renews it. A file that changes belongs to a live leader. Whether it changes is measured with the
reader's own clock, since the clocks of two machines differ. The storage only has to support
replacing a file: a leader that finds its lease replaced reads who replaced it, so simultaneous
writes do no harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from hvd_elastic.checkpoint.url import CheckpointUrl
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.replaced_files import write_whole

PATIENCE_S = 9.0
"""Time after which an unchanged lease has expired [s]: three missed renewals."""

_NAME = "leader.json"  # beside the checkpoints
_RENEW_S = 3.0
"""Time between two renewals [s]; each is a small write to the storage."""
_LOOK_S = 0.5
"""Time between two readings of another leader's lease [s], while starting waits for the result."""
_STOOD_STILL_S = 2 * _RENEW_S
"""Time between two readings above which this process was paused and must observe again [s]."""
_END_S = 3.0
"""How long the end of a run waits for slow storage to remove the lease [s]."""

Verdict = Literal["mine", "open", "led"]


@dataclass(frozen=True)
class Lease:
    """The content of a lease file.

    Attributes:
        leader: unique id of the leader's process.
        led_since: when it began to lead [Unix seconds by its own clock].
        machine: id of the process's machine, boot and pid namespace; empty: unknown.
        count: number of renewals.
    """

    run: str
    leader: str
    led_by: str
    led_since: float
    machine: str
    pid: int
    count: int = 0

    @classmethod
    def of_this_process(cls, run_id: str, led_since: float) -> Lease:
        """Return a new lease of this process, with a unique id."""
        pid = os.getpid()
        led_by = f"process {pid} on {socket.gethostname()}"
        return cls(run_id, secrets.token_hex(8), led_by, led_since, _machine(), pid)

    @property
    def is_of_a_dead_process(self) -> bool:
        """Return whether its process was on this machine and has ended."""
        if not self.machine or self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False


class LeaseWatch:
    """Decides whether the leases that are found belong to a live leader; times are arguments."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._seen: Lease | None = None
        self._since = self._looked = 0.0

    def check(self, found: Lease | None, now: float) -> Verdict:
        """Decide who may write to the place, from one reading of its lease file.

        Args:
            found: lease that is there; None: there is none.
            now: time by a clock that continues while the machine sleeps [s].

        Returns:
            ``mine`` if this leader may take the lease, ``led`` if another live leader holds it,
            ``open`` if it is not known yet whether that leader is alive.
        """
        stood_still = now - self._looked > _STOOD_STILL_S
        before, self._seen, self._looked = self._seen, found, now
        if found is None or found.leader == self._own or found.is_of_a_dead_process:
            return "mine"
        if before is None or before.leader != found.leader or stood_still:
            self._since = now
            return "open"
        if found != before:
            self._since = now
            return "led"
        return "mine" if now - self._since >= PATIENCE_S else "open"


class LeaseHolder:
    """Renews this leader's lease and watches for other leaders, in a thread as storage may be slow.

    Errors with the file are not reported: checkpoints use the same storage, and report them.

    Args:
        on_settled: called once, when the lease is held or the storage cannot be read.
        on_other: called with another leader's lease, whenever that was renewed, and whether it has
            taken the place of this leader's.
    """

    def __init__(
        self,
        place: Path | CheckpointUrl,
        lease: Lease,
        on_settled: Callable[[], None],
        on_other: Callable[[Lease, bool], None],
    ) -> None:
        self.lease = lease
        self._place = PlainFolder(place) if isinstance(place, Path) else place
        self._on_settled = on_settled
        self._on_other = on_other
        self._settled = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="lease", daemon=True)
        self._thread.start()

    def release_lease(self) -> None:
        """Stop renewing and remove the lease, if the storage responds soon."""
        self._over.set()
        self._thread.join(_END_S)

    def _live(self) -> None:
        watch = LeaseWatch(self.lease.leader)
        while not self._over.is_set():
            verdict: Verdict = "mine"
            with contextlib.suppress(OSError, HvdElasticError):
                found = _read(self._place)
                verdict = watch.check(found, _now())
                if verdict == "mine":
                    self._renew()
                elif found is not None and verdict == "led":
                    self._on_other(found, self.lease.count > 0)
            if verdict == "mine" and not self._settled:
                self._settled = True
                self._on_settled()
            self._over.wait(_RENEW_S if verdict == "mine" else _LOOK_S)
        with contextlib.suppress(OSError, HvdElasticError):
            found = _read(self._place)
            if found is not None and found.leader == self.lease.leader:
                self._place.remove_file(_NAME)

    def _renew(self) -> None:
        self.lease = replace(self.lease, count=self.lease.count + 1)
        self._place.write_file(_NAME, json.dumps(asdict(self.lease)).encode())


def find_lease(place: Path | CheckpointUrl) -> Lease | None:
    """Return the lease of the live leader that uses ``place``, None if there is none.

    Waits for up to ``PATIENCE_S`` to see whether an existing lease is being renewed.
    """
    watch = LeaseWatch(secrets.token_hex(8))
    folder = PlainFolder(place) if isinstance(place, Path) else place
    with contextlib.suppress(OSError, HvdElasticError):
        while (verdict := watch.check(found := _read(folder), _now())) == "open":
            time.sleep(_LOOK_S)
        return found if verdict == "led" else None
    return None


class PlainFolder:
    """A folder with the methods of :class:`CheckpointUrl` that a lease needs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_file(self, name: str) -> bytes:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return b""

    def write_file(self, name: str, data: bytes) -> None:
        write_whole(self._path / name, data)

    def remove_file(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


def _read(place: PlainFolder | CheckpointUrl) -> Lease | None:
    """Return the lease at ``place``; None if there is no such file."""
    text = place.read_file(_NAME)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Lease)
    except (ValueError, RecursionError):
        return _UNREADABLE


_UNREADABLE = Lease("", "", "", 0.0, "", 0)
"""Stands for a file that is not a lease, or that was read while it was only partly replaced."""


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
