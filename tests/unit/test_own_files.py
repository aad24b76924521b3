"""What of this user's files others can read, change or put in their place."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.errors import HostfileError, HostKeyError, SshError, StrangerError
from hvd_elastic.hosts import route
from hvd_elastic.hosts.hostfile import parse_hostfile
from hvd_elastic.hosts.ssh_config import read_config_text
from hvd_elastic.own_files import (
    check_configuration,
    private_folder,
    socket_in,
    who_else_writes,
)
from tests import other_user
from tests.other_user import open_folder as open_folder
from tests.paths import LIMIT_S

UMASKS = [0o000, 0o022, 0o077]

WRITES_ALL = """
import os, sys
from pathlib import Path
os.umask(int(sys.argv[1], 8))
from hvd_elastic.agent.spool import Spool
from hvd_elastic.checkpoint.shards import ShardInfo, write_shard
from hvd_elastic.config import home
from hvd_elastic.hosts.hostfile import Host, write_hostfile
from hvd_elastic.hosts.known_hosts import HostKey, remember
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.virtual.state import clusters_folder, locked
remember(home() / "known_hosts", [("a", HostKey("ssh-ed25519", b"key"))])
folder = RunFolder.create("run", {"command": ["true"]})
write_hostfile(folder.hosts, [Host("a")])
spool = Spool(home() / "spool" / "run" / "a")
spool.keep_run({})
shard = ShardInfo(Path(), 1, 0, 1, 0, "x", 0, 1, "h", 0, "l", 0, 0, 1, 1)
write_shard(spool.path, shard, lambda file: file.write(b"w"))
ClusterFolder.create("cluster")
with locked(clusters_folder()):
    pass
"""


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_others_neither_read_nor_change_anything_whatever_the_umask(
    tmp_path: Path, umask: int
) -> None:
    home = tmp_path / "above" / "home"
    environment = {**os.environ, "HVD_ELASTIC_HOME": str(home)}
    command = [sys.executable, "-c", WRITES_ALL, f"{umask:o}"]
    subprocess.run(command, env=environment, check=True, timeout=LIMIT_S)
    folders = [home.parent, *(path for path in (home, *home.glob("*")) if path.is_dir())]
    assert {path.name for path in folders} >= {"home", "runs", "spool", "clusters", "virtual"}
    assert {oct(path.stat().st_mode & 0o777) for path in folders} == {"0o700"}
    files = [path for path in home.rglob("*") if path.is_file() and path.suffix != ".shard"]
    assert {"known_hosts", "run.json", "hosts"} <= {path.name for path in files}
    for path in files:
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), path


def test_an_existing_folder_is_closed_to_others(tmp_path: Path) -> None:
    """As one that an earlier release has made."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    private_folder(tmp_path / "link")
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_place_of_a_folder_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "runs").touch(mode=0o644)
    with pytest.raises(FileExistsError):
        private_folder(tmp_path / "runs")
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o644


@other_user.needs_root
def test_a_folder_or_link_of_another_user_is_refused(tmp_path: Path) -> None:
    folder, link = tmp_path / "runs", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(tmp_path)
    os.chown(folder, other_user.UID, other_user.UID)
    os.lchown(link, other_user.UID, other_user.UID)
    for path in (folder, link):
        words = re.escape(f"{path} belongs to {other_user.WORDS} and not to user root")
        with pytest.raises(StrangerError, match=words):
            private_folder(path)
    with pytest.raises(
        StrangerError, match=other_user.WORDS.replace("(", r"\(").replace(")", r"\)")
    ):
        with socket_in(folder, "socket"):
            pass


@pytest.mark.parametrize("mode", [0o666, 0o646, 0o777])
def test_configuration_that_all_users_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    path.write_text("a slots=1\n")
    path.chmod(mode)
    why = re.escape(f"{path} can be written by all users (mode {mode:o})")
    with pytest.raises(HostfileError, match=f"hostfile {why}.*chmod go-w {path}"):
        parse_hostfile(path)
    with pytest.raises(SshError, match=f"ssh configuration {why}"):
        read_config_text(path)
    including = tmp_path / "including"
    including.write_text(f"Include {path}\n")
    with pytest.raises(SshError, match=f"ssh configuration {why}"):
        read_config_text(including)


@other_user.needs_root
def test_configuration_of_a_group_is_for_hostfiles_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a slots=1\n")
    path.chmod(0o664)
    os.chown(path, 0, 0)
    check_configuration(path)  # a group of this user alone
    os.chown(path, 0, other_user.UID)
    assert len(parse_hostfile(path)) == 1
    with pytest.raises(SshError, match=f"can be written by group {other_user.UID}"):
        read_config_text(path)


@pytest.mark.parametrize("name", ["", "known_hosts"])
def test_no_host_key_is_trusted_that_others_could_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    route._check_own_known_hosts()  # there is none
    (tmp_path / "known_hosts").touch()
    (tmp_path / name).chmod(0o777)
    with pytest.raises(HostKeyError, match=f"no host key in {tmp_path}/known_hosts is trusted"):
        route._check_own_known_hosts()


@other_user.needs_root
@pytest.mark.parametrize("name", ["", "known_hosts"])
def test_no_host_key_of_another_user_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In a folder like /tmp, others may make what is not there yet."""
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o1777)
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(home))
    (home / "known_hosts").touch(mode=0o644)
    route._check_own_known_hosts()
    os.chown(home / name, other_user.UID, other_user.UID)
    with pytest.raises(HostKeyError, match=f"is trusted: {home / name} belongs to user nobody"):
        route._check_own_known_hosts()


def test_configuration_from_a_pipe_is_read() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"a slots=1\n")
    os.close(write_end)
    with os.fdopen(read_end):
        assert len(parse_hostfile(f"/dev/fd/{read_end}")) == 1


@other_user.needs_root
def test_link_of_another_user_is_no_place_though_it_leads_to_a_folder_of_this_one(
    open_folder: Path, tmp_path: Path
) -> None:
    link = open_folder / "queue"
    other_user.call(lambda: link.symlink_to(tmp_path))
    open_folder.chmod(0o1777)
    (tmp_path / "below").mkdir()
    assert who_else_writes(link) == f"{link} belongs to {other_user.WORDS}"
    assert who_else_writes(link / "below") == f"{link} belongs to {other_user.WORDS}"
