from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.errors import UsageError
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.programs.copy.node import Destination
from hvd_elastic.programs.copy.tree import walk
from hvd_elastic.tools.copy.copying import (
    CopySettings,
    check_destination,
    check_source,
    copy_to_hosts,
)
from hvd_elastic.tools.copy.job import CopyJob
from hvd_elastic.tools.copy.session import CopySession


@pytest.mark.parametrize(
    ("source", "destination", "full"),
    [
        ("/a/set", "/data/x", "/data/x"),
        ("/a/set", "/data/", "/data/set"),
        ("set", "~/job", "~/job"),
        ("set", "~/", "~/set"),
        (Path("/a/set"), "/", "/set"),
        # What is in the folder, as with rsync.
        ("set/", "/data/set/", "/data/set"),
        ("set/", "/data/set", "/data/set"),
        (".", "/data/set/", "/data/set"),
        ("a/..", "~/", "~"),
    ],
)
def test_destinations(source: str | Path, destination: str, full: str) -> None:
    assert check_destination(source, destination) == full


@pytest.mark.parametrize("destination", ["", "data", "..", "/data/../etc", "~bob/x", "~", "//"])
def test_destinations_that_are_refused(destination: str) -> None:
    with pytest.raises(UsageError, match="destination"):
        check_destination("/", destination)


def test_a_copy_never_empties_the_home_folder() -> None:
    with pytest.raises(UsageError, match="--delete would remove all else in the home folder"):
        list(copy_to_hosts([], "set/", "~", SshOptions(), CopySettings(delete=True)))


def test_sources_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        check_source(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/ is a file; leave out the slash"):
        check_source(f"{tmp_path}/file/")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        check_source(tmp_path / "pipe")


def test_files_of_other_shares_are_not_told_as_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, place = tmp_path / "source", tmp_path / "there"
    source.mkdir()
    for name in "abc":
        (source / name).touch()
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("b", "c"))
    config = {"place": str(place), "patterns": [], "passing": [], "deletes": False}
    config["checksum"] = False
    node = Destination({**config, "shard": [0, 2], "dry_run": True})
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(node, "say", lambda say, **fields: said.append({"say": say, **fields}))
    node._begin_copy(walk(os.fsencode(source), [])[0])
    session = CopySession(CopyJob([Host("a")], "/set", "/data/set", SshOptions(), CopySettings()))
    session._nodes["a"].ready = said[-1]
    copied = session._copied(session._nodes["a"])
    assert (copied.files, copied.skipped) == (1, 1), "a is there, c is not, b is not to be"


@pytest.mark.parametrize("stopped_s", [0.0, 30.0])
def test_the_last_host_has_time_to_be_heard_again(stopped_s: float) -> None:
    """A busy one gives its node no processor for some seconds."""
    session = CopySession(CopyJob([Host("a")], "/set", "/data/set", SshOptions(), CopySettings()))
    node = session._nodes["a"]
    began = session._now
    node.state, node.silent_since = "silent", began
    session._excuse(stopped_s)  # the caller itself
    session._now = began + stopped_s + 12.0
    session._give_up_silent()
    assert node.state == "silent"
    session._now += 4.0
    session._give_up_silent()
    assert node.state == "failed"
