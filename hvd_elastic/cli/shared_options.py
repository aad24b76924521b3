"""Options that several commands share, word for word."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_elastic.config import home
from hvd_elastic.errors import RunError

_LIST = re.compile(r"[^/\s]+:\d+(,[^/\s]+)*|[^/\s]+,[^/\s]+")
"""Hosts as horovodrun's -H takes them, such as ``gpu1:8,gpu2:8``."""
_LONGEST_NAME = 200


def hostfile_of(value: object) -> Path:
    """Return the path of a hostfile: the one given, or one written for a list of hosts.

    Raises:
        HostfileError: a host of the list cannot be parsed.
        RunError: the file cannot be written.
    """
    text = str(value)
    if not _LIST.fullmatch(text) or Path(text).exists():
        return Path(text)
    from hvd_elastic.hosts.hostfile import format_hostfile, parse_hosts, write_hostfile

    # Commas inside brackets belong to a range.
    lines = re.sub(r",(?![^\[\]]*\])", "\n", text)
    hosts = parse_hosts(lines, f"the list of hosts '{text}'").hosts
    name = text if len(text) <= _LONGEST_NAME else hashlib.sha1(text.encode()).hexdigest()
    path = home().absolute() / "hostfiles" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != format_hostfile(hosts):
            write_hostfile(path, hosts)
    except OSError as error:
        raise RunError(f"cannot write the hosts to {path}: {error.strerror}") from error
    return path


def hostfile_option(*more_names: str, help: str) -> Any:  # noqa: A002
    """Return a typer option for a hostfile, or a list of hosts."""
    names = ("--hostfile", "-H", *more_names)
    return typer.Option(
        *names, parser=hostfile_of, metavar="FILE", help=f"{help}; or a list: gpu1:8,gpu2:8"
    )


SshConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--ssh-config",
        "-F",
        envvar="HVD_ELASTIC_SSH_CONFIG",
        help="ssh configuration (default: ~/.ssh/config)",
    ),
]

OptionalRun = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="Run id, or number or name of its job; the newest run if left out."
    ),
]
RequiredRun = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Run id, or number or name of its job; see: hvd-elastic list, queue"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
EventsAsJson = Annotated[
    bool, typer.Option("--json", help="Print every event as a JSON line instead of text.")
]
