"""A folder for the temporary files of one host's workers, so that none outlives its run.

A process that is killed cannot tidy up: PyTorch's data loader, for one, leaves a folder of sockets
in the temporary folder for every worker that ends so. With ``TMPDIR`` in a folder of the agent's,
they go with it.
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
    """Make the folder, in the temporary folder that ``environment`` names where that is there.

    What an agent of the same run and host that was killed has left is removed.
    """
    base = _base(environment)
    # Short: a socket's path has room for 107 characters, and names are the user's.
    prefix = f"hvd-{hashlib.sha256(f'{run_id}/{host}'.encode()).hexdigest()[:12]}-"
    for old in base.glob(f"{prefix}*"):
        shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=base))


def scratch_variables(scratch: Path) -> dict[str, str]:
    """What makes a worker use the folder, for all but what later processes want to find again."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = str(os.getuid())
    # PyTorch keeps compiled code under this name in the temporary folder, for its next process.
    kept = scratch.parent / f"torchinductor_{user}"
    return {"TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(kept)}


def _base(environment: Mapping[str, str]) -> Path:
    wanted = environment.get("TMPDIR")
    if wanted and os.access(wanted, os.W_OK | os.X_OK):
        return Path(wanted)
    return Path(tempfile.gettempdir())
