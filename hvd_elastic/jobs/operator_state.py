"""What operators have set on a cluster: hosts that are drained, and whether it is paused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import date_words
from hvd_elastic.replaced_files import write_whole
from hvd_elastic.run_events import Fault

HEALTH = "health"
"""Who has drained a host whose hardware has faults."""


@dataclass(frozen=True)
class Drained:
    """A host that jobs are not to use.

    Attributes:
        reason: why, in the words of who asked for it.
        by: who asked for it.
        at: from when on [Unix s].
        faults: how often each fault of its hardware was seen, if they are the reason.
        planned: what an operator had planned for later when its hardware failed; None: nothing.
    """

    reason: str
    by: str
    at: float
    faults: dict[str, int] = field(default_factory=dict)
    planned: Drained | None = None

    def words(self, now: float) -> str:
        """Return whether it is drained or will be, why, by whom, and since or from when on."""
        is_now = self.at <= now
        begins, when = ("drained", "since") if is_now else ("will be drained", "from")
        then = "" if self.planned is None else f"; {self.planned.words(now)}"
        return f"{begins}: {self.reason} ({self.by}, {when} {date_words(self.at)}){then}"


@dataclass(frozen=True)
class _Accepted:
    """Faults of a host that its operator knew of when it was given back.

    Attributes:
        at: when, or when one of them was gone [Unix s].
        numbers: how often each was seen.
    """

    at: float
    numbers: dict[str, int]


@dataclass(frozen=True)
class _Set:
    drained: dict[str, Drained] = field(default_factory=dict)
    paused_by: str = ""
    accepted: dict[str, _Accepted] = field(default_factory=dict)


class OperatorState:
    """What operators have set, kept in a file, so that it outlives the daemon.

    Args:
        path: the file; there need be none.

    Raises:
        RunError: there is one, and it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._set = _Set()
        self.closed: set[str] = set()
        """Hosts that jobs are not to use, as of the last :meth:`changed`."""
        if path.exists():
            try:
                self._set = msgspec.json.decode(path.read_bytes(), type=_Set)
            except (OSError, msgspec.MsgspecError) as error:
                raise RunError(
                    f"{path}, which says what is drained, cannot be read: {error}. Mend it, or "
                    "remove it and drain the hosts again"
                ) from error

    @property
    def drained(self) -> dict[str, Drained]:
        """Hosts that are drained or will be, by name."""
        return self._set.drained

    @property
    def paused_by(self) -> str:
        """Who has paused the cluster, so that no job is started; empty: nobody."""
        return self._set.paused_by

    def changed(self, now: float) -> bool:
        """Bring :attr:`closed` up to date; return whether it was not."""
        before = self.closed
        self.closed = {host for host, drained in self.drained.items() if drained.at <= now}
        return self.closed != before

    def drain(self, host: str, drained: Drained, now: float) -> None:
        """Drain a host, now or later; what an operator has planned outlives a drain for faults.

        Raises:
            RunError: it cannot be kept, or the host is drained already and would not be meanwhile.
        """
        if (before := self.drained.get(host)) is not None:
            if before.at <= now < drained.at:
                raise RunError(
                    f"host {host} is {before.words(now)}. Give it back first: hvd-elastic undrain "
                    f"{host}"
                )
            if drained.by == HEALTH and before.at > now:
                drained = replace(drained, planned=before)
            drained = replace(drained, faults=before.faults | drained.faults)
        self._keep(replace(self._set, drained={**self.drained, host: drained}))

    def undrain(self, host: str, faults: Iterable[Fault] = (), now: float = 0.0) -> Drained | None:
        """Give a host back, until a drain that was planned for later, which is returned.

        Args:
            faults: those of its hardware, which are no reason to drain it again; those for which
                it was drained are known.
            now: time [Unix s].

        Raises:
            RunError: it cannot be kept, or the host is not drained.
        """
        if host not in self.drained:
            which = ", ".join(self.drained) or "none is"
            raise RunError(f"host {host} is not drained; drained: {which}")
        rest = {name: each for name, each in self.drained.items() if name != host}
        planned = self.drained[host].planned
        if planned is not None and planned.at > now:
            rest[host] = planned
        else:
            planned = None
        numbers = self.drained[host].faults | {fault.what: fault.number for fault in faults}
        known = _Accepted(now, numbers)
        self._keep(replace(self._set, drained=rest, accepted={**self._set.accepted, host: known}))
        return planned

    def new_faults(self, host: str, faults: Sequence[Fault], at: float) -> list[Fault]:
        """Return the faults of a host that its operator did not know of when giving it back.

        Args:
            at: when they were seen [Unix s].

        Raises:
            RunError: it cannot be kept that some are gone.
        """
        accepted = self._set.accepted
        if (known := accepted.get(host)) is None:
            return [*faults]
        if at < known.at:
            return []
        seen = {fault.what for fault in faults}
        left = {what: number for what, number in known.numbers.items() if what in seen}
        if left != known.numbers:
            self._keep(replace(self._set, accepted={**accepted, host: _Accepted(at, left)}))
        return [fault for fault in faults if fault.number > left.get(fault.what, 0)]

    def pause(self, by: str) -> None:
        """Start no job any more; empty: start them again. Raises RunError if it cannot be kept."""
        self._keep(replace(self._set, paused_by=by))

    def _keep(self, wanted: _Set) -> None:
        try:
            write_whole(self._path, msgspec.json.encode(wanted), mode=0o600, synced=True)
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error.strerror}") from error
        self._set = wanted
