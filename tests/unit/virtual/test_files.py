from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvd_elastic.errors import VirtualClusterError
from hvd_elastic.hosts.hostfile import parse_hosts
from hvd_elastic.virtual import sshfiles
from hvd_elastic.virtual.netns import hidden_shares
from hvd_elastic.virtual.state import (
    ClusterState,
    HostState,
    cluster_folder,
    cluster_names,
    load_state,
    locked,
    save_state,
)

HOSTS = (
    HostState("vc1-1", 1, "10.99.7.1", 22, "up"),
    HostState("vc1-2", 2, "10.99.7.2", 2200, "cut"),
)
STATE = ClusterState(
    name="vc1",
    backend="netns",
    slots=2,
    user="root",
    subnet="10.99.7.0/24",
    rate_bits_per_s=10**9,
    cpus=0.5,
    shares=("/tmp/x",),
    hostfiles=("/somewhere/hosts",),
    hosts=HOSTS,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    return tmp_path


def test_a_state_reads_back(home: Path) -> None:
    folder = cluster_folder("vc1")
    folder.mkdir(parents=True)
    save_state(folder, STATE)
    assert load_state(folder) == STATE
    assert cluster_names() == ["vc1"]


def test_no_state_is_none_and_a_damaged_one_says_how_to_go_on(home: Path) -> None:
    folder = cluster_folder("vc1")
    assert load_state(folder) is None
    folder.mkdir(parents=True)
    for damage in ("", "{}", '{"format": 99}', '{"format": 1, "hosts": 3}'):
        (folder / "state.json").write_text(damage)
        with pytest.raises(VirtualClusterError, match="virtclust down --name vc1"):
            load_state(folder)


def test_a_host_is_found_by_name_and_number() -> None:
    assert STATE.host("vc1-2") is STATE.host("2") is HOSTS[1]
    with pytest.raises(VirtualClusterError, match="vc1-1, vc1-2"):
        STATE.host("vc1-3")
    changed = STATE.with_status("vc1-2", "off")
    assert [host.status for host in changed.hosts] == ["up", "off"]


def test_the_lock_survives_that_the_folder_is_removed(home: Path) -> None:
    with locked(home / "virtual"):
        (home / "virtual").rmdir()
    with locked(home / "virtual"):
        assert (home / "virtual").is_dir()


def test_an_unusable_home_is_named(home: Path) -> None:
    (home / "file").write_text("")
    with pytest.raises(VirtualClusterError, match="HVD_ELASTIC_HOME"), locked(home / "file/x"):
        pass


def test_the_client_configuration_pins_keys_and_identity() -> None:
    text = sshfiles.client_config(
        STATE, "root", Path("/state/vc 1/id_ed25519"), Path("/state/vc 1/known_hosts")
    )
    first, second = text.split("Host vc1-")[1:]
    assert "HostName 10.99.7.1\n" in first
    assert "Port 2200\n" in second
    for block in (first, second):
        assert "StrictHostKeyChecking yes" in block
        assert "IdentitiesOnly yes" in block
        assert "ConnectTimeout 10\n" in block
        assert "ServerAliveInterval 5\n" in block
        assert 'IdentityFile "/state/vc 1/id_ed25519"' in block
        assert 'UserKnownHostsFile "/state/vc 1/known_hosts"' in block


def test_known_hosts_name_the_port_only_where_it_is_not_22(tmp_path: Path) -> None:
    for host in HOSTS:
        folder = tmp_path / "hosts" / host.name
        folder.mkdir(parents=True)
        (folder / f"{sshfiles.HOST_KEY}.pub").write_text("ssh-ed25519 AAAA virtclust\n")
    assert sshfiles.known_hosts(STATE, tmp_path).splitlines() == [
        "vc1-1,10.99.7.1 ssh-ed25519 AAAA",
        "[vc1-2]:2200,[10.99.7.2]:2200 ssh-ed25519 AAAA",
    ]


def test_the_hostfile_reads_back() -> None:
    hosts = parse_hosts(sshfiles.hostfile_text(STATE), "here")
    assert [(host.name, host.slots) for host in hosts.hosts] == [("vc1-1", 2), ("vc1-2", 2)]


def test_hosts_know_one_another_and_the_leader() -> None:
    lines = sshfiles.etc_hosts(STATE, ("10.99.7.254", "laptop")).splitlines()
    assert "10.99.7.2 vc1-2" in lines
    assert lines[-1] == "10.99.7.254 leader laptop"
    # A leader that is called as one of the hosts must not take over its name.
    namesake = sshfiles.etc_hosts(STATE, ("10.99.7.254", "vc1-1")).splitlines()
    assert namesake[-1] == "10.99.7.254 leader"


def test_an_sshd_takes_keys_only_and_forwards_nothing() -> None:
    text = sshfiles.sshd_config(
        replace(HOSTS[0]), folder=Path("/a b/100%"), cluster_folder=Path("/state/vc1")
    )
    assert 'AuthorizedKeysFile "/a b/100%%/authorized_keys"' in text
    assert 'HostKey "/a b/100%/ssh_host_ed25519_key"' in text
    for line in ("PasswordAuthentication no", "DisableForwarding yes", "UsePAM no"):
        assert line in text.splitlines()
    assert "SetEnv HVD_ELASTIC_VIRTUAL=/state/vc1 HVD_ELASTIC_VIRTUAL_HOST=vc1-1 SHLVL=1" in text


def test_a_path_that_ssh_cannot_be_told_is_refused() -> None:
    with pytest.raises(VirtualClusterError, match="HVD_ELASTIC_HOME"):
        sshfiles.quoted('/with "quotes"/x')


def test_shares_are_those_that_a_host_would_hide() -> None:
    asked = ["/home/me/code", "/tmp/run/a", "/tmp/run", "/data/sets", "/tmp", "/runner/x"]
    assert hidden_shares(asked) == ("/tmp/run", "/data/sets")
