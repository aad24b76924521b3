"""A folder for the temporary files of one host's workers, which is removed after the run.

A process that is killed cannot clean up: for example, PyTorch's data loader leaves a folder of
sockets for every worker that was killed. ``TMPDIR`` puts them into a folder of the agent.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from hvd_elastic.own_files import make_private, who_else_writes


def make_scratch(run_id: str, host: str, environment: Mapping[str, str]) -> Path:
    """Create the folder inside ``TMPDIR`` of ``environment`` if that is writable, or else of ours.

    Folders that killed agents of the same run and host left are removed.
    """
    base = _base(environment)
    # A hash is short, since a socket's path may have at most 107 characters and names can be long.
    prefix = f"hvd-{hashlib.sha256(f'{run_id}/{host}'.encode()).hexdigest()[:12]}-"
    for old in base.glob(f"{prefix}*"):
        shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=base))


def compiler_cache(scratch: Path) -> tuple[Path, str]:
    """Return the folder in which PyTorch keeps compiled code, and why it is not that of later runs.

    It runs what it finds there, so it is a folder below the user's cache that nobody else can write
    to; where that is not so (then the reason is not ""), or cannot be, it is inside ``scratch``.
    """
    # One for each host, since compiled code is for one kind of processor and hosts may share it.
    name = f"torchinductor-{socket.gethostname()}"
    cache = Path(platformdirs.user_cache_dir("hvd_elastic"))
    try:
        if not cache.is_absolute():  # a user without a home folder, as in some containers
            return scratch / name, ""
        folder = make_private(cache / name)
        why = who_else_writes(folder)
    except OSError:  # such as a home folder that is read-only
        return scratch / name, ""
    return (scratch / name, why) if why else (folder, "")


def _base(environment: Mapping[str, str]) -> Path:
    wanted = environment.get("TMPDIR")
    if wanted and os.access(wanted, os.W_OK | os.X_OK):
        return Path(wanted)
    return Path(tempfile.gettempdir())
