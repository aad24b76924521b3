"""Start, limit, find and end the processes of a virtual cluster; run system programs.

All processes of a cluster have two variables in their environment: the cluster's folder and the
host's name. Child processes inherit them. Unlike recorded process ids they are never out of date,
and they are found even if the process that created the cluster was killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_elastic.errors import VirtualClusterError
from hvd_elastic.programs.processes import (
    Process,
    all_processes,
    end_processes,
    environment,
    own_ancestors,
    read_process,
)
from hvd_elastic.virtual.state import HostState

# The PATH of a user who is not root often lacks the sbin folders.
_SEARCH_PATH = os.pathsep.join(
    [os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"]
)
_LIMIT_S = 20.0  # far above what any of them takes
_PACKAGES = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "useradd": "passwd",
    "userdel": "passwd",
    "groupadd": "passwd",
    "groupdel": "passwd",
}


def find_tool(name: str) -> str:
    """Return the absolute path of a program; sshd must be started by one."""
    path = shutil.which(name, path=_SEARCH_PATH)
    if path is None:
        raise VirtualClusterError(
            f"a virtual cluster needs the program '{name}', which is not installed; "
            f"install it with: sudo apt-get install {_PACKAGES[name]}"
        )
    # Resolving links would lose the name by which busybox knows the program.
    return os.path.abspath(path)  # noqa: PTH100


def run_tool(argv: Sequence[str], *, text_in: str = "") -> str:
    """Run a program and return its output.

    Raises:
        VirtualClusterError: it failed or timed out; with its error output.
    """
    command = [find_tool(argv[0]), *argv[1:]]
    try:
        done = subprocess.run(
            command, input=text_in, capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise VirtualClusterError(
            f"'{' '.join(argv)}' gave no answer for {_LIMIT_S:g} s"
        ) from error
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or "no message").replace("\n", "; ")
        raise VirtualClusterError(f"'{' '.join(argv)}' failed: {words}")
    return done.stdout


CLUSTER_MARK = "HVD_ELASTIC_VIRTUAL"
HOST_MARK = "HVD_ELASTIC_VIRTUAL_HOST"

SWITCH = "(switch)"
"""Host mark of the process that holds the bridge; not a valid host name."""

LIMIT_S = 10.0
"""Time within which killed processes must end."""


def marks(folder: Path, host: str) -> dict[str, str]:
    """Return the variables that mark a process of this host."""
    return {CLUSTER_MARK: str(folder), HOST_MARK: host}


def marked_processes(folder: Path, host: str | None = None) -> dict[Process, str]:
    """Return the processes of the cluster in ``folder``, or of one of its hosts, with their host.

    The caller and its ancestors are left out, since a command inside a host must not end itself,
    and so are the processes of containers: the same path is another folder there.
    """
    spared = own_ancestors()
    found = {}
    for process in all_processes().values():
        variables = environment(process.pid)
        owner = variables.get(HOST_MARK, "")
        if variables.get(CLUSTER_MARK) == str(folder) and host in (None, owner):
            if process.pid not in spared and not _is_elsewhere(process.pid, str(folder)):
                found[process] = owner
    return found


def marked_clusters() -> set[str]:
    """Return the folders of all clusters that have a process."""
    found = {pid: environment(pid).get(CLUSTER_MARK) for pid in all_processes()}
    return {
        folder
        for pid, folder in found.items()
        if folder is not None and not _is_elsewhere(pid, folder)
    }


def _is_elsewhere(pid: int, folder: str) -> bool:
    """Return whether the path of a cluster's folder is another folder for this process."""
    theirs = Path(f"/proc/{pid}/root{folder}")
    try:
        return not theirs.samefile(folder)
    except OSError:
        return theirs.exists()


def processes_in_namespace(inode: int) -> list[Process]:
    """Return the processes in the pid namespace of this inode."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    # Reading the entry of every process would take several times as long.
    inside = [read_process(pid) for pid in pids if namespace_of(pid, "pid") == inode]
    return [process for process in inside if process is not None]


def namespace_of(pid: int, kind: str) -> int | None:
    """Return the inode of a process's namespace; None if it cannot be read."""
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino  # noqa: PTH116  # hot loop
    except OSError:
        return None


def kill_all(find: Callable[[], Iterable[Process]], what: str) -> None:
    """Kill the processes that ``find`` returns with SIGKILL, until it returns none.

    Raises:
        VirtualClusterError: a process does not end.
    """
    ended = end_processes(find, 0.0, LIMIT_S)
    left = [str(pid) for (pid, _), how in sorted(ended.items()) if how == "left"]
    if left:
        raise VirtualClusterError(
            f"processes of {what} did not end within {LIMIT_S:g} s of kill -9: {', '.join(left)}; "
            "they may hang in the kernel (a dead disk or network file system); repeat the command "
            "when they are gone"
        )


# Interval at which a starting sshd is tried.
POLL_S = 0.01
_UP_S = 30.0
"""How long a process may take to say that it is ready [s]."""
_TOLD_LINES = 4  # of a log in a message

# Keeps references to processes that outlive their holder, so that they can be reaped and Popen does
# not warn of them.
_started: list[subprocess.Popen[bytes]] = []


def plain_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return a minimal environment with ``extra`` added, independent of the caller's."""
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **extra}


class Holder:
    """A process in its own session that exchanges a few lines with the caller when it starts.

    Args:
        argv: command line.
        environment: complete environment of the process.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                list(argv),
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd="/",
                # Ctrl-C in the terminal is for the caller, who then removes the cluster.
                start_new_session=True,
            )
        self._heard = b""
        _started.append(self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def expect(self, word: str, what: str) -> None:
        """Wait until the process prints the line ``word``; ``what`` names it in errors."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + _UP_S
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise VirtualClusterError(
                    f"{what} gave no sign of life for {_UP_S:g} s.{last_lines(self.log)}"
                )
            chunk = os.read(descriptor, 4096)
            if not chunk:
                raise VirtualClusterError(f"{what} could not be made.{last_lines(self.log)}")
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        assert line.decode() == word, f"{what} said {line!r} instead of {word!r}"

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        # If the process is dead, expect() reports the reason from its log.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()

    def let_go(self) -> None:
        """Close the pipes to the process and leave it running."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def last_lines(log: Path) -> str:
    """Return the last lines of a log as part of a message; "" if there are none."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()[-_TOLD_LINES:]
    except OSError:
        return ""
    return f" It said: {'; '.join(lines)}" if lines else ""


def wait_for_sshd(address: str, port: int, what: str, log: Path) -> None:
    """Wait until an sshd sends its greeting at this address."""
    deadline = time.monotonic() + _UP_S
    while True:
        try:
            with socket.create_connection((address, port), timeout=1.0) as connection:
                if connection.recv(4) == b"SSH-":
                    return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise VirtualClusterError(
                f"sshd of {what} does not answer at {address}:{port}.{last_lines(log)}"
            )
        time.sleep(POLL_S)


def wait_until_up(cluster: Path, started: Sequence[tuple[HostState, Holder]]) -> None:
    """Wait until the hosts' first processes are ready and their sshd accept connections.

    Args:
        started: hosts and their first processes, whose pipes are closed.
    """
    for host, holder in started:
        holder.expect("ready", f"host {host.name}")
        holder.let_go()
    for host, _ in started:
        log = cluster / "hosts" / host.name / "sshd.log"
        wait_for_sshd(host.address, host.port, f"host {host.name}", log)


def reap_started() -> None:
    """Reap the processes started here that have ended."""
    for process in list(_started):
        if process.poll() is not None:
            _started.remove(process)


PERIOD_US = 10_000
"""Period of a quota. With the kernel's default of 100 ms, half a core would be a whole one that
stops for 50 ms at a time, which is as long as whole training steps."""
LEAST_QUOTA_US = 1000
"""What the kernel takes."""


@dataclass(frozen=True)
class CpuGroups:
    """Control groups of one cluster, at ``<mount>/<name>/<host>``.

    Attributes:
        version: version of the control group file system, 1 or 2.
    """

    folder: Path
    version: int

    @classmethod
    def find(cls, name: str) -> CpuGroups | None:
        """Return the groups of that name, existing or not; None if no CPU controller is mounted."""
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            mount = Path(before.split(" ")[4])
            if kind == "cgroup" and "cpu" in options.split(","):
                return cls(mount / name, 1)
            if kind == "cgroup2":
                controllers = mount / "cgroup.controllers"
                if controllers.is_file() and "cpu" in controllers.read_text().split():
                    return cls(mount / name, 2)
        return None

    def make(self, host: str, cpus: float) -> Path:
        """Create a host's group, limited to ``cpus`` cores; return its folder."""
        group = self.folder / host
        try:
            group.mkdir(parents=True, exist_ok=True)
            quota = max(int(cpus * PERIOD_US), LEAST_QUOTA_US)
            period = max(PERIOD_US, int(quota / cpus))
            if self.version == 1:
                (group / "cpu.cfs_period_us").write_text(str(period))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                for parent in (self.folder.parent, self.folder):
                    (parent / "cgroup.subtree_control").write_text("+cpu")
                (group / "cpu.max").write_text(f"{quota} {period}")
        except OSError as error:
            raise VirtualClusterError(
                f"the CPU share of {host} cannot be set in {group}: {error.strerror}; "
                "leave out --cpus, or allow control groups to this user"
            ) from error
        return group

    def remove(self) -> None:
        """Remove the groups; all of their processes have ended."""
        if not self.folder.is_dir():
            return
        groups = [entry for entry in self.folder.iterdir() if entry.is_dir()]
        for group in [*groups, self.folder]:
            # The kernel releases a group shortly after its last process has ended.
            for attempt in range(100):
                try:
                    group.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError as error:
                    if attempt == 99:
                        raise VirtualClusterError(
                            f"control group {group} cannot be removed: {error.strerror}"
                        ) from error
                    time.sleep(0.01)
