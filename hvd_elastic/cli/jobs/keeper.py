"""Start this user's keeper for a cluster of another user's daemon; as a program, be it.

The program is ``python -m hvd_elastic.cli.jobs.keeper FOLDER``. Leaders that outlive their keeper
start another one, so that their jobs can be changed while their user is away.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from hvd_elastic.cli.jobs.units import remove_unit, write_unit
from hvd_elastic.errors import HvdElasticError, RunError
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.own_files import private_folder
from hvd_elastic.records.process_lock import take_lock

_PROGRAM = "hvd_elastic.cli.jobs.keeper"
_BEGUN = b"begun\n"
_AGAIN_S, _MOST_AGAIN_S = 1.0, 60.0
"""Time until a leader starts another keeper, and its limit if keepers end again and again [s]."""


def keeper_command(place: ClusterFolder) -> list[str]:
    """Return the command of the keeper of a cluster."""
    return [sys.executable, "-m", _PROGRAM, str(place.named)]


def start_keeper(place: ClusterFolder) -> None:
    """Start this user's keeper for the cluster of another user's daemon, unless it is there.

    Raises:
        RunError: it could not begin.
    """
    write_unit(place, "keeper", keeper_command(place))
    private_folder(place.keeper.parent)
    path = private_folder(place.keeper) / "keeper.log"
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(log, "wb") as file:  # noqa: PTH123
            process = subprocess.Popen(
                keeper_command(place),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                cwd="/",
            )
    except OSError as error:
        raise RunError(f"cannot start the keeper with its log {path}: {error.strerror}") from error
    with contextlib.closing(process.stdout or sys.stdin.buffer) as told:
        if told.readline() != _BEGUN:
            raise RunError(f"the keeper ended before it began; see {path}")


def keep(place: ClusterFolder) -> None:
    """Be the keeper of this user for a cluster, unless another process is."""
    lock = take_lock(private_folder(place.keeper) / "lock")
    sys.stdout.buffer.write(_BEGUN)
    sys.stdout.flush()
    os.dup2(2, 1)  # whoever started it reads no more
    if lock is None:  # the other one is about to reach the daemon
        return
    with lock:
        lock.truncate(0)
        lock.write(json.dumps({"pid": os.getpid()}).encode())
        from hvd_elastic.cli.runs.run import begin_leader  # submit does not wait for these
        from hvd_elastic.jobs.keeper import Keeper
        from hvd_elastic.jobs.secrets import JobSecrets

        begin = functools.partial(begin_leader, beside=functools.partial(_keep_kept, place))
        Keeper(begin, JobSecrets(place)).keep(place)
        remove_unit(place, "keeper")  # the user has no job left


def _keep_kept(place: ClusterFolder) -> None:
    """Have a thread of this leader start another keeper when there is none."""
    threading.Thread(target=_start_again, args=(place,), name="keeper", daemon=True).start()


def _start_again(place: ClusterFolder) -> None:
    again_s = _AGAIN_S
    with contextlib.suppress(OSError, HvdElasticError):
        while place.path.is_dir():
            began = time.monotonic()
            with (place.keeper / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)  # until it is gone
            long = time.monotonic() - began > _MOST_AGAIN_S
            again_s = _AGAIN_S if long else min(2 * again_s, _MOST_AGAIN_S)
            time.sleep(again_s)
            # Of many leaders one starts it.
            if (first := take_lock(place.keeper / "starting")) is not None:
                with first:
                    start_keeper(place)


def _main(path: Path) -> int:
    try:
        keep(ClusterFolder(path, shared=True))
    except HvdElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
