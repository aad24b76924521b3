"""Keys and configuration of the virtual hosts' sshd and of the ssh clients that log in to them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from hvd_elastic.errors import VirtualClusterError
from hvd_elastic.hosts.hostfile import Host, format_hostfile
from hvd_elastic.hosts.ssh_config import VIRTCLUST_MARK
from hvd_elastic.virtual.processes import find_tool, marks
from hvd_elastic.virtual.state import ClusterState, HostState, unwritable

HOST_KEY = "ssh_host_ed25519_key"
USER_KEYS = "users"
"""Folder of a host with a file for each account, its authorized keys."""


def quoted(text: str) -> str:
    """Return a word for an OpenSSH configuration file, with quotes if it needs them."""
    if '"' in text or "\n" in text:
        raise VirtualClusterError(
            f"ssh cannot be told of the path {text!r}: it holds a quote or a line break; "
            "set HVD_ELASTIC_HOME to another folder"
        )
    return f'"{text}"' if any(letter in text for letter in " \t#'\\=") else text


def make_keys(paths: Iterable[Path]) -> None:
    """Create an ed25519 key pair at each path in parallel; existing ones are kept."""
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
    host: HostState,
    *,
    folder: Path,
    cluster_folder: Path,
    use_pam: bool = False,
    with_users: bool = False,
) -> str:
    """Return the configuration of one host's sshd.

    Args:
        folder: path of the host's own files, as its sshd sees it.
        cluster_folder: folder of the cluster, part of the mark of sessions.
        use_pam: whether to check accounts with PAM; without it, sshd refuses locked accounts.
        with_users: whether there are accounts with keys of their own.
    """
    # sshd would read a percent sign in a file name as the start of a token.
    keys = [str(folder / "authorized_keys").replace("%", "%%")]
    if with_users:
        keys.append(str(folder / USER_KEYS).replace("%", "%%") + "/%u")
    authorized_keys = " ".join(map(quoted, keys))
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
        # sshd would refuse the key if a folder above virtclust's were writable by others.
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
        # Bash reads ~/.bashrc in an ssh session unless SHLVL says that it is a nested shell.
        # A host that crashes while it does so could leave lock files in the user's home folder.
        f"SetEnv {session} SHLVL=1",
        "Subsystem sftp internal-sftp",
    ]
    return "\n".join(lines) + "\n"


def client_config(cluster: ClusterState, user: str, key: Path, known: Path) -> str:
    """Return an ssh configuration with an entry for each host (for ``ssh -F``).

    Args:
        user: who logs in, with the key at ``key``.
        known: path of the file with the hosts' keys.
    """
    blocks = [f"{VIRTCLUST_MARK} Use it with: ssh -F THIS_FILE HOST\n"]
    for host in cluster.hosts:
        lines = [
            f"Host {host.name}",
            f"    HostName {host.address}",
            f"    Port {host.port}",
            f"    User {user}",
            f"    IdentityFile {quoted(str(key).replace('%', '%%'))}",
            "    IdentitiesOnly yes",
            "    PreferredAuthentications publickey",
            f"    UserKnownHostsFile {quoted(str(known).replace('%', '%%'))}",
            "    GlobalKnownHostsFile /dev/null",
            "    StrictHostKeyChecking yes",
            # The post-quantum key exchange would take longer than the rest of a login.
            "    KexAlgorithms curve25519-sha256",
            # A host that is cut or whose sshd hangs is an error, not an endless wait.
            "    ConnectTimeout 10",
            "    ServerAliveInterval 5",
            "    ServerAliveCountMax 2",
        ]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def known_hosts(cluster: ClusterState, folder: Path) -> str:
    """Return a known_hosts file with the hosts' keys, by name and address."""
    lines = []
    for host in cluster.hosts:
        key = (folder / "hosts" / host.name / f"{HOST_KEY}.pub").read_text().split()[:2]
        names = [host.name, host.address]
        if host.port != 22:
            names = [f"[{name}]:{host.port}" for name in names]
        lines.append(f"{','.join(names)} {' '.join(key)}\n")
    return "".join(lines)


def hostfile_text(cluster: ClusterState) -> str:
    """Return the hostfile of the whole cluster."""
    return format_hostfile([Host(host.name, slots=cluster.slots) for host in cluster.hosts])


def etc_hosts(cluster: ClusterState, leader: tuple[str, str]) -> str:
    """Return /etc/hosts for the hosts, with all hosts and the leader (address, name)."""
    lines = [
        "127.0.0.1 localhost",
        "::1 localhost ip6-localhost ip6-loopback",
        *(f"{host.address} {host.name}" for host in cluster.hosts),
    ]
    names = {host.name for host in cluster.hosts}
    others = [name for name in ("leader", leader[1]) if name not in names and name != "localhost"]
    lines.append(" ".join([leader[0], *dict.fromkeys(others)]))
    return "\n".join(lines) + "\n"
