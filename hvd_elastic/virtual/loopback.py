"""Virtual hosts without root: addresses of 127/8, one user-mode sshd each.

They share the machine's processes, files and host name; what tells them apart is the address, and
the mark in the environment of everything started over ssh.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import re
import socket
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvd_elastic.errors import VirtualClusterError
from hvd_elastic.hosts.account import how_to_mend_shell, why_no_commands
from hvd_elastic.hosts.programs.processes import Process, all_processes, descendants, read
from hvd_elastic.virtual import plan, sshfiles
from hvd_elastic.virtual.holders import Holder, plain_environment, reap_started, wait_until_up
from hvd_elastic.virtual.marks import kill_all, marked_processes, marks, namespace_of
from hvd_elastic.virtual.state import ClusterState, HostState, HostStatus
from hvd_elastic.virtual.tools import find_tool

SCRIPT = Path(__file__).with_name("loopback.sh")

# Below the range from which the kernel takes ports for outgoing connections.
PORTS = range(20_000, 32_000)

SSHD_FOLDER = Path("/run/sshd")
SSHD_FOLDER_MODE = 0o711
"""Tells virtclust's folder from the system's, which has 755; sshd takes both."""


class Loopback:
    """The hosts of one cluster on the loopback interface.

    Args:
        folder: the cluster's folder; its name is the cluster's.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.folder = folder

    # ---- the whole cluster

    def prepare(self, state: ClusterState) -> ClusterState:
        """Choose a network of 127/8; nothing has to be made."""
        subnet = next(plan.loopback_subnets((), random.SystemRandom()))
        _provide_sshd_folder(self.folder / "id_ed25519")
        return replace(state, subnet=subnet)

    def free_port(self, address: str) -> int:
        """A port for a host's sshd."""
        rng = random.SystemRandom()
        for _ in range(100):
            port = rng.choice(PORTS)
            with socket.socket() as trial:
                try:
                    trial.bind((address, port))
                except OSError:
                    continue
                return port
        raise VirtualClusterError(
            f"no free port between {PORTS.start} and {PORTS.stop} on {address}; "
            "is 127.0.0.0/8 on the loopback interface? See 'ip address show lo'"
        )

    def publish(self, state: ClusterState) -> None:
        """Names are known to ssh only; there is nobody else to tell."""

    def remove(self, state: ClusterState | None) -> None:  # the processes tell all
        """End and take back everything but the folder; nothing need be there."""
        kill_all(self._processes_of, f"cluster {self.name}")
        reap_started()
        _remove_sshd_folder()

    # ---- single hosts

    def boot(self, state: ClusterState, hosts: Sequence[HostState]) -> None:
        """Start the hosts' sshd, all at the same time, and wait until they answer."""
        sshd = find_tool("sshd")
        started = []
        for host in hosts:
            folder = self.folder / "hosts" / host.name
            (folder / "sshd_config").write_text(
                sshfiles.sshd_config(
                    host, folder=folder, cluster_folder=self.folder, use_pam=_is_locked(state.user)
                )
            )
            holder = Holder(
                ["/bin/sh", str(SCRIPT), sshd, str(folder)],
                plain_environment(marks(self.folder, host.name)),
                folder / "boot.log",
            )
            started.append((host, holder))
        wait_until_up(self.folder, started)

    def crash(self, state: ClusterState, host: HostState, silent: bool) -> None:
        """End everything that runs on the host; its port refuses connections afterwards."""
        if silent:
            raise _needs_namespaces("a crash that peers do not notice")
        kill_all(lambda: self._processes_of(host.name), f"host {host.name}")
        reap_started()

    def set_link(self, host: HostState, status: HostStatus) -> None:
        raise _needs_namespaces("cutting a cable" if status == "cut" else "healing a cable")

    def pids(self, host: HostState, system: bool) -> set[int]:
        found = {process.pid for process in self._processes_of(host.name)}
        if not system:
            found -= {pid for pid in found if _is_holder(pid)}
            found -= {process.pid for process in self._listeners(host.name)}
        return found

    def local_pid(self, host: HostState, pid: int) -> int:
        """The machine's id of a process that is ``pid`` on the host: the same."""
        if pid not in self.pids(host, system=True):
            raise VirtualClusterError(f"host {host.name} has no process {pid}")
        return pid

    def inside(self, host: HostState, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` inside a host: there is no inside."""
        return list(argv)

    # ---- private

    def _processes_of(self, host: str | None = None) -> set[Process]:
        """The processes of one host, or of all."""
        roots = {*marked_processes(self.folder, host), *self._listeners(host)}
        # What a program starts with an empty environment is found below its parents only.
        return roots | {*descendants([process.pid for process in roots])} if roots else set()

    def _listeners(self, host: str | None) -> list[Process]:
        """The sshd that take connections, of one host or of all.

        Their environment is overwritten by their title, which holds their arguments.
        """
        hosts = os.fsencode(self.folder / "hosts") + b"/"
        wanted = hosts + os.fsencode(f"{host}/sshd_config") if host else hosts
        return [process for pid, process in _all_sshd().items() if wanted in read(pid, "cmdline")]


def _all_sshd() -> dict[int, Process]:
    return {pid: each for pid, each in all_processes().items() if read(pid, "comm") == b"sshd\n"}


def _needs_namespaces(what: str) -> VirtualClusterError:
    return VirtualClusterError(
        f"{what} needs hosts in network namespaces, and this cluster is on the loopback "
        "interface; make one as root, without --loopback"
    )


def _is_holder(pid: int) -> bool:
    return read(pid, "cmdline").split(b"\0")[1:2] == [os.fsencode(SCRIPT)]


def _provide_sshd_folder(some_key: Path) -> None:
    """Make the folder that sshd, run as root, drops its privileges in, when it is missing.

    Debian makes it when its ssh service starts, which it never does in a container.
    """
    if os.geteuid() != 0:
        return
    done = subprocess.run(
        [find_tool("sshd"), "-t", "-f", "/dev/null", "-h", str(some_key)],
        capture_output=True,
        text=True,
    )
    missing = re.search(r"Missing privilege separation directory: (\S+)", done.stderr)
    if missing is not None:
        folder = Path(missing[1])
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(SSHD_FOLDER_MODE)


def _remove_sshd_folder() -> None:
    """Take the folder back, when virtclust made it and nobody needs it any more."""
    with contextlib.suppress(OSError):
        if stat.S_IMODE(SSHD_FOLDER.stat().st_mode) == SSHD_FOLDER_MODE and os.geteuid() == 0:
            if not _sshd_is_running():
                SSHD_FOLDER.rmdir()


def _sshd_is_running() -> bool:
    """Whether an sshd lives that sees this machine's files, and so needs the folder."""
    own = namespace_of(os.getpid(), "mnt")
    return any(namespace_of(pid, "mnt") == own for pid in _all_sshd())


def _is_locked(user: str) -> bool:
    """Whether sshd would turn the account away unless PAM is asked."""
    try:
        with Path("/etc/shadow").open() as lines:
            return any(line.startswith(f"{user}:!") for line in lines)
    except OSError:
        # Nor can sshd, run by the same user, see it.
        return False


def login_user() -> str:
    """The user who logs in, which is the one who makes the cluster.

    Raises:
        VirtualClusterError: the user has no entry or no login shell.
    """
    try:
        entry = pwd.getpwuid(os.geteuid())
    except KeyError:
        raise VirtualClusterError(
            f"user id {os.geteuid()} has no entry in /etc/passwd, so nobody can log in as it; "
            "run virtclust as a named user"
        ) from None
    fault = why_no_commands(entry)
    if fault is not None:
        raise VirtualClusterError(
            f"{fault}. Give it one ({how_to_mend_shell(entry)}), or make the cluster as another "
            "user"
        )
    return entry.pw_name
