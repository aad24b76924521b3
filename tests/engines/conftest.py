"""Virtual hosts for the tests of the engines: runs on Slurm, Spark and Ray."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from hvd_elastic.virtual import VirtualCluster
from tests.dist.running import Stage

# Programs that tests start, not to be imported for their doctests.
collect_ignore_glob = ["*_driver.py"]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Four hosts with two slots each, and a folder that they share with this machine."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built; see make horovod")
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", 143))
    folder = tmp_path_factory.mktemp("engine")
    home = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_ELASTIC_HOME", str(home))
        made = VirtualCluster.up(4, 2, shares=[folder])
    with made as cluster:
        yield Stage(cluster, folder)
    signal.signal(signal.SIGTERM, before)
