"""The leader's claim on the place of its run's checkpoints, for leaders that share nothing else.

Two leaders of one run meet on the hosts that both use. Where they use different ones, what they
share is ``--checkpoint-dir``: whoever leads keeps a small file there and renews it. A file that
changes has a living leader behind it. That is judged by one's own clock between two looks, since
clocks differ, and needs nothing of the storage but that a file can be replaced. Whoever finds his
own claim replaced looks who did it; so it does not matter if two write at the same time.
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

from hvd_elastic.checkpoint.files import temporary_in
from hvd_elastic.checkpoint.url import CheckpointUrl
from hvd_elastic.errors import HvdElasticError

__all__ = ["PATIENCE_S", "Claim", "ClaimKeeper", "ClaimWatch", "find_claimant"]

PATIENCE_S = 9.0
"""A claim that has not changed for so long is nobody's."""

_NAME = "leader.json"
_RENEW_S = 3.0
_LOOK_S = 0.5
_STOOD_STILL_S = 2 * _RENEW_S
_END_S = 3.0

Verdict = Literal["mine", "open", "led"]


@dataclass(frozen=True)
class Claim:
    """What the file says.

    Attributes:
        run: id of the run.
        leader: tells the process from all others.
        led_by: what users call it.
        led_since: when it began to lead [Unix seconds, of its own clock].
        machine: where process ids mean the same; empty: not known.
        pid: of the process there.
        count: rises with each renewal.
    """

    run: str
    leader: str
    led_by: str
    led_since: float
    machine: str
    pid: int
    count: int = 0

    @classmethod
    def of_this_process(cls, run_id: str, led_since: float) -> Claim:
        """A new one; nobody else has the same."""
        pid = os.getpid()
        led_by = f"process {pid} on {socket.gethostname()}"
        return cls(run_id, secrets.token_hex(8), led_by, led_since, _machine(), pid)

    @property
    def is_of_a_dead_process(self) -> bool:
        """Whether its process was one of this machine, and has ended."""
        if not self.machine or self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False


class ClaimWatch:
    """Whether somebody else lives behind the claims that are found. Pure: times are given."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._seen: Claim | None = None
        self._since = self._looked = 0.0
        self.first_seen = 0.0
        """When the claim that is there was first found to be another's [s]."""

    def judge(self, found: Claim | None, now: float) -> Verdict:
        """What the place is: ``mine`` to claim, ``led`` by a living leader, or still ``open``.

        Args:
            found: what is there; None: nothing.
            now: of a clock that goes on while the machine sleeps [s].
        """
        stood_still = now - self._looked > _STOOD_STILL_S
        before, self._seen, self._looked = self._seen, found, now
        if found is None or found.leader == self._own or found.is_of_a_dead_process:
            return "mine"
        if before is None or before.leader != found.leader or stood_still:
            self._since = self.first_seen = now
            return "open"
        if found != before:
            self._since = now
            return "led"
        return "mine" if now - self._since >= PATIENCE_S else "open"


class ClaimKeeper:
    """Keeps a claim renewed, and looks out for others, in a thread: storage may be slow.

    What goes wrong with the file is no reason to say anything: checkpoints go the same way.

    Args:
        place: folder or URL of the run's checkpoints.
        claim: of this process.
        on_settled: told once that the place is claimed, or cannot be asked.
        on_rival: told of each sign of life of another leader, and since when its claim was there
            [s, monotonic]; until :meth:`insist` the place is left to it.
    """

    def __init__(
        self,
        place: Path | CheckpointUrl,
        claim: Claim,
        on_settled: Callable[[], None],
        on_rival: Callable[[Claim, float], None],
    ) -> None:
        self.claim = claim
        self._place = _Folder(place) if isinstance(place, Path) else place
        self._on_settled = on_settled
        self._on_rival = on_rival
        self._settled = False
        self._insisted = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="claim", daemon=True)
        self._thread.start()

    def insist(self) -> None:
        """Replace the other leader's claim, for it to see."""
        self._insisted.set()

    def end(self) -> None:
        """Take the claim back, if the storage lets that be done soon."""
        self._over.set()
        self._thread.join(_END_S)

    def _live(self) -> None:
        watch = ClaimWatch(self.claim.leader)
        while not self._over.is_set():
            verdict: Verdict = "mine"
            with contextlib.suppress(OSError, HvdElasticError):
                found = _read(self._place)
                verdict = watch.judge(found, _now())
                if self._insisted.is_set() or verdict == "mine":
                    self._insisted.clear()
                    self._renew()
                elif found is not None and verdict == "led":
                    seen_s = _now() - watch.first_seen
                    self._on_rival(found, time.monotonic() - seen_s)
            if verdict == "mine" and not self._settled:
                self._settled = True
                self._on_settled()
            self._over.wait(_RENEW_S if verdict == "mine" else _LOOK_S)
        with contextlib.suppress(OSError, HvdElasticError):
            found = _read(self._place)
            if found is not None and found.leader == self.claim.leader:
                self._place.remove_file(_NAME)

    def _renew(self) -> None:
        self.claim = replace(self.claim, count=self.claim.count + 1)
        self._place.write_file(_NAME, json.dumps(asdict(self.claim)).encode())


def find_claimant(place: Path | CheckpointUrl) -> Claim | None:
    """The living leader that keeps checkpoints there; waits while that is not known."""
    watch = ClaimWatch(secrets.token_hex(8))
    folder = _Folder(place) if isinstance(place, Path) else place
    with contextlib.suppress(OSError, HvdElasticError):
        while (verdict := watch.judge(found := _read(folder), _now())) == "open":
            time.sleep(_LOOK_S)
        return found if verdict == "led" else None
    return None


class _Folder:
    """As a :class:`CheckpointUrl`, for the claim."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_file(self, name: str) -> bytes:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return b""

    def write_file(self, name: str, data: bytes) -> None:
        with temporary_in(self._path) as temporary:
            temporary.write_bytes(data)
            temporary.replace(self._path / name)

    def remove_file(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


def _read(place: _Folder | CheckpointUrl) -> Claim | None:
    """The claim there; None: there is no such file."""
    text = place.read_file(_NAME)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Claim)
    except ValueError:
        return _UNREADABLE


_UNREADABLE = Claim("", "", "", 0.0, "", 0)
"""Half of one, of a storage that does not replace files as a whole, or no claim at all."""


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
