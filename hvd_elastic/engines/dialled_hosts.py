"""The hosts of a run that dial in, as an engine for the leader."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.dialled import DialIn, DialledHost
from hvd_elastic.hosts.hostfile import Host


class DialledHosts:
    """An engine whose hosts are those that have dialled in.

    Args:
        hostfile: path of the hostfile of the run, which is written when hosts come and go. It
            keeps its last hosts when all have gone, since a hostfile has at least one.
        address: address of this machine by which the hosts reach it.
        warn: called with the reason when a connection is refused.
        changed: called in another thread after hosts have come or gone.

    Attributes:
        dial_in: where the hosts dial in; its ``invitation`` is for them.

    Raises:
        OSError: the address is not one of this machine, or the hostfile cannot be written.
    """

    def __init__(
        self,
        hostfile: Path,
        address: str,
        warn: Callable[[str], None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._hostfile = hostfile
        self._address = address
        self._changed = changed
        self._writing = threading.Lock()
        self.dial_in = DialIn(address, self._write, warn)

    @property
    def hosts(self) -> list[DialledHost]:
        """Return the hosts that are connected."""
        return self.dial_in.hosts

    def connect(self, host: Host) -> Connection:
        """Return a connection to a host; see :class:`hvd_elastic.hosts.engine.Engine`."""
        return self.dial_in.connect(host)

    def address_towards(self, hosts: list[Host]) -> str:
        """Return the address of this machine."""
        return self._address

    def close(self) -> None:
        """Tell all hosts that there is nothing more to do."""
        self.dial_in.close()

    def _write(self) -> None:
        """Write the hostfile; called when a host has come or gone, by several threads."""
        with self._writing:
            lines = [f"{each.host.name} slots={each.host.slots}\n" for each in self.hosts]
            if lines:
                partial = self._hostfile.with_suffix(".part")
                partial.write_text("".join(lines), encoding="utf-8")
                partial.replace(self._hostfile)
        self._changed()
