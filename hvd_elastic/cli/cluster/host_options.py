"""Define the options that all cluster tools share: hostfile, selection of hosts, connection."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_elastic.cli.numbers import number_option, whole_number_option
from hvd_elastic.cli.shared_options import hostfile_of
from hvd_elastic.cluster.run.commands import select_hosts
from hvd_elastic.errors import UsageError
from hvd_elastic.hosts.fanout import DEFAULT_FANOUT
from hvd_elastic.hosts.hostfile import Host, parse_hostfile, parse_hosts
from hvd_elastic.hosts.ssh import SshOptions
from hvd_elastic.hosts.ssh_config import config_beside

_HOSTFILE = Annotated[
    Path,
    typer.Argument(
        metavar="HOSTFILE",
        parser=hostfile_of,
        help="One host a line: 'gpu1 slots=8', 'gpu[01-16]'; or a list: gpu1:8,gpu2:8.",
    ),
]
_MAYBE_HOSTFILE = Annotated[
    Path | None,
    typer.Argument(metavar="HOSTFILE", help="One host a line; without it this machine."),
]
_FANOUT = Annotated[int, whole_number_option("--fanout", "-f", help="Hosts at a time.")]
_HOSTS = Annotated[
    str | None, typer.Option("--hosts", metavar="LIST", help="Only these, as in gpu[01-04],login.")
]
_EXCLUDE_HOSTS = Annotated[
    str | None,
    typer.Option("--exclude-hosts", "-x", metavar="LIST", help="All hosts but these, as --hosts."),
]
_DRY_RUN = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done, change nothing.")
]
_JSON = Annotated[bool, typer.Option("--json", help="One JSON object a line, as hosts end.")]
_SSH_CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--ssh-config",
        "-F",
        envvar="HVD_ELASTIC_SSH_CONFIG",
        metavar="FILE",
        help="Read this ssh configuration instead of ~/.ssh/config.",
    ),
]
_IDENTITY = Annotated[
    Path | None,
    typer.Option("--identity", "-i", metavar="FILE", help="A private key to try first."),
]
_CONNECT_TIMEOUT = Annotated[
    float, number_option("--connect-timeout", least=0.1, metavar="SECONDS", help="For each host.")
]
_VERBOSE = Annotated[bool, typer.Option("--verbose", "-v", help="Say more of what goes on.")]


@dataclass(frozen=True)
class Chosen:
    """The shared options, evaluated.

    Attributes:
        hostfile: path of the hostfile.
        choose: function that reads the hostfile again and returns the selected hosts.
        hosts: selected hosts, in the order of the hostfile.
        ssh: options of the connections.
        fanout: number of hosts to work on at the same time.
        dry_run: whether to show only what would be done.
        as_json: whether to print JSON lines instead of text.
        verbose: whether to print more.
    """

    hostfile: Path
    choose: Callable[[], Sequence[Host]]
    hosts: Sequence[Host]
    ssh: SshOptions
    fanout: int
    dry_run: bool
    as_json: bool
    verbose: bool


def over_hosts(
    without: Sequence[str] = (), *, may_be_here: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the shared options to a command.

    The command gets them as a :class:`Chosen`, its first argument.

    Args:
        without: names of shared options that this command does not have.
        may_be_here: whether the hostfile may be left out, for this machine.
    """
    shared: dict[str, tuple[Any, Any]] = {
        "fanout": (_FANOUT, DEFAULT_FANOUT),
        "hosts": (_HOSTS, None),
        "exclude_hosts": (_EXCLUDE_HOSTS, None),
        "dry_run": (_DRY_RUN, False),
        "as_json": (_JSON, False),
        "ssh_config": (_SSH_CONFIG, None),
        "identity": (_IDENTITY, None),
        "connect_timeout": (_CONNECT_TIMEOUT, 5.0),
        "verbose": (_VERBOSE, False),
    }

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(hostfile: Path | None, **given: Any) -> None:
            settings = {name: given.pop(name, default) for name, (_, default) in shared.items()}
            function(_choose(hostfile, settings), **given)

        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter("hostfile", keyword, annotation=_MAYBE_HOSTFILE, default=None)
            if may_be_here
            else inspect.Parameter("hostfile", keyword, annotation=_HOSTFILE),
            *(parameter.replace(kind=keyword) for parameter in own),
            *(
                inspect.Parameter(name, keyword, annotation=annotation, default=default)
                for name, (annotation, default) in shared.items()
                if name not in without
            ),
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _choose(hostfile: Path | None, given: Mapping[str, Any]) -> Chosen:
    """What the shared options, by name, come to; without a hostfile on this machine."""
    if given["verbose"]:
        logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s: %(message)s")
        # At level DEBUG paramiko logs every packet, and invoke all settings of a connection.
        for name in ("paramiko", "invoke"):
            logging.getLogger(name).setLevel(logging.INFO)

    def choose() -> Sequence[Host]:
        found = parse_hosts("localhost", "here") if hostfile is None else parse_hostfile(hostfile)
        return select_hosts(found, given["hosts"], given["exclude_hosts"])

    hosts, identity = choose(), given["identity"]
    if identity is not None and not identity.expanduser().is_file():
        raise UsageError(f"--identity {identity}: no such file; name a private key")
    hostfile = hostfile or Path("localhost")
    config = given["ssh_config"] or config_beside(hostfile)
    ssh = SshOptions(config, given["connect_timeout"], identity=identity)
    flags = {name: given[name] for name in ("fanout", "dry_run", "as_json", "verbose")}
    return Chosen(hostfile, choose, hosts, ssh, **flags)
