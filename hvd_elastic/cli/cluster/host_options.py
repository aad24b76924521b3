"""The options that all cluster tools share: hostfile, selection of hosts, connection."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from hvd_elastic.cli.options import (
    SshConfigOption,
    hostfile_of,
    number_option,
    option,
    whole_number_option,
)
from hvd_elastic.errors import UsageError
from hvd_elastic.hosts.fanout import DEFAULT_FANOUT
from hvd_elastic.hosts.hostfile import Host, parse_hostfile, parse_hosts
from hvd_elastic.hosts.ssh import SshOptions
from hvd_elastic.hosts.ssh_config import config_beside
from hvd_elastic.tools.run.commands import select_hosts


@dataclass
class HostOptions:
    """The options, and what they come to.

    Attributes:
        fanout: number of hosts to work on at the same time.
        as_json: whether to print JSON lines instead of text.
        hosts: selected hosts, in the order of the hostfile.
    """

    hostfile: Annotated[
        Path,
        typer.Argument(
            metavar="HOSTFILE",
            parser=hostfile_of,
            help="one host a line: 'gpu1 slots=8', 'gpu[01-16]'; or a list: gpu1:8,gpu2:8",
        ),
    ]
    fanout: Annotated[
        int, whole_number_option("number of hosts to work on at a time", "--fanout", "-f")
    ] = DEFAULT_FANOUT
    only_hosts: Annotated[
        str | None,
        option("use these hosts only: gpu[01-04],login, @LABEL", "--hosts", metavar="LIST"),
    ] = None
    exclude_hosts: Annotated[
        str | None,
        option(
            "leave these hosts out, written as for --hosts", "--exclude-hosts", "-x", metavar="LIST"
        ),
    ] = None
    dry_run: Annotated[bool, option("show what would be done, change nothing", "--dry-run")] = False
    as_json: Annotated[bool, option("print one JSON object a line, as hosts finish", "--json")] = (
        False
    )
    ssh_config: SshConfigOption = None
    identity: Annotated[
        Path | None, option("private key to try first", "--identity", "-i", metavar="FILE")
    ] = None
    connect_timeout: Annotated[
        float,
        number_option(
            "time limit to connect to a host", "--connect-timeout", least=0.1, metavar="SECONDS"
        ),
    ] = SshOptions.connect_timeout_s
    verbose: Annotated[bool, option("print debug messages", "--verbose", "-v")] = False
    hosts: Sequence[Host] = field(init=False)
    ssh: SshOptions = field(init=False)

    def __post_init__(self) -> None:
        if self.verbose:
            logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s: %(message)s")
            # At level DEBUG paramiko logs every packet, and invoke all settings of a connection.
            for name in ("paramiko", "invoke"):
                logging.getLogger(name).setLevel(logging.INFO)
        self.hosts = self.read_hosts()
        identity = self.identity and self.identity.expanduser()
        if identity is not None and not identity.is_file():
            raise UsageError(f"--identity {self.identity}: no such file; name a private key")
        config = self.ssh_config or config_beside(self.hostfile)
        self.ssh = SshOptions(config, self.connect_timeout, identity=identity)

    def read_hosts(self) -> Sequence[Host]:
        """Read the hostfile, and return the selected hosts."""
        return select_hosts(parse_hostfile(self.hostfile), self.only_hosts, self.exclude_hosts)

    def over(self, hosts: Sequence[Host]) -> HostOptions:
        """Return the same options for other hosts."""
        other = copy.copy(self)
        other.hosts = hosts
        return other


@dataclass
class HereOptions(HostOptions):
    """The same options, where the hostfile may be left out for this machine."""

    hostfile: Annotated[
        Path,
        typer.Argument(
            metavar="HOSTFILE", help="one host a line; without it this machine", show_default=False
        ),
    ] = Path("localhost")

    def read_hosts(self) -> Sequence[Host]:
        if self.hostfile != Path("localhost"):
            return super().read_hosts()
        return select_hosts(parse_hosts("localhost", "here"), self.only_hosts, self.exclude_hosts)
