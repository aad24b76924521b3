from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from hvd_elastic.hosts.fanout import HostResult, Outcome
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.known_hosts import (
    HostKey,
    KeyState,
    KnownHosts,
    fingerprint,
    forget,
    known_name,
    remember,
)
from hvd_elastic.tools.trust import _assess

KEY = HostKey("ssh-ed25519", b"first key")
OTHER = HostKey("ssh-ed25519", b"second key")
RSA = HostKey("ssh-rsa", b"an rsa key")


def line(names: str, key: HostKey, marker: str = "") -> str:
    return f"{marker}{names} {key.key_type} {base64.b64encode(key.blob).decode()} a comment\n"


def check(tmp_path: Path, text: str, name: str, key: HostKey = KEY) -> KeyState:
    path = tmp_path / "known"
    path.write_text(text)
    return KnownHosts.load([path, tmp_path / "missing", tmp_path]).check(name, key)[0]


@pytest.mark.parametrize(
    ("names", "name", "state"),
    [
        ("gpu1", "gpu1", KeyState.KNOWN),
        ("GPU1", "gpu1", KeyState.KNOWN),
        ("gpu1,10.0.0.1", "10.0.0.1", KeyState.KNOWN),
        ("gpu?", "gpu1", KeyState.KNOWN),
        ("*.example", "gpu1.example", KeyState.KNOWN),
        ("gpu*,!gpu1", "gpu1", KeyState.UNKNOWN),
        ("gpu1", "gpu10", KeyState.UNKNOWN),
        ("[gpu1]:2222", "[gpu1]:2222", KeyState.KNOWN),
        ("[gpu1]:2222", "gpu1", KeyState.UNKNOWN),
        ("gpu1", "[gpu1]:2222", KeyState.KNOWN),
        ("[gpu1]:22", "g", KeyState.UNKNOWN),
    ],
)
def test_names(tmp_path: Path, names: str, name: str, state: KeyState) -> None:
    assert check(tmp_path, line(names, KEY), name) is state


def test_a_changed_key(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text("# comment\n\nbroken line\n" + line("gpu1", OTHER))
    state, known = KnownHosts.load([path]).check("gpu1", KEY)
    assert state is KeyState.CHANGED
    assert known is not None
    assert (known.path, known.line, known.key) == (path, 4, OTHER)


def test_any_of_several_keys_is_good(tmp_path: Path) -> None:
    text = line("gpu1", OTHER) + line("gpu1", KEY)
    assert check(tmp_path, text, "gpu1") is KeyState.KNOWN
    assert check(tmp_path, text, "gpu1", HostKey("ssh-ed25519", b"third")) is KeyState.CHANGED


def test_a_key_of_another_type_than_the_known_one_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text(line("gpu1", RSA) + line("gpu1", OTHER))
    state, known = KnownHosts.load([path]).check("gpu1", HostKey("ecdsa-sha2-nistp256", b"e"))
    assert state is KeyState.CHANGED
    assert known is not None
    assert known.key == RSA
    assert check(tmp_path, line("gpu2", RSA), "gpu1") is KeyState.UNKNOWN


def test_a_changed_key_under_a_port_is_changed_even_if_the_bare_name_differs(
    tmp_path: Path,
) -> None:
    text = line("[gpu1]:2222", OTHER) + line("gpu1", RSA)
    assert check(tmp_path, text, "[gpu1]:2222") is KeyState.CHANGED


def test_revoked_wins(tmp_path: Path) -> None:
    text = line("gpu1", KEY) + line("*", KEY, "@revoked ")
    assert check(tmp_path, text, "gpu1") is KeyState.REVOKED


def test_a_certificate_authority_is_no_host_key(tmp_path: Path) -> None:
    for name in ("gpu1", "[gpu1]:2222"):
        assert check(tmp_path, line("*", KEY, "@cert-authority "), name) is KeyState.UNKNOWN


def test_key_types_of_a_host(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text(line("gpu1", RSA) + line("gpu1", KEY) + line("gpu2", KEY))
    known = KnownHosts.load([path])
    assert known.key_types("gpu1") == ("ssh-rsa", "ssh-ed25519")
    assert known.key_types("[gpu1]:2222") == ("ssh-rsa", "ssh-ed25519")


def test_lines_are_found_in_their_order_whatever_their_form(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text(
        line("gpu*", KEY) + line("GPU1,10.0.0.1", OTHER) + line("gpu2", RSA) + line("gpu1", RSA)
    )
    known = KnownHosts.load([path])
    assert [key.line for key in known.lookup("gpu1")] == [1, 2, 4]
    assert [key.line for key in known.lookup("10.0.0.1")] == [2]
    assert known.lookup("node1") == ()


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "known"
    assert check(tmp_path, line("gpu1", KEY), "gpu1") is KeyState.KNOWN
    assert KnownHosts.load([path]) is KnownHosts.load([path])
    remember(path, [("gpu2", KEY)])
    assert KnownHosts.load([path]).check("gpu2", KEY)[0] is KeyState.KNOWN
    path.unlink()
    assert KnownHosts.load([path]).keys == ()


def test_remember_adds_lines_even_to_a_file_without_a_last_line_end(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "known"
    remember(path, [("gpu1", KEY)])
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(path.read_text().rstrip("\n"))
    remember(path, [(known_name("gpu2", 2222), OTHER)])
    known = KnownHosts.load([path])
    assert known.check("gpu1", KEY)[0] is KeyState.KNOWN
    assert known.check("[gpu2]:2222", OTHER)[0] is KeyState.KNOWN
    assert len(known.keys) == 2


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_forget_leaves_the_other_hosts_and_makes_room_for_a_new_key(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(line("gpu1", KEY) + "# gpu1\n" + line("gpu2", KEY) + line("gpu1", RSA))
    size = path.stat().st_size
    forget(path, "gpu1")
    assert path.stat().st_size == size
    known = KnownHosts.load([path])
    assert known.check("gpu1", OTHER)[0] is KeyState.UNKNOWN
    assert known.check("gpu2", KEY)[0] is KeyState.KNOWN
    remember(path, [("gpu1", OTHER)])
    assert KnownHosts.load([path]).check("gpu1", OTHER)[0] is KeyState.KNOWN


def test_as_ssh_keygen_writes_and_prints(tmp_path: Path) -> None:
    key_path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key_path)], check=True)
    kind, blob = (tmp_path / "key.pub").read_text().split()[:2]
    key = HostKey(kind, base64.b64decode(blob))
    printed = subprocess.run(
        ["ssh-keygen", "-lf", f"{key_path}.pub"], capture_output=True, text=True, check=True
    )
    assert fingerprint(key.blob) == printed.stdout.split()[1]

    path = tmp_path / "known"
    remember(path, [("[gpu1]:2222", key), ("gpu2", key)])
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(path)], check=True, capture_output=True)
    assert "gpu" not in path.read_text()
    known = KnownHosts.load([path])
    assert known.check("[gpu1]:2222", key)[0] is KeyState.KNOWN
    assert known.check("gpu2", key)[0] is KeyState.KNOWN
    assert known.check("gpu3", key)[0] is KeyState.UNKNOWN


def test_the_removal_of_a_key_names_the_file_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "known hosts"
    path.write_text(line("n1", KEY))
    state, known = KnownHosts.load([path]).check("n1", OTHER)
    assert (state, known and known.removal("n1")) == (
        KeyState.CHANGED,
        f"ssh-keygen -R n1 -f '{path}'",
    )
    shown = HostResult(Host("n1"), Outcome.OK, 0.1, ("n1", OTHER, state, known))
    assert f"remove the old key with: ssh-keygen -R n1 -f '{path}'" in _assess(shown).message
