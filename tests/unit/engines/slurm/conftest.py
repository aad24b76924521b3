"""Slurm's commands, in place of which small scripts answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

VARIABLES = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "gpu[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
}
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Slurm's commands for an allocation of two nodes, which a test may write anew."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def script(name: str, text: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    script("srun", "exit 1")
    script("scontrol", 'case "$*" in "show hostnames gpu[1-2]") echo gpu1; echo gpu2;; esac')
    script("squeue", 'case "$*" in *--jobs=17*) echo RUNNING 1:00;; esac')
    return script
