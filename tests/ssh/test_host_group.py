"""The hosts of a hostfile as Fabric's users call them, over a real sshd."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import fabric
import pytest
from fabric.exceptions import GroupException
from invoke.exceptions import CommandTimedOut, UnexpectedExit

from hvd_elastic.cluster import HostConnection, HostGroup
from hvd_elastic.errors import HostKeyError, HostUnreachableError, UsageError
from hvd_elastic.hosts.connection import SshOptions
from tests.paths import LIMIT_S
from tests.ssh import sshd as private_sshd
from tests.ssh import tools as shared
from tests.ssh.tools import CHECKOUT, Tools

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(not private_sshd.AVAILABLE, reason="sshd is not installed"),
]

server, tools = shared.server, shared.tools


@pytest.fixture
def group(tools: Tools) -> HostGroup:
    options = SshOptions(config_path=tools.config)
    return HostGroup.from_hostfile(tools.hostfile, only="node[1-3]", options=options)


def test_a_group_is_one_of_fabrics(group: HostGroup, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(group, fabric.Group)
    assert repr(group) == "<HostGroup node1, node2, node3>"
    done = group.run('echo "$X"; echo b >&2', env={"X": "it's"}, hide="err")
    assert {member.host: each.stdout for member, each in done.items()} == dict.fromkeys(
        ("node1", "node2", "node3"), "it's\n"
    )
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == [f"node{n}: it's" for n in (1, 2, 3)]
    assert shown.err == ""
    with group:
        for member in group:
            assert isinstance(member, HostConnection)
            assert member.run("echo ${0##*/}", hide=True, in_stream=False).ok
            assert member.is_connected
    assert not any(member.is_connected for member in group)


def test_failures_are_told_by_host(group: HostGroup, tools: Tools) -> None:
    with pytest.raises(GroupException) as caught:
        group.run("exit 3", hide=True)
    failed = caught.value.result.failed
    assert {member.host for member in failed} == {"node1", "node2", "node3"}
    assert all(isinstance(why, UnexpectedExit) for why in failed.values())
    assert all(each.exited == 3 for each in group.run("exit 3", hide=True, warn=True).values())
    with pytest.raises(GroupException) as caught:
        group.run("sleep 100", hide=True, timeout=0.5)
    assert all(isinstance(why, CommandTimedOut) for why in caught.value.result.values())
    config = tools.folder / "elsewhere"
    config.write_text(tools.config.read_text() + "\nHost gone\n  HostName 127.0.0.1\n  Port 1\n")
    mixed = HostGroup("node1", "gone", options=SshOptions(config_path=config))
    with pytest.raises(GroupException) as caught:
        mixed.run("true")
    (why,) = caught.value.result.failed.values()
    assert isinstance(why, HostUnreachableError)
    assert [member.host for member in caught.value.result.succeeded] == ["node1"]


def test_an_unknown_host_key_is_refused(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tools.folder / "strict"
    lines = tools.config.read_text().splitlines()
    kept = [line for line in lines if "KnownHostsFile" not in line]
    config.write_text("\n".join([*kept, "Host *", "  UserKnownHostsFile /none"]))
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tools.folder / "home"))
    (member,) = HostGroup("node1", options=SshOptions(config_path=config))
    with pytest.raises(HostKeyError):
        member.run("true")


def test_files_go_and_come(
    group: HostGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "a set"
    source.mkdir()
    (source / "x").write_bytes(os.urandom(1 << 16))
    # The hosts are one machine: one destination at a time.
    one = HostGroup("node2", options=group.options)
    one.put("a set/", f"{tmp_path}/there/a set/")
    assert (tmp_path / "there/a set/x").read_bytes() == (source / "x").read_bytes()
    one.put(io.BytesIO(b"text"), f"{tmp_path}/there/file")
    done = group.get(f"{tmp_path}/there/file", f"{tmp_path}/{{host}}/")
    assert [Path(each.local).read_bytes() for each in done.values()] == [b"text"] * 3
    with pytest.raises(UsageError, match="the full remote path"):
        one.put(io.BytesIO(b"text"))
    with pytest.raises(UsageError, match="does not exist"):
        one.put(tmp_path / "none", "/data/")


def fab(tools: Tools, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "fab"), "-r", str(CHECKOUT / "scripts")]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        env=tools.environment,
        timeout=LIMIT_S,
    )


def test_the_tools_are_tasks_of_a_fabfile(tools: Tools, tmp_path: Path) -> None:
    tools.hostfile.write_text("node1\n")
    hosts = ("--hostfile", str(tools.hostfile))
    assert fab(tools, "runclust", *hosts, "--command", "echo it works").stdout == (
        "node1: it works\n"
    )
    failed = fab(tools, "runclust", *hosts, "--command", "exit 3")
    assert (failed.returncode, "exit code: 3" in failed.stderr.lower()) == (1, True)
    (tmp_path / "file").write_text("data")
    copied = fab(
        tools, "copyclust", *hosts, "--source", str(tmp_path / "file"),
        "--destination", str(tmp_path / "copy"),
    )  # fmt: skip
    assert copied.returncode == 0, copied.stderr
    assert (tmp_path / "copy").read_text() == "data"
    assert fab(tools, "killclust", *hosts, "--run", "none").stdout == "node1: 0 ended\n"
    assert fab(tools, "checkclust", *hosts).stdout.startswith("node1: ")
    wrong = fab(tools, "runclust", "--hostfile", "/none", "--command", "true")
    assert wrong.returncode == 1
    assert "hostfile /none does not exist" in wrong.stderr
