"""Fetch a file of each host to this machine (``copyclust --from-each``)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hvd_elastic.errors import SshError, UsageError
from hvd_elastic.hosts.fanout import DEFAULT_FANOUT, HostResult, Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.ssh import SshOptions, connect
from hvd_elastic.hosts.transfer import receive_file
from hvd_elastic.replaced_files import temporary_in

# Limit for a host to tell the mode of its file.
MODE_S = 60.0
# A copy is executed as the host's file is, and only its owner can write it.
MOST_MODE = 0o755


@dataclass(frozen=True)
class FetchedFile:
    """A file that was fetched.

    Attributes:
        path: its copy on this machine.
        size_bytes: its size [bytes].
    """

    path: Path
    size_bytes: int


def fetch_from_each(
    hosts: Sequence[Host],
    source: str,
    folder: Path,
    options: SshOptions,
    fanout: int = DEFAULT_FANOUT,
) -> Iterator[HostResult[FetchedFile]]:
    """Copy a file of each host to ``folder/HOST/NAME``; one that was there is replaced as a whole.

    Args:
        hosts: hosts to fetch it from.
        source: its path on each host, absolute or under ``~/``.
        folder: folder on this machine; it is made.
        options: ssh options.
        fanout: maximum number of hosts at a time.

    Yields:
        One result for each host as it ends.

    Raises:
        UsageError: the source is not a path of a file.
    """
    name = PurePosixPath(source).name
    if not source.startswith(("/", "~/")) or source.endswith("/") or name in ("", ".", ".."):
        raise UsageError(
            f"source '{source}': give the path of a file on each host, absolute or under ~/"
        )
    there = f"./{source[2:]}" if source.startswith("~/") else source  # commands run in the home

    def fetch(host: Host, stopper: Stopper) -> FetchedFile:
        target = folder / host.name / name
        with connect(host, options) as connection:
            stopper.add_action(connection.close)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with temporary_in(folder) as temporary:
                    number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                    with os.fdopen(number, "wb") as file:
                        receive_file(connection, there, file.write)
                        size = file.tell()
                        told = connection.run(["stat", "-Lc", "%a", there], MODE_S)
                        mode = (told.text.split() or [""])[-1]  # a log-in may print before it
                        if told.ok and mode.isdecimal():  # else it stays private
                            os.fchmod(number, int(mode, 8) & MOST_MODE)
                    target.parent.mkdir(exist_ok=True)  # of a host that fails there is no folder
                    temporary.replace(target)
            except OSError as error:
                raise SshError(
                    f"host {host.name}: {error.filename2 or error.filename or target} cannot be "
                    f"written here: "
                    f"{error.strerror}"
                ) from error
        return FetchedFile(target, size)

    return fan_out(hosts, fetch, fanout)
