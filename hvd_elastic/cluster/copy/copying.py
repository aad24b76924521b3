"""A file or folder to many hosts, verified (``copyclust``).

The data go from host to host: the leader sends them once, and each host passes on what it receives
while it writes it (``session``). A host asks whoever feeds it for exactly what it lacks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from hvd_elastic.cluster.copy.job import Copied, CopyJob, CopyProgress, CopySettings, Pulled
from hvd_elastic.cluster.copy.node.tree import decode
from hvd_elastic.cluster.copy.pull import PullSession
from hvd_elastic.cluster.copy.session import CopySession
from hvd_elastic.errors import UsageError
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.fanout import HostResult
from hvd_elastic.hosts.hostfile import Host

__all__ = [
    "Copied",
    "CopyProgress",
    "CopySettings",
    "Pulled",
    "check_destination",
    "check_source",
    "copy_to_hosts",
]


def check_source(path: Path) -> None:
    """Nothing if there is a file or folder of this machine that can be read.

    Raises:
        UsageError: there is none.
    """
    try:
        if path.is_dir():
            next(path.iterdir(), None)
        elif path.is_file():
            path.open("rb").close()
        else:
            kind = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise UsageError(f"source {path} {kind}. Name a file or folder of this machine")
    except OSError as error:
        raise UsageError(f"source {error.filename or path}: {error.strerror}") from error


def check_destination(source: Path, destination: str) -> str:
    """The full path of the copy: as given, or inside it when it ends with a slash.

    Raises:
        UsageError: it is not absolute (or under ``~/``), or not a place to copy to.

    >>> check_destination(Path("/home/a/set.npz"), "/data/")
    '/data/set.npz'
    """
    parts = PurePosixPath(destination).parts
    if not destination.startswith(("/", "~/")) or ".." in parts or "\0" in destination:
        raise UsageError(
            f"destination '{destination}': give an absolute path, or one under ~/, without '..'; "
            "it is a place on every host"
        )
    full = PurePosixPath(destination)
    if destination.endswith("/"):
        full /= source.resolve().name
    if len(full.parts) < 2:
        raise UsageError(f"destination '{destination}': the root folder itself is no destination")
    return str(full)


def copy_to_hosts(
    hosts: Sequence[Host],
    source: str | Path | Pulled,
    destination: str,
    options: SshOptions,
    settings: CopySettings | None = None,
    source_host: Host | None = None,
    on_progress: Callable[[CopyProgress], None] | None = None,
    on_skipped: Callable[[str], None] | None = None,
    newcomers: Callable[[], Sequence[Host]] | None = None,
) -> Iterator[HostResult[Copied]]:
    """Copies a file or folder to the same place on every host.

    Args:
        hosts: where to.
        source: on this machine, or on ``source_host``; or what is fetched from a shared store.
        destination: as :func:`check_destination` gives it.
        options: how to connect.
        settings: how it is made; ``checksum`` and ``shard`` mean nothing for a shared store.
        source_host: another host that has the data.
        on_progress: told how far it is, a few times a second.
        on_skipped: told, at the end, what is neither file, folder nor link.
        newcomers: asked a few times a second for hosts that shall have it too; not in a dry run,
            nor where each host has its share.

    Yields:
        One result a host as it ends, newcomers included. A host that failed keeps what is complete
        there, and a second call goes on from that. Who stops iterating ends the copy, and commands
        that fetch, on all hosts.

    Raises:
        UsageError: the source is not there, or cannot be read.
        SshError: ``source_host`` cannot be used.
    """
    place = source if isinstance(source, Pulled) else decode(os.fsencode(source))
    settings = settings or CopySettings()
    job = CopyJob(hosts, place, destination, options, settings, source_host, on_progress, newcomers)
    session = PullSession(job, source) if isinstance(source, Pulled) else CopySession(job)
    with session:
        yield from session.run()
        for path in session.skipped:
            if on_skipped is not None:
                on_skipped(path)
