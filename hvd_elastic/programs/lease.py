"""Run on a machine of a cloud, as root, from its start: shut it down when its lease has ended.

The lease is renewed by writing a number of seconds to a file, which needs no credentials of the
cloud. A renewal never shortens the lease, nor reaches beyond the machine's deadline. Times are
counted from the start of this program, by a clock that nobody sets. Standard library only.

Arguments: the file, the first lease [s], the deadline [s], the user who may write the file, and
perhaps a file of root's that keeps the end of the lease [Unix s] for the time after a reboot.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path

_POLL_S = 1.0
_AGAIN_S = 60.0
"""Time after which a shutdown that has not happened is asked for again [s]."""
_LONGEST = 64
_WAYS = (("shutdown", "-h", "now"), ("poweroff", "-f"))


def main() -> None:
    """Wait for the end of the lease, then shut down."""
    path, lease_s, max_s, user, *kept = sys.argv[1:]
    last = _now() + float(max_s)
    ends = min(_now() + max([float(lease_s), *map(_read_left, kept)]), last)
    file = Path(path)
    file.write_text("")
    file.chmod(0o600)
    with contextlib.suppress(KeyError):  # no such user: nobody but root renews it
        os.chown(path, pwd.getpwnam(user).pw_uid, -1)
    seen = None  # a renewal may have been written by now
    while True:
        now = _now()  # before the look, so that none is missed by a process that was held up
        found = _stamp(file)
        if found != seen:
            seen = found
            renewed_s = _read_renewal(file)
            if renewed_s is not None:
                ends = max(ends, min(_now() + renewed_s, last))
                for each in kept:
                    with contextlib.suppress(OSError):  # a full disk: a reboot shortens the lease
                        Path(each).write_text(f"{time.time() + ends - _now():.0f}")
        if now >= ends:
            break
        time.sleep(min(ends - now, _POLL_S))
    while True:
        for way in _WAYS:
            with contextlib.suppress(OSError):  # there is no such program
                subprocess.call(way)
            time.sleep(_AGAIN_S)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written; None: it cannot be read."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read_left(kept: str) -> float:
    """Return what is left of the lease from before a reboot [s]; 0: there was none."""
    try:
        return float(Path(kept).read_text("ascii")[:_LONGEST]) - time.time()
    except (OSError, ValueError):
        return 0.0


def _read_renewal(file: Path) -> float | None:
    """Return the renewed lease [s]; None: the file does not hold one."""
    try:
        return max(0.0, float(file.read_text("ascii")[:_LONGEST]))
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    main()
