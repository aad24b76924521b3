"""Types that describe a copy: its settings, hosts, progress and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.programs.copy.tree import PLAIN, Keeps


@dataclass(frozen=True)
class CopySettings:
    """Settings of a copy.

    Attributes:
        delete: remove entries at the destination that the source does not have.
        exclude: patterns of paths that are neither sent nor removed (see
            ``node.tree.is_excluded``).
        passing: those of ``exclude`` that keep nothing below a path that ``delete`` removes.
        checksum: compare contents even where size and modification time agree.
        plain: do not encrypt; nodes still prove to one another that they belong to this copy.
        compress: compress data where that makes the copy faster.
        bytes_per_s: maximum rate at which each node sends [bytes/s]; 0 for no limit.
        keeps: what is kept beside contents, modes and times.
        shard: send each of n hosts only its share of the files, every n-th one.
        dry_run: only find out what would be sent.
        fanout: maximum number of connections that are opened at the same time.
        python: Python interpreter on the hosts.
    """

    delete: bool = False
    exclude: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    checksum: bool = False
    plain: bool = False
    compress: bool = True
    bytes_per_s: float = 0.0
    keeps: Keeps = PLAIN
    shard: bool = False
    dry_run: bool = False
    fanout: int = 64
    python: str = "python3"


@dataclass(frozen=True)
class Copied:
    """Result of a copy on one host; in a dry run, the result that it would have.

    Attributes:
        files, size_bytes: number and size of the files sent to it [bytes].
        skipped: number of files that were there already.
        touched: number of files of which only the time or the mode was changed.
        removed: entries that were removed because the source does not have them.
        resumed_bytes: part of ``size_bytes`` that an interrupted copy had left there [bytes].
        problems: descriptions of what could not be done.
        fetched, fetched_bytes: number and size of the files that it fetched from a shared store;
            in a dry run, as far as sizes are known.
        failure: why its fetching command failed, if other hosts fetched its files instead.
        unreached: nodes that should have fed it and could not connect to it.
    """

    files: int
    size_bytes: int
    skipped: int
    touched: int
    removed: tuple[str, ...]
    resumed_bytes: int = 0
    problems: tuple[str, ...] = ()
    fetched: int = 0
    fetched_bytes: int = 0
    failure: str = ""
    unreached: tuple[str, ...] = ()


@dataclass(frozen=True)
class CopyProgress:
    """Progress of a copy.

    Attributes:
        done_bytes, total_bytes: sums over all hosts [bytes].
        states: state of each host: ``connecting``, ``comparing``, ``fetching``, a share such as
            ``42%``, ``done``, ``shared`` (another host fills the same folder), ``silent``,
            ``failed``.
    """

    done_bytes: int
    total_bytes: int
    states: dict[str, str]


@dataclass(frozen=True)
class Pulled:
    """Files to fetch from a shared store, and the command that fetches them.

    Attributes:
        command: shell command with ``{dst}``, and with ``{path}`` or ``{list}`` if there is a list.
        files: (path, size in bytes or None) of each file; None if the command fetches all files.
        jobs: maximum number of commands that run at the same time on a host.
    """

    command: str
    files: tuple[tuple[str, int | None], ...] | None = None
    jobs: int = 8


@dataclass(frozen=True)
class CopyJob:
    """Everything that defines one copy to many hosts.

    Attributes:
        source: path of a file or folder, or what to fetch from a shared store.
        destination: path of the copy on every host.
        source_host: host that has the source; None for this machine.
        on_progress: called with the progress a few times a second.
        newcomers: called a few times a second; returns further hosts to copy to.
    """

    hosts: Sequence[Host]
    source: str | Pulled
    destination: str
    options: SshOptions
    settings: CopySettings
    source_host: Host | None = None
    on_progress: Callable[[CopyProgress], None] | None = None
    newcomers: Callable[[], Sequence[Host]] | None = None
