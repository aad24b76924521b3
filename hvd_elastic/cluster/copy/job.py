"""What is copied to which hosts, how, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.hostfile import Host


@dataclass(frozen=True)
class CopySettings:
    """How a copy is made.

    Attributes:
        delete: remove at the destination what the source has not.
        exclude: patterns of what is neither sent nor removed (see ``node.tree.is_excluded``).
        checksum: compare contents even where size and time agree.
        plain: no encryption; nodes still prove to one another that they belong to this copy.
        compress: compress where it pays.
        bytes_per_s: most that each node sends [bytes/s]; 0 for no limit.
        shard: each host gets only its part: every n-th file.
        dry_run: only find out what would be sent.
        fanout: connections that are made at a time.
        python: the interpreter on the hosts.
    """

    delete: bool = False
    exclude: tuple[str, ...] = ()
    checksum: bool = False
    plain: bool = False
    compress: bool = True
    bytes_per_s: float = 0.0
    shard: bool = False
    dry_run: bool = False
    fanout: int = 64
    python: str = "python3"


@dataclass(frozen=True)
class Copied:
    """What was done on a host, or would be in a dry run.

    Attributes:
        files, size_bytes: sent to it (in a dry run: to be sent).
        skipped: files that it had.
        touched: files of which only time or mode was set.
        removed: entries that the source has not.
        resumed_bytes: of ``size_bytes``, what an interrupted copy had left there.
        problems: what could not be done.
        fetched, fetched_bytes: fetched by it from a shared store (in a dry run: to be fetched, as
            far as sizes are known).
        failure: why a command that fetches failed there, where others did its work.
        unreached: who should have fed it and could not connect to it.
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
    """How far a copy is.

    Attributes:
        done_bytes, total_bytes: of all hosts together.
        states: of each host: ``connecting``, ``comparing``, ``fetching``, a share such as ``42%``,
            ``done``, ``shared`` (another host fills the same place), ``silent``, ``failed``.
    """

    done_bytes: int
    total_bytes: int
    states: dict[str, str]


@dataclass(frozen=True)
class Pulled:
    """What is fetched, and how.

    Attributes:
        command: shell text with ``{dst}``, and with ``{path}`` or ``{list}`` where there is a list.
        files: (path, size in bytes or None) of each; None: the command fetches all there is.
        jobs: most commands at a time on a host.
    """

    command: str
    files: tuple[tuple[str, int | None], ...] | None = None
    jobs: int = 8


@dataclass(frozen=True)
class CopyJob:
    """One copy to many hosts.

    Attributes:
        hosts: where to.
        source: a folder or file; or what is fetched from a shared store.
        destination: the place on every host.
        options: how to connect.
        settings: how it is made.
        source_host: the host that has the source; None is this machine.
        on_progress: told how far it is, a few times a second.
        newcomers: asked a few times a second for further hosts.
    """

    hosts: Sequence[Host]
    source: str | Pulled
    destination: str
    options: SshOptions
    settings: CopySettings
    source_host: Host | None = None
    on_progress: Callable[[CopyProgress], None] | None = None
    newcomers: Callable[[], Sequence[Host]] | None = None
