"""Hosts that somebody adds to the hostfile while a command is at work."""

from __future__ import annotations

from collections.abc import Callable

from hvd_elastic.cli.host_options import Chosen
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.hosts.hostfile import Host


class Newcomers:
    """Gives, when it is called, the hosts that the hostfile has had since the last call.

    Args:
        chosen: the hosts at the beginning, and how they are chosen.
        note: told who joins, and what is wrong with a hostfile.

    Attributes:
        hosts: all hosts so far; it grows.
    """

    def __init__(self, chosen: Chosen, note: Callable[[str], None]) -> None:
        self.hosts = list(chosen.hosts)
        self._chosen = chosen
        self._note = note
        self._seen = self._look()

    def __call__(self) -> list[Host]:
        seen = self._look()
        if seen is None or seen == self._seen:
            return []
        self._seen = seen
        try:
            now = self._chosen.choose()
        except HvdElasticError as error:
            self._note(f"{error}; until that is right no host joins")
            return []
        known = {host.name for host in self.hosts}
        new = [host for host in now if host.name not in known]
        self.hosts += new
        for host in new:
            self._note(f"host {host.name} joins: it is in {self._chosen.hostfile} now")
        return new

    def _look(self) -> tuple[int, int, int] | None:
        """What changes when the file does; None where there is none to read again (a pipe)."""
        try:
            if not self._chosen.hostfile.is_file():
                return None
            status = self._chosen.hostfile.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
