from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hvd_elastic.errors import SshError
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.route import Route, attempting
from hvd_elastic.hosts.ssh_config import (
    VIRTCLUST_MARK,
    config_beside,
    has_entry,
    known_hosts_files,
    load_ssh_config,
    read_config_text,
)


@pytest.mark.parametrize(
    ("line", "name", "found"),
    [
        ("Host gpu1", "gpu1", True),
        ("host=gpu1", "gpu1", True),
        ("  Host a gpu? b", "gpu1", True),
        ("Host *", "gpu1", False),
        ("Host gpu10", "gpu1", False),
        ("HostName gpu1", "gpu1", False),
        ("# Host gpu1", "gpu1", False),
    ],
)
def test_an_entry_of_its_own(line: str, name: str, found: bool) -> None:
    assert has_entry(f"{line}\n  Port 1\n", name) is found


def test_included_files(tmp_path: Path) -> None:
    (tmp_path / "inner").write_text("Host gpu1\n  Port 2222\n")
    config = tmp_path / "config"
    config.write_text(f"Include {tmp_path}/inn*\nUser alice\nHost gpu2\n  Port 3333\n")
    loaded = load_ssh_config(config)
    assert loaded.lookup("gpu1")["port"] == "2222"
    # What follows the Include stands outside the included blocks.
    assert loaded.lookup("gpu2")["user"] == "alice"
    assert loaded.lookup("gpu2")["port"] == "3333"


def test_what_names_other_hosts_only_is_left_out(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "User first\nHost gpu1 gpu2\n Port 1\nHost gpu3\n Port 3\n ForwardAgent yes\n"
        'Host gpu* !gpu2\n Compression yes\nHost "gpu3"\n HostName three\n'
        "Match originalhost gpu1\n IdentityFile /m\nHost=gpu1\n IdentityFile /k\n"
        "Host *\n Port 9\n"
    )
    whole = load_ssh_config(config)
    for name in ("gpu1", "gpu2", "gpu3", "gpu4", "other", "GPU1"):
        assert load_ssh_config(config, name).lookup(name) == whole.lookup(name), name

    config.write_text("Host gpu1\n Port 1\nHost gpu3\n Port 3\n")
    assert load_ssh_config(config, "gpu1").get_hostnames() == {"*", "gpu1"}
    # A name is looked up once more under its canonical form.
    config.write_text(
        "CanonicalizeHostname yes\nCanonicalDomains invalid\nCanonicalizeFallbackLocal yes\n"
        "Host gpu3\n Port 3\n"
    )
    assert "gpu3" in load_ssh_config(config, "gpu1").get_hostnames()


def test_what_the_hostfile_gives_reaches_a_proxy_command(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("ProxyCommand nc %h %p as %r\nHost gpu*\n  Port 1\n  User bob\n")
    with attempting(Host("gpu1", port=2222, user="alice"), SshOptions(config)) as attempt:
        route = Route(attempt.host, attempt.options, attempt)
    assert route.entry["proxycommand"] == "nc gpu1 2222 as alice"
    assert (route.port, route.user) == (2222, "alice")
    with attempting(Host("gpu1"), SshOptions(config)) as attempt:
        route = Route(attempt.host, attempt.options, attempt)
    assert route.entry["proxycommand"] == "nc gpu1 1 as bob"
    assert (route.port, route.user) == (1, "bob")


def test_what_follows_an_include_in_an_included_file_stays_in_the_block(tmp_path: Path) -> None:
    (tmp_path / "inner").write_text("Compression yes\n")
    (tmp_path / "outer").write_text(f"Include {tmp_path}/inner\nPort 2222\n")
    config = tmp_path / "config"
    config.write_text(f"Host gpu1\n  Include {tmp_path}/outer\nHost *\n  User alice\n")
    assert load_ssh_config(config, "gpu1").lookup("gpu1")["port"] == "2222"
    assert "port" not in load_ssh_config(config, "gpu2").lookup("gpu2")


def test_a_file_that_includes_itself_ends(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"Include {config}\nHost gpu1\n  Port 5\n")
    assert load_ssh_config(config).lookup("gpu1")["port"] == "5"


def test_the_users_file_comes_before_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host gpu1\n  Port 7\n")
    (tmp_path / "system").write_text("Port 8\nUser bob\n")
    monkeypatch.setattr("hvd_elastic.hosts.ssh_config.SYSTEM_CONFIG", str(tmp_path / "system"))
    loaded = load_ssh_config(None)
    assert (loaded.lookup("gpu1")["port"], loaded.lookup("gpu1")["user"]) == ("7", "bob")
    assert loaded.lookup("gpu2")["port"] == "8"


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(SshError, match=r"none cannot be read: No such file"):
        read_config_text(tmp_path / "none")
    broken = tmp_path / "broken"
    broken.write_text("Host gpu1\n  Port\n")
    with pytest.raises(SshError, match="broken"):
        load_ssh_config(broken)


def test_known_hosts_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path / ".ssh" / "known_hosts" in known_hosts_files({})
    entry = {"userknownhostsfile": "~/one %d/two", "globalknownhostsfile": "none"}
    assert known_hosts_files(entry) == [tmp_path / "one", tmp_path / "two"]


def test_the_configuration_of_a_virtual_cluster_is_found_beside_its_hostfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostfile, config = tmp_path / "hostfile", tmp_path / "ssh_config"
    assert config_beside(hostfile) is None
    config.write_text("Host *\n")
    assert config_beside(hostfile) is None, "nobody says that it belongs to the hostfile"
    config.write_text(f"{VIRTCLUST_MARK} Use it with: …\nHost a\n")
    assert config_beside(hostfile) == config
    monkeypatch.chdir(tmp_path)
    assert config_beside(Path("hostfile")) == config
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert config_beside(hostfile) is None, "another user's ProxyCommand would run as this one"


@pytest.mark.parametrize("outer", ["Host work-* desk", "Match originalhost work-*,desk"])
@pytest.mark.parametrize("inner", ["Host *", "Host * !other", "Match all"])
def test_blocks_of_an_included_file_count_where_it_is_included(
    tmp_path: Path, outer: str, inner: str
) -> None:
    (tmp_path / "deeper").write_text("Host *-1\n  Port 2222\n")
    (tmp_path / "inner").write_text(f"{inner}\n  User bob\n  Include {tmp_path}/deeper\n")
    config = tmp_path / "config"
    config.write_text(f"{outer}\n  Include {tmp_path}/inner\nHost *\n  User root\n")

    def looked_up(host: str) -> tuple[str, str]:
        of_ours = load_ssh_config(config, host).lookup(host)
        found = of_ours["user"], of_ours.get("port", "22")
        if ssh := shutil.which("ssh"):
            said = subprocess.run(
                [ssh, "-F", str(config), "-G", host], capture_output=True, text=True
            )
            theirs = dict(line.split(" ", 1) for line in said.stdout.splitlines() if " " in line)
            assert found == (theirs["user"], theirs["port"])
        return found

    assert looked_up("work-1") == ("bob", "2222")
    assert looked_up("desk") == ("bob", "22")
    assert looked_up("other-1") == ("root", "22")
