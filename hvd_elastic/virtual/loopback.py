"""Virtual hosts without root: one address of 127/8 and one sshd of the user for each.

They share the machine's processes, files and host name. They differ in the address, and in the mark
in the environment of all processes started over ssh.
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
from hvd_elastic.programs.processes import Process, all_processes, descendants, read
from hvd_elastic.virtual import plan, sshfiles
from hvd_elastic.virtual.processes import (
    Holder,
    find_tool,
    kill_all,
    marked_processes,
    marks,
    namespace_of,
    plain_environment,
    reap_started,
    wait_until_up,
)
from hvd_elastic.virtual.state import ClusterState, HostState, HostStatus

SCRIPT = Path(__file__).with_name("loopback.sh")

# Below the kernel's range of ports for outgoing connections.
PORTS = range(20_000, 32_000)

SSHD_FOLDER = Path("/run/sshd")
SSHD_FOLDER_MODE = 0o711
"""Mode of the folder if virtclust created it; the system's has 755, and sshd accepts both."""


class Loopback:
    """Hosts of one cluster on the loopback interface.

    Args:
        folder: folder of the cluster; its name is the cluster's name.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.folder = folder

    # ---- the whole cluster

    def prepare(self, state: ClusterState) -> ClusterState:
        """Choose a network of 127/8; return the state with it."""
        subnet = next(plan.loopback_subnets((), random.SystemRandom()))
        _provide_sshd_folder(self.folder / "id_ed25519")
        return replace(state, subnet=subnet)

    def free_port(self, address: str) -> int:
        """Return a free port for a host's sshd."""
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
        """Do nothing: only ssh knows the hosts' names, by its configuration."""

    def remove(self, state: ClusterState | None) -> None:  # processes are found without it
        """End all processes and remove everything but the folder, as far as it exists."""
        kill_all(self._processes_of, f"cluster {self.name}")
        reap_started()
        _remove_sshd_folder()

    # ---- single hosts

    def boot(self, state: ClusterState, hosts: Sequence[HostState]) -> None:
        """Start the sshd of all hosts at the same time and wait until they answer."""
        sshd = find_tool("sshd")
        started = []
        for host in hosts:
            folder = self.folder / "hosts" / host.name
            (folder / "sshd_config").touch(mode=0o600)
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
        """End all processes of the host; its port then refuses connections."""
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
        """Return the id on this machine of the host's process ``pid``, which is the same."""
        if pid not in self.pids(host, system=True):
            raise VirtualClusterError(f"host {host.name} has no process {pid}")
        return pid

    def inside(self, host: HostState, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs ``argv`` on a host, which is ``argv`` itself."""
        return list(argv)

    # ---- private

    def _processes_of(self, host: str | None = None) -> set[Process]:
        """Return the processes of one host, or of all hosts."""
        roots = {*marked_processes(self.folder, host), *self._listeners(host)}
        # A process started with an empty environment has no mark and is found by its parents.
        return roots | {*descendants([process.pid for process in roots])} if roots else set()

    def _listeners(self, host: str | None) -> list[Process]:
        """Return the listening sshd processes of one host, or of all hosts.

        They have no mark, because sshd overwrites its environment with its process title. The title
        contains the path of their configuration.
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
    """Create sshd's privilege separation folder, which it needs as root, if it is missing.

    Debian creates it when the ssh service starts, which never happens in a container.
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
    """Remove the privilege separation folder if virtclust created it and no sshd needs it."""
    with contextlib.suppress(OSError):
        if stat.S_IMODE(SSHD_FOLDER.stat().st_mode) == SSHD_FOLDER_MODE and os.geteuid() == 0:
            if not _sshd_is_running():
                SSHD_FOLDER.rmdir()


def _sshd_is_running() -> bool:
    """Return whether an sshd is running in this mount namespace, which needs the folder."""
    own = namespace_of(os.getpid(), "mnt")
    return any(namespace_of(pid, "mnt") == own for pid in _all_sshd())


def _is_locked(user: str) -> bool:
    """Return whether sshd would refuse the account without PAM, because its password is locked."""
    try:
        with Path("/etc/shadow").open() as lines:
            return any(line.startswith(f"{user}:!") for line in lines)
    except OSError:
        # Then sshd, run by the same user, cannot read it either.
        return False


def login_user() -> str:
    """Return the name of the current user, as whom ssh logs in to the hosts.

    Raises:
        VirtualClusterError: the user has no entry in /etc/passwd or no login shell.
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
