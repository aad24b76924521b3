"""Reads the hostfile of a run, again whenever it is saved."""

from __future__ import annotations

import contextlib
import errno
import math
import stat
import time
from collections.abc import Callable
from pathlib import Path

from hvd_elastic.control.events import HostSlots
from hvd_elastic.errors import HostfileError
from hvd_elastic.hosts.hostfile import Host, parse_hostfile, require_prices
from hvd_elastic.leader.spec import RunSpec

__all__ = ["HostfileWatch"]

_REPLACED_WITHIN_S = 2.0
"""An editor that replaces the file by renaming leaves none for a moment."""


class HostfileWatch:
    """Knows the hosts of a run; without a hostfile that is this machine.

    Args:
        spec: of the run.
        warn: told, once each, why a changed hostfile cannot be used.

    Attributes:
        hosts: by name, in order, as the hostfile was last read.
    """

    def __init__(self, spec: RunSpec, warn: Callable[[str], None]) -> None:
        self._spec = spec
        self._warn = warn
        self.hosts: dict[str, Host] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._told_error = ""
        self._gone_since: float | None = None

    @property
    def slots(self) -> tuple[HostSlots, ...]:
        """Return the slots of each host, in order."""
        return tuple(HostSlots(host.name, host.slots) for host in self.hosts.values())

    def read(self) -> None:
        """Read the hostfile.

        Raises:
            HostfileError: it cannot be used; the hosts stay.
        """
        path = self._spec.hostfile_path
        if path is None:
            hosts = [Host("localhost", slots=self._spec.slots)]
        else:
            with contextlib.suppress(OSError):  # parsing explains what is wrong with it
                self._stamp = _stamp(path)
            hostfile = parse_hostfile(path)
            hosts = list(hostfile.hosts)
            if self._spec.objective == "cost":
                require_prices(hostfile)
                hosts = self._cheapest_first(hosts)
        self.hosts = {host.name: host for host in hosts}

    def changed(self) -> bool:
        """Return whether the hostfile was saved since it was read, and read it.

        Also when its text is the same: whoever mended a host saves the file to have it tried again.
        """
        path = self._spec.hostfile_path
        if path is None:
            return False
        try:
            stamp = _stamp(path)
        except OSError as error:
            self._is_gone(path, error)
            return False
        self._gone_since = None
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.read()
        except HostfileError as error:
            if str(error) != self._told_error:
                self._warn(f"the hostfile was changed and cannot be used, the hosts stay: {error}")
            self._told_error = str(error)
            return False
        self._told_error = ""
        return True

    def _is_gone(self, path: Path, error: OSError) -> None:
        now = time.monotonic()
        if self._gone_since is None:
            self._gone_since = now
        elif now >= self._gone_since + _REPLACED_WITHIN_S:
            self._gone_since = math.inf
            gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
            what = "is gone" if gone else f"cannot be looked at ({error.strerror})"
            self._warn(f"the hostfile {path} {what}, the hosts stay; put it back to change them")

    def _cheapest_first(self, hosts: list[Host]) -> list[Host]:
        """Order hosts by price: before a step is timed, only the order keeps to a budget."""
        from hvd_elastic.policy.prices import cheapest_hosts

        spec = self._spec
        pinned = [host for host in hosts if host.name in spec.pin_hosts]
        others = [host for host in hosts if host.name not in spec.pin_hosts]
        missing = max(spec.np or 0, spec.min_np) - sum(host.slots for host in pinned)
        first = cheapest_hosts(others, max(0, missing)) or ()
        return [*pinned, *first, *(host for host in others if host not in first)]


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for who writes it
        raise OSError(errno.EINVAL, "not a regular file")
    return found.st_mtime_ns, found.st_size, found.st_ino
