"""Call Slurm's own commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from hvd_elastic.errors import RunError

_TIMEOUT_S = 60.0
"""Time limit of a command [s]; a busy slurmctld answers after some seconds."""
_OPTIONS = ("SLURM_", "SRUN_", "SBATCH_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SCONTROL_")
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_ARRAY_")
"""What the names of variables begin with that are kept."""


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for Slurm's commands, without variables that are options of theirs.

    A batch script's ``--ntasks`` would be taken for that of each ``srun`` in it, and a user's
    ``SQUEUE_PARTITION`` would hide jobs of the run.

    >>> clean_environment({"SLURM_NTASKS": "8", "SLURM_ARRAY_TASK_ID": "1", "HOME": "/root"})
    {'SLURM_ARRAY_TASK_ID': '1', 'HOME': '/root'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_KEPT) or not name.startswith(_OPTIONS)
    }


def require_commands(*names: str) -> None:
    """Raise RunError if one of Slurm's commands is not on PATH."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        raise RunError(
            f"Slurm's {' and '.join(missing)} cannot be found on PATH on this machine "
            f"({os.uname().nodename}). Start the run where Slurm's commands are (in a container, "
            "bind them and Slurm's configuration), or name the hosts with --hostfile"
        )


def call(*command: str) -> str:
    """Run a command of Slurm and return what it has printed.

    Raises:
        RunError: it is not on PATH, failed or took too long; shows its last line.
    """
    require_commands(command[0])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=clean_environment(os.environ),
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{' '.join(command[:2])} failed: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        said = [line for line in lines if not line.startswith('Try "')]  # sbatch --help
        last = said[-1] if said else f"exit status {done.returncode}"
        raise RunError(f"{' '.join(command[:2])} failed: {last}")
    return done.stdout
