"""The processes of a virtual cluster are known by variables of their environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.virtual.processes import marked_clusters, marked_processes, marks

PROGRAM = """
import os, sys, time
if len(sys.argv) > 1:
    os.chroot(sys.argv[1])
print(flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_cluster_in_a_container_is_another_one(tmp_path: Path) -> None:
    """There the same path is another folder: the host must not end what it finds of it."""
    container = tmp_path / "container"
    (tmp_path / "vc1").mkdir()
    for name in ("vc1", "vc2"):
        Path(f"{container}{tmp_path / name}").mkdir(parents=True)
    started = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", PROGRAM, *arguments],
            env={**os.environ, **marks(tmp_path / folder, "vc1-1")},
            stdout=subprocess.PIPE,
        )
        for folder, arguments in (("vc1", []), ("vc1", [container]), ("vc2", [container]))
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        found = marked_processes(tmp_path / "vc1")
        assert {process.pid: host for process, host in found.items()} == {started[0].pid: "vc1-1"}
        assert str(tmp_path / "vc1") in marked_clusters()
        assert str(tmp_path / "vc2") not in marked_clusters()
    finally:
        for process in started:
            process.kill()
            process.communicate()
