"""The hosts of a run that dial in, as an engine for the leader."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.dialled import DialIn, DialledConnection, DialledHost
from hvd_elastic.hosts.hostfile import Host, write_hostfile
from hvd_elastic.hosts.transfer import send_file

_LOOK_S = 0.5
"""Time between two looks at what is waited for, if no host has come or gone [s]."""
_PATIENCE_S = 30.0
"""How long hosts are waited for before that is said [s]."""
_START_S = 600.0
"""How long enough hosts are waited for [s]."""


class DialledHosts:
    """An engine whose hosts are those that have dialled in.

    Args:
        hostfile: path of the hostfile of the run, which is written when hosts come and go. It
            keeps its last hosts when all have gone, since a hostfile has at least one. None: the
            run needs none.
        address: address of this machine by which the hosts reach it.
        warn: called with the reason when a connection is refused.
        files: open files that each host gets into its folder before it is used, by name.

    Attributes:
        dial_in: where the hosts dial in; its ``invitation`` is for them.

    Raises:
        OSError: the address is not one of this machine.
    """

    def __init__(
        self,
        hostfile: Path | None,
        address: str,
        warn: Callable[[str], None],
        files: Mapping[str, BinaryIO] | None = None,
    ) -> None:
        self._hostfile = hostfile
        self._address = address
        self._files = dict(files or {})
        self._warn = warn
        self._changed = threading.Condition()
        self._provided: dict[str, threading.Lock] = {}
        self._ready: set[str] = set()
        self._released: set[str] = set()
        """Hosts that were told to end, by identity."""
        self._not_replaced = 0
        self.dial_in = DialIn(address, self._write, warn)

    @property
    def hosts(self) -> list[DialledHost]:
        """Return the hosts that are connected, without those that were told to end."""
        return [each for each in self.dial_in.hosts if each.identity not in self._released]

    @property
    def slots(self) -> int:
        """Return the number of slots of the hosts that are connected."""
        return sum(each.host.slots for each in self.hosts)

    def wait_for(self, slots: int, check: Callable[[], None], calm_s: float, least: int) -> None:
        """Wait until there are hosts with enough slots.

        Args:
            slots: number of slots to wait for.
            check: called now and then; raises an error if no more hosts are to come.
            calm_s: time without a new host after which ``least`` slots are enough [s].
            least: number of slots.

        Raises:
            RunError: they have not come in time.
        """
        began = came_at = time.monotonic()
        seen, is_told = 0, False
        with self._changed:
            while (now := self.slots) < slots:
                if now != seen:
                    came_at, seen = time.monotonic(), now
                if now >= least and time.monotonic() >= came_at + calm_s:
                    return
                check()
                waited_s = time.monotonic() - began
                there = f"{now} of {count(slots, 'process')} have a host"
                if waited_s > _START_S:
                    raise RunError(f"{there}, and no more have come in {_START_S:g} s")
                if waited_s > _PATIENCE_S and not is_told:
                    is_told = True
                    self._warn(f"{there} after {_PATIENCE_S:g} s; waiting for more")
                self._changed.wait(_LOOK_S)

    def release_host(self, name: str) -> None:
        """Tell a host that was drained to end, unless it is the last one: that may be given back.

        The leader ends its agent as on any host that is no longer in the hostfile.
        """
        others = [each for each in self.hosts if each.host.name != name]
        for dialled in self.hosts:
            if others and dialled.host.name == name:
                with self._changed:
                    self._released.add(dialled.identity)
                    self._not_replaced += 1
                self._write()
                with contextlib.suppress(OSError):  # it has gone by itself
                    dialled.send({"end": True})

    def take_released(self) -> bool:
        """Return whether a host that has ended was released, so that no other takes its place."""
        with self._changed:
            was_released = self._not_replaced > 0
            self._not_replaced -= was_released
            return was_released

    def connect(self, host: Host) -> Connection:
        """Return a connection to a host, which has its files then.

        Raises:
            SshError: the host is not connected, or a file cannot be sent.
        """
        connection = self.dial_in.connect(host)
        with self._provided.setdefault(connection.dialled.identity, threading.Lock()):
            if connection.dialled.identity not in self._ready:
                self._provide(connection)
                self._ready.add(connection.dialled.identity)
        return connection

    def _provide(self, connection: DialledConnection) -> None:
        for name, file in self._files.items():
            file.flush()
            # Opened anew, since each host reads it from the beginning.
            path = Path(f"/proc/self/fd/{file.fileno()}")
            send_file(connection, path, f"{connection.dialled.folder}/{name}")

    def address_towards(self, hosts: list[Host]) -> str:
        """Return the address of this machine."""
        return self._address

    def close(self) -> None:
        """Tell all hosts that there is nothing more to do."""
        self.dial_in.close()

    def _write(self) -> None:
        """Write the hostfile; called when a host has come or gone, by several threads."""
        with self._changed:
            hosts = [each.host for each in self.hosts]
            if hosts and self._hostfile is not None:
                write_hostfile(self._hostfile, hosts)
            self._changed.notify_all()
