"""A folder for the temporary files of one host's workers, which is removed after the run.

A process that is killed cannot clean up: for example, PyTorch's data loader leaves a folder of
sockets for every worker that was killed. ``TMPDIR`` puts them into a folder of the agent.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


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


def scratch_variables(scratch: Path) -> dict[str, str]:
    """Return variables that make a worker use the folder, except for what later runs can reuse."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = str(os.getuid())
    # PyTorch reuses the compiled code that it keeps in this folder.
    kept = scratch.parent / f"torchinductor_{user}"
    return {"TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(kept)}


def _base(environment: Mapping[str, str]) -> Path:
    wanted = environment.get("TMPDIR")
    if wanted and os.access(wanted, os.W_OK | os.X_OK):
        return Path(wanted)
    return Path(tempfile.gettempdir())
