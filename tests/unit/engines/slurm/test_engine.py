"""Steps on the nodes of an allocation, with an srun in whose place a small script answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_elastic.engines.slurm.engine import SrunConnection
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.local import LocalConnection
from tests.paths import LIMIT_S
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
    assert process.wait(LIMIT_S) == status
    assert process.wait_drained(30)
    assert process.last_line == said
    connection.close()


@pytest.mark.parametrize("same", [True, False])
def test_the_first_step_tells_whether_a_node_sees_the_same_files(
    write: Write, tmp_path: Path, same: bool
) -> None:
    """A job that is ending refuses a further one, when its last checkpoint is to be read."""
    once = 'test -e "$0.called" && exit 1; touch "$0.called"'
    write("srun", f'{once}; while [ "$1" != /bin/sh ]; do shift; done; exec "$@"')
    seen = tmp_path / "run.json"
    seen.write_text("{}")
    connection = SrunConnection(Host("gpu1"), "17", seen, kill_wait_s=5.0)
    result = connection.run("cat; echo $HVD_ELASTIC_AFTER_SIGTERM_S; echo err >&2", 30, b"in ")
    assert (result.stdout, result.stderr) == (b"in 5\n", b"err\n")
    if not same:
        seen.write_text("of another machine")
    assert isinstance(connection.files, LocalConnection) is same
    connection.close()
