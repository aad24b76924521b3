"""The folder of a cluster, and its lock."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from hvd_elastic.errors import RunError
from hvd_elastic.jobs.place import ClusterFolder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterFolder:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    return ClusterFolder.create("test")


def test_one_who_looks_for_a_daemon_is_not_taken_for_one(place: ClusterFolder) -> None:
    """Who looks holds the lock for a moment, as ``queue`` does beside ``up``."""
    with (place.path / "daemon.lock").open("w") as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        ends = threading.Timer(0.2, fcntl.flock, (looks, fcntl.LOCK_UN))
        ends.start()
        with place.lock():
            assert place.daemon_alive()
        ends.join()
    assert not place.daemon_alive()


def test_second_daemon_is_refused(place: ClusterFolder) -> None:
    with place.lock():
        place.describe_daemon(Path("/srv/hosts"))
        with pytest.raises(RunError, match=r"has a daemon already .pid .*hosts of /srv/hosts"):
            place.lock().__enter__()
