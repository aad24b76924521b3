"""Find hosts that are added to the hostfile while a command runs."""

from __future__ import annotations

from collections.abc import Callable

from hvd_elastic.cli.cluster.host_options import HostOptions
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.hosts.hostfile import Host, hostfile_stamp


class Newcomers:
    """A call returns the hosts that were added to the hostfile since the last call.

    Args:
        chosen: the shared options, with the hosts at the start.
        note: function that prints messages about new hosts and mistakes in the hostfile.

    Attributes:
        hosts: all hosts so far; this list grows in place.
    """

    def __init__(self, chosen: HostOptions, note: Callable[[str], None]) -> None:
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
            now = self._chosen.read_hosts()
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
        """Return the hostfile's stamp; None if it cannot be read again (a pipe)."""
        try:
            return hostfile_stamp(self._chosen.hostfile)
        except OSError:
            return None
