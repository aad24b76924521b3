"""Copy a file or folder to many hosts and verify it (``copyclust``).

The leader sends the data once. Each host writes what it receives and at the same time passes it on
to the next host (see ``session``). A host requests from its feeder only the data that it lacks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from hvd_elastic.errors import UsageError
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.fanout import HostResult
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.programs.copy.tree import decode
from hvd_elastic.tools.copy.job import Copied, CopyJob, CopyProgress, CopySettings, Pulled
from hvd_elastic.tools.copy.pulling_session import PullSession
from hvd_elastic.tools.copy.session import CopySession

__all__ = [
    "Copied",
    "CopyProgress",
    "CopySettings",
    "Pulled",
    "check_destination",
    "check_source",
    "copy_to_hosts",
]


def check_source(source: str | Path) -> None:
    """Check that a path is a readable file or folder of this machine.

    Raises:
        UsageError: it is not.
    """
    path = Path(source)
    try:
        if path.is_dir():
            next(path.iterdir(), None)
        elif path.is_file():
            if str(source).endswith("/"):
                raise UsageError(f"source {source} is a file; leave out the slash at its end")
            path.open("rb").close()
        else:
            kind = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise UsageError(f"source {path} {kind}. Name a file or folder of this machine")
    except OSError as error:
        raise UsageError(f"source {error.filename or path}: {error.strerror}") from error


def check_destination(source: str | Path, destination: str) -> str:
    """Return the full path of the copy on the hosts.

    A destination that ends with a slash is the folder to copy into; any other is the copy itself.
    A source that ends with a slash stands for what is in the folder, as with rsync: the destination
    is then the copy itself, with a slash or without. So does ``.`` or ``..``.

    Raises:
        UsageError: the destination is neither absolute nor under ``~/``, or cannot be copied to.

    >>> check_destination("/home/a/set.npz", "/data/"), check_destination("set", "/data/")
    ('/data/set.npz', '/data/set')
    >>> check_destination("set/", "/data/set/"), check_destination("set/", "/data/set")
    ('/data/set', '/data/set')
    """
    parts = PurePosixPath(destination).parts
    if not destination.startswith(("/", "~/")) or ".." in parts or "\0" in destination:
        raise UsageError(
            f"destination '{destination}': give an absolute path, or one under ~/, without '..'; "
            "it is a place on every host"
        )
    full = PurePosixPath(destination)
    name = str(source).rpartition("/")[2]
    if destination.endswith("/") and name not in ("", ".", ".."):
        full /= name
    if full == PurePosixPath("/") or str(full) == "//":
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
    """Copy a file or folder to the same path on every host.

    Args:
        source: path on this machine or on ``source_host``; or what to fetch from a shared store.
        destination: path on the hosts, as returned by :func:`check_destination`.
        settings: settings of the copy; ``checksum`` and ``shard`` are ignored for a shared store.
        source_host: host that has the source; None for this machine.
        on_progress: called with the progress a few times a second.
        on_skipped: called at the end with each path that is neither file, folder nor link.
        newcomers: called a few times a second; returns further hosts to copy to. Not used in a dry
            run or with ``shard``.

    Yields:
        One result for each host as soon as it is known, newcomers included. A host that failed
        keeps its complete files, and another call continues from there. Closing the iterator ends
        the copy and all fetching commands on all hosts.

    Raises:
        UsageError: the source does not exist or cannot be read.
        SshError: ``source_host`` cannot be used.
    """
    if not isinstance(source, Pulled) and source_host is None:
        source = Path(source).absolute()  # what sends it works in the home folder
    place = source if isinstance(source, Pulled) else decode(os.fsencode(source))
    settings = settings or CopySettings()
    if settings.delete and destination == "~":
        raise UsageError("destination ~/: --delete would remove all else in the home folder")
    job = CopyJob(hosts, place, destination, options, settings, source_host, on_progress, newcomers)
    session = PullSession(job, source) if isinstance(source, Pulled) else CopySession(job)
    with session:
        yield from session.run()
        for path in session.skipped:
            if on_skipped is not None:
                on_skipped(path)
