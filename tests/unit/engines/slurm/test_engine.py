"""Steps on the nodes of an allocation, with an srun in whose place a small script answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_elastic.engines.slurm.engine import SrunConnection
from hvd_elastic.hosts.hostfile import Host
from tests.unit.engines.slurm.conftest import Write

REFUSED = "srun: error: Unable to create step for job 17: "


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (f"{REFUSED}Invalid generic resource (gres) specification", os.EX_NOPERM),
        (f"{REFUSED}Job/step already completing or completed", os.EX_NOPERM),
        ("srun: error: Slurm job 17 has expired", os.EX_NOPERM),
        ("srun: error: Unable to confirm allocation for job 17: Invalid job id", os.EX_NOPERM),
        (f"{REFUSED}Requested nodes are busy", 1),
        ("srun: error: Unable to contact slurm controller (connect failure)", 1),
        ("said by the command itself", 1),
    ],
)
def test_a_step_that_slurm_will_never_give_is_told_apart(
    write: Write, tmp_path: Path, said: str, status: int
) -> None:
    write("srun", f"echo '{said}' >&2; exit 1")
    connection = SrunConnection(Host("gpu1"), "17", tmp_path)
    process = connection.start("true")
    assert process.wait(30) == status
    assert process.wait_drained(30)
    assert process.last_line == said
    connection.close()
