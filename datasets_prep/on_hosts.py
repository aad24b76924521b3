"""Prepares shards on the hosts of a hostfile: each writes a part, and the hosts exchange the parts.

The exchange is that of ``copyclust --pull``, whose store is here the script itself: called on a
host with a list of shards, it writes them. So hosts that fail are made up for by others, and a
second call goes on where the first one stopped.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvd_elastic.errors import DataError

ON_HOST = "--on-host"
"""Hidden option, whose values are those of :class:`OnHost`."""
BEGIN = "begin"
"""In place of a file with names: note what the data are made from, or refuse to."""


DISAGREES = 3
"""Exit status of a call on a host that has other data, or shards of them."""


class OtherDataError(DataError):
    """The data would be, or were, made from something else than those of the call."""

    exit_status = DISAGREES


class OnHost(NamedTuple):
    """What a call does as one of several hosts.

    Attributes:
        folder: of the shards.
        digest: of what the data are made from, where the hosts were called.
        names: file with the names of the shards to write; empty: index those that are there; or
            :data:`BEGIN`.
        out: folder to write them to.
    """

    folder: str
    digest: str
    names: str = ""
    out: str = ""


def prepare_on_hosts(
    hostfile: Path, folder: Path, names: Sequence[str], digest: str
) -> dict[str, Any]:
    """Have the hosts write shards to a folder, which all of them have afterwards.

    Args:
        hostfile: names the hosts, which have this script, its Python and the source at the same
            paths as this machine.
        folder: on every host.
        names: of all shards.
        digest: of what the data are made from; hosts where it is another one refuse.

    Returns:
        What the script on a host returned.

    Raises:
        HvdElasticError: names the hosts that failed, and why.
    """
    from hvd_elastic.hosts.hostfile import parse_hostfile
    from hvd_elastic.hosts.ssh import SshOptions
    from hvd_elastic.hosts.ssh_config import config_beside
    from hvd_elastic.tools.copy.copying import Pulled, copy_to_hosts
    from hvd_elastic.tools.run.commands import run_on_hosts

    hosts = parse_hostfile(hostfile).hosts
    options = SshOptions(config_beside(hostfile))
    place = str(folder.absolute())
    pulled = Pulled(
        _command(place, digest, "{list}", "{dst}"), tuple((name, None) for name in names)
    )
    failed, refused = {}, False
    # Before a host gets shards of others, all have agreed on what these are made from.
    for ended in run_on_hosts(hosts, _command(place, digest, BEGIN), options):
        if not ended.ok:
            failed[ended.host.name] = _why(ended)
            refused = refused or (ended.value is not None and ended.value.exit_status == DISAGREES)
    there = [host for host in hosts if host.name not in failed]
    if refused or not there:
        raise DataError("; ".join(f"{host}: {why}" for host, why in failed.items()))
    for copied in copy_to_hosts(there, pulled, place, options):
        host = copied.host.name
        if copied.ok:
            said = f"{copied.answer.fetched} shards written, {copied.answer.files} received"
            print(f"{host}: {folder.name}: {said}", file=sys.stderr, flush=True)
        else:
            failed[host] = copied.error
    found: dict[str, Any] = {}
    there = [host for host in hosts if host.name not in failed]
    for ended in run_on_hosts(there, _command(place, digest), options):
        if ended.ok:
            entries = json.loads(ended.answer.stdout)
            found = next(entry for entry in entries if entry)
        else:
            failed[ended.host.name] = _why(ended)
    if failed:
        raise DataError(
            "; ".join(f"{host}: {why}" for host, why in failed.items())
            + "; the same call goes on where this one stopped"
        )
    return found


def _why(ended: Any) -> str:
    """Return what a command that failed on a host printed last, or why there is nothing."""
    said: str = ended.value.stderr.decode(errors="replace").strip() if ended.value else ""
    return said.rpartition("\n")[2] or str(ended.error)


def _command(*values: str) -> str:
    """Return the command of this process with values for a host in place of the hostfile."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == "--hostfile":
            next(words)
        elif not word.startswith("--hostfile="):
            kept.append(word)
    own = shlex.join([sys.executable, str(Path(sys.argv[0]).resolve()), *kept])
    # {list} and {dst} are quoted where they are filled in.
    given = " ".join(word if word[0] == "{" else shlex.quote(word) for word in values)
    return f"cd {shlex.quote(os.getcwd())} && exec {own} --json {ON_HOST} {given}"  # noqa: PTH109
