"""Keys and configuration of the virtual hosts' sshd, and what a client needs to reach them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from hvd_elastic.errors import VirtualClusterError
from hvd_elastic.hosts.hostfile import Host, format_hostfile
from hvd_elastic.hosts.ssh_config import VIRTCLUST_MARK
from hvd_elastic.virtual.marks import marks
from hvd_elastic.virtual.state import ClusterState, HostState, unwritable
from hvd_elastic.virtual.tools import find_tool

HOST_KEY = "ssh_host_ed25519_key"


def quoted(text: str) -> str:
    """A word of an OpenSSH configuration file; only what needs quotes gets them."""
    if '"' in text or "\n" in text:
        raise VirtualClusterError(
            f"ssh cannot be told of the path {text!r}: it holds a quote or a line break; "
            "set HVD_ELASTIC_HOME to another folder"
        )
    return f'"{text}"' if any(letter in text for letter in " \t#'\\=") else text


def make_keys(paths: Iterable[Path]) -> None:
    """An ed25519 key pair at each path, all at the same time; what is there is kept."""
    keygen = find_tool("ssh-keygen")
    started = [
        (
            path,
            subprocess.Popen(
                [keygen, "-q", "-t", "ed25519", "-N", "", "-C", "virtclust", "-f", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ),
        )
        for path in paths
        if not path.exists()
    ]
    for path, process in started:
        words, _ = process.communicate()
        if process.returncode != 0:
            raise unwritable(path, f"ssh-keygen: {words.strip()}")


def sshd_config(
    host: HostState, *, folder: Path, cluster_folder: Path, use_pam: bool = False
) -> str:
    """Configuration of one host's sshd.

    Args:
        host: the host.
        folder: where the host's own files are, as its sshd sees them.
        cluster_folder: the cluster's state folder, part of the sessions' mark.
        use_pam: whether PAM judges the account; without it, sshd refuses locked accounts.
    """
    # A per cent sign in a file name would be read as the start of a token.
    authorized_keys = quoted(str(folder / "authorized_keys").replace("%", "%%"))
    session = " ".join(
        quoted(f"{key}={value}") if " " in value else f"{key}={value}"
        for key, value in marks(cluster_folder, host.name).items()
    )
    lines = [
        "# Written by virtclust.",
        f"Port {host.port}",
        f"ListenAddress {host.address}",
        f"HostKey {quoted(str(folder / HOST_KEY))}",
        f"PidFile {quoted(str(folder / 'sshd.pid'))}",
        f"AuthorizedKeysFile {authorized_keys}",
        "LogLevel VERBOSE",
        "AuthenticationMethods publickey",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        f"UsePAM {'yes' if use_pam else 'no'}",
        # The key is in a folder of virtclust's; whether its parents are writable says nothing.
        "StrictModes no",
        "DisableForwarding yes",
        "UseDNS no",
        "PrintMotd no",
        "PrintLastLog no",
        "AcceptEnv LANG LC_*",
        # A leader opens many sessions at once.
        "MaxStartups 200",
        "MaxSessions 200",
        "LoginGraceTime 20",
        # Bash reads ~/.bashrc in a session of sshd unless it takes itself for a nested shell. A
        # host that is crashed in the middle of it would leave locks among this user's files.
        f"SetEnv {session} SHLVL=1",
        "Subsystem sftp internal-sftp",
    ]
    return "\n".join(lines) + "\n"


def client_config(cluster: ClusterState, folder: Path) -> str:
    """The ssh configuration that knows every host by its name (``ssh -F``)."""
    blocks = [f"{VIRTCLUST_MARK} Use it with: ssh -F THIS_FILE HOST\n"]
    for host in cluster.hosts:
        lines = [
            f"Host {host.name}",
            f"    HostName {host.address}",
            f"    Port {host.port}",
            f"    User {cluster.user}",
            f"    IdentityFile {quoted(str(folder / 'id_ed25519').replace('%', '%%'))}",
            "    IdentitiesOnly yes",
            "    PreferredAuthentications publickey",
            f"    UserKnownHostsFile {quoted(str(folder / 'known_hosts').replace('%', '%%'))}",
            "    GlobalKnownHostsFile /dev/null",
            "    StrictHostKeyChecking yes",
            # The post-quantum exchange costs more time than everything else in a login here.
            "    KexAlgorithms curve25519-sha256",
        ]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def known_hosts(cluster: ClusterState, folder: Path) -> str:
    """The hosts' keys, under their names and addresses."""
    lines = []
    for host in cluster.hosts:
        key = (folder / "hosts" / host.name / f"{HOST_KEY}.pub").read_text().split()[:2]
        names = [host.name, host.address]
        if host.port != 22:
            names = [f"[{name}]:{host.port}" for name in names]
        lines.append(f"{','.join(names)} {' '.join(key)}\n")
    return "".join(lines)


def hostfile_text(cluster: ClusterState) -> str:
    """The hostfile of the whole cluster."""
    return format_hostfile([Host(host.name, slots=cluster.slots) for host in cluster.hosts])


def etc_hosts(cluster: ClusterState, leader: tuple[str, str]) -> str:
    """/etc/hosts inside the hosts: they know one another and the leader (address, name)."""
    lines = [
        "127.0.0.1 localhost",
        "::1 localhost ip6-localhost ip6-loopback",
        *(f"{host.address} {host.name}" for host in cluster.hosts),
    ]
    names = {host.name for host in cluster.hosts}
    others = [name for name in ("leader", leader[1]) if name not in names and name != "localhost"]
    lines.append(" ".join([leader[0], *dict.fromkeys(others)]))
    return "\n".join(lines) + "\n"
