"""Interface of what owns the machines of a run, where that is not a hostfile and ssh."""

from __future__ import annotations

from typing import Protocol

from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.hostfile import Host


class Engine(Protocol):
    """A source of hosts, and a way to reach them.

    The engine writes the hosts that it has to the hostfile of the run, and writes it again when
    hosts come and go (a new file that replaces the old one); the leader reads it as any other.
    """

    def connect(self, host: Host) -> Connection:
        """Return a connection to a host that the engine has written; may block.

        Raises:
            SshError: the host cannot be reached; its message says why.
        """

    def address_towards(self, hosts: list[Host]) -> str:
        """Return the address by which ``hosts`` reach the machine of the leader."""
