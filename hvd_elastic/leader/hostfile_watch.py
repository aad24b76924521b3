"""Reads the hostfile of a run, and reads it again whenever it was saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hvd_elastic.errors import HostfileError
from hvd_elastic.formatting import count
from hvd_elastic.hosts.hostfile import (
    INPUT_LABEL,
    Host,
    Hostfile,
    parse_hostfile,
    require_prices,
)
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.policy.objective import cheapest_hosts
from hvd_elastic.replaced_files import SavedFile
from hvd_elastic.run_events import HostsChanged, HostSlots


def read_hosts(
    path: Path | None, slots: int = 1, exclude: str | None = None, *, may_be_empty: bool = False
) -> Hostfile:
    """Return the hosts that a hostfile has now, or this machine with ``slots`` if there is none.

    Args:
        exclude: list of hosts that are left out.

    Raises:
        HostfileError: the hostfile cannot be used.
    """
    if path is None:
        return Hostfile((Host("localhost", slots=slots),), "this machine")
    found = parse_hostfile(path, may_be_empty=may_be_empty)
    return found if exclude is None else found.without(exclude, may_be_empty=may_be_empty)


class HostfileWatch:
    """Holds the hosts of a hostfile, or this machine if there is none.

    Args:
        path: the hostfile; None: this machine alone.
        warn: called with the reason when a changed hostfile cannot be used, once for each reason.
        slots: slots of this machine.
        exclude: list of hosts that are left out, whenever they are in the hostfile.
        readers: hosts that read for the others, besides those that the hostfile labels.
        ordered: returns the hosts of a hostfile in the order in which they are used; by default
            that of the file.
        may_be_empty: whether there may be no host for a while, as when all spot machines are gone.

    Attributes:
        hosts: hosts that train by name, in the order of the hostfile as it was last read.
        input_hosts: hosts that read for them, by name.
    """

    def __init__(
        self,
        path: Path | None,
        warn: Callable[[str], None],
        *,
        slots: int = 1,
        exclude: str | None = None,
        readers: Sequence[str] = (),
        ordered: Callable[[Hostfile], list[Host]] = list,
        may_be_empty: bool = False,
    ) -> None:
        self._path = path
        self._warn = warn
        self._slots, self._exclude = slots, exclude
        self._readers = readers
        self._ordered = ordered
        self._may_be_empty = may_be_empty
        self.hosts: dict[str, Host] = {}
        self.input_hosts: dict[str, Host] = {}
        self._file: SavedFile | None = None
        self._told_error = ""

    @classmethod
    def of_run(cls, spec: RunSpec, warn: Callable[[str], None]) -> HostfileWatch:
        """Return the watch of a run's hostfile; with a budget its cheapest hosts come first."""
        minds_cost = spec.hostfile_path is not None and spec.objective.kind == "cost"
        return cls(
            spec.hostfile_path,
            warn,
            slots=spec.slots,
            exclude=spec.exclude,
            readers=spec.input_hosts,
            ordered=partial(_cheapest_first, spec) if minds_cost else list,
            may_be_empty=spec.engine is not None,
        )

    @property
    def slots(self) -> tuple[HostSlots, ...]:
        """Return the number of slots of each host, in the order of the hostfile."""
        return tuple(HostSlots(host.name, host.slots) for host in self.hosts.values())

    def event(self) -> HostsChanged:
        prices = {host.name: host.price for host in self.hosts.values() if host.price}
        return HostsChanged([*self.slots], prices)

    def read(self) -> None:
        """Read the hostfile into ``hosts``.

        Raises:
            HostfileError: the hostfile cannot be used; ``hosts`` is unchanged.
        """
        if self._path is not None:
            self._file = SavedFile(self._path)
        found = read_hosts(self._path, self._slots, self._exclude, may_be_empty=self._may_be_empty)
        hosts = self._ordered(found)
        reads = input_hosts(hosts, self._readers, str(self._path))
        self.input_hosts = {host.name: host for host in reads}
        self.hosts = {host.name: host for host in hosts if host.name not in self.input_hosts}

    def changed(self, now: float) -> bool:
        """Read the hostfile if it was saved since it was last read; return whether that succeeded.

        A file that was saved with the same text counts too: after repairing a host, the user saves
        the file to have the host tried again.

        Args:
            now: present time [monotonic s].
        """
        if self._file is None or not self._file.saved(now) or not self._file.mark_read():
            return False
        if (error := self._file.error) is not None:
            gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
            what = "is gone" if gone else f"cannot be looked at ({error.strerror})"
            self._warn(
                f"the hostfile {self._path} {what}, the hosts stay; put it back to change them"
            )
            return False
        try:
            self.read()
        except HostfileError as error:
            if str(error) != self._told_error:
                self._warn(f"the hostfile was changed and cannot be used, the hosts stay: {error}")
            self._told_error = str(error)
            return False
        self._told_error = ""
        return True


def _cheapest_first(spec: RunSpec, hostfile: Hostfile) -> list[Host]:
    """Return the hosts ordered by price: pinned ones, then the cheapest set, then the rest.

    Until the first steps have been timed, the order alone keeps the run within its budget.
    """
    require_prices(hostfile)
    pinned = [host for host in hostfile if host.name in spec.pin_hosts]
    others = [host for host in hostfile if host.name not in spec.pin_hosts]
    missing = max(spec.np or 0, spec.min_np) - sum(host.slots for host in pinned)
    first = cheapest_hosts(others, max(0, missing)) or ()
    return [*pinned, *first, *(host for host in others if host not in first)]


def input_hosts(hosts: Sequence[Host], named: Sequence[str], hostfile: str) -> list[Host]:
    """Return the hosts that read for the ranks: those with ``labels=input``, and those named.

    Args:
        named: names of ``--input-hosts``; those that are not in the hostfile are added.
        hostfile: its name, for messages.

    Raises:
        HostfileError: an input host has slots, so that it would train as well.
    """
    known = {host.name.lower(): host for host in hosts}
    wanted = {host.name: host for host in hosts if INPUT_LABEL in host.labels or not host.slots}
    for name in named:
        host = known.get(name.lower()) or Host(name, slots=0, labels=(INPUT_LABEL,))
        wanted[host.name] = host
    for host in wanted.values():
        if host.slots:
            raise HostfileError(
                f"host {host.name} has {count(host.slots, 'slot')} in {hostfile}, so it trains, "
                "and is to read for the other hosts as well. Write slots=0 in its line, or leave "
                "it out of --input-hosts: the cores of a host that trains read in any case "
                "(num_workers)"
            )
    return [*wanted.values()]
