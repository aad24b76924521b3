"""The folder of a cluster, and its lock."""

from __future__ import annotations

import fcntl
import grp
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from hvd_elastic.errors import RunError, StrangerError
from hvd_elastic.jobs.job import Hosts
from hvd_elastic.jobs.place import ClusterFolder, open_cluster
from hvd_elastic.jobs.server import ask_daemon
from tests import other_user


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterFolder:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    return ClusterFolder.create("test")


def test_one_who_looks_for_a_daemon_is_not_taken_for_one(
    place: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks holds the lock for a moment, as ``queue`` does beside ``up``."""
    monkeypatch.setattr("hvd_elastic.records.process_lock._TRIES", 4000)
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


@other_user.needs_root
def test_a_place_that_others_may_change_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    group, above = grp.getgrgid(os.getgid()).gr_name, tmp_path / "srv"
    above.mkdir()
    for mode, who in ((0o757, "all users"), (0o770, "users of group 7")):
        os.chown(above, -1, 7)
        above.chmod(mode)
        with pytest.raises(StrangerError) as refused:
            ClusterFolder.create_shared(above / "queue", group)
        assert not (above / "queue").exists()
        said = str(refused.value)
        assert said.startswith(
            f"--place {above / 'queue'}: others could replace the daemon's files"
        )
        assert f"{who} may write in {above}, which belongs to user root (uid 0)" in said
        command = said.rpartition(": ")[2]
        assert command.startswith("chmod ")
        subprocess.run(command, shell=True, check=True)
        shutil.rmtree(ClusterFolder.create_shared(above / "queue", group).path)


@other_user.needs_root
def test_a_place_that_is_another_users_now_is_refused_until_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a folder under /tmp that somebody else has made after a reboot."""
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    path = tmp_path / "queue"
    path.mkdir(mode=0o750)
    open_cluster(str(path))
    for way in ("queue", None):
        with pytest.raises(RunError, match="no daemon"):
            ask_daemon(open_cluster(way), Hosts())
    os.chown(path, other_user.UID, other_user.UID)
    was = rf"{path} of cluster queue was that of user root .*now that of {other_user.WORDS}"
    was = was.replace("(", "\\(").replace(")", "\\)")
    with pytest.raises(StrangerError, match=was):
        open_cluster(str(path))
    with pytest.raises(RunError, match=was) as refused:
        ask_daemon(open_cluster("queue"), Hosts())
    (known,) = (tmp_path / "home" / "clusters").glob(".*")
    assert str(refused.value).endswith(f"If that is right: rm {known}")
    known.unlink()
    with pytest.raises(RunError, match=r"no daemon\. Only user nobody"):
        ask_daemon(open_cluster("queue"), Hosts())
