"""Small disks for the run folder and for the spool of each host, which a soak can fill."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvd_elastic.virtual.processes import run_tool

_BALLAST = "ballast"
_SPOOL_MIB = 16


def spool_of(home: Path, run_id: str, host: str) -> Path:
    """Return the path of a host's spool on this machine."""
    return home / "spool" / run_id / host


@contextlib.contextmanager
def small_disks(home: Path, run_id: str, hosts: Sequence[str], minutes: float) -> Iterator[None]:
    """Mount the disks for the length of the block; call it before the virtual hosts are created.

    Virtual hosts see only what is mounted when they are created.

    Args:
        home: home folder of hvd_elastic, empty.
        run_id: id of the run that will use the disks.
        hosts: names of the virtual hosts.
        minutes: length of the soak, by which the audit in the run folder grows.
    """
    sizes = {home / "runs": int(64 + 8 * minutes)}
    sizes |= {spool_of(home, run_id, host): _SPOOL_MIB for host in hosts}
    with contextlib.ExitStack() as stack:
        for folder, mebibytes in sizes.items():
            folder.mkdir(parents=True)
            options = f"mode=700,size={mebibytes}m"
            run_tool(["mount", "-n", "-t", "tmpfs", "-o", options, "soak", str(folder)])
            # A lazy unmount: a leader that hangs must not keep the soak from ending.
            stack.callback(run_tool, ["umount", "-n", "-l", str(folder)])
        yield


def fill(folder: Path) -> None:
    """Leave no byte free on the disk of a folder."""
    descriptor = os.open(folder / _BALLAST, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        chunk = 1 << 20
        size = os.fstat(descriptor).st_size
        while chunk >= 512:
            try:
                os.posix_fallocate(descriptor, size, chunk)
                size += chunk
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                chunk //= 2
    finally:
        os.close(descriptor)


def free(folder: Path) -> None:
    """Free the space that :func:`fill` has taken."""
    (folder / _BALLAST).unlink(missing_ok=True)
