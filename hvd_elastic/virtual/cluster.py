"""Create, control and remove a virtual cluster."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvd_elastic.errors import UsageError, VirtualClusterError
from hvd_elastic.replaced_files import write_whole
from hvd_elastic.signals import uninterrupted
from hvd_elastic.virtual import accounts, plan, sshfiles
from hvd_elastic.virtual.loopback import Loopback, login_user
from hvd_elastic.virtual.netns import Namespaces, default_shares, hidden_shares, why_no_namespaces
from hvd_elastic.virtual.processes import find_tool, marked_clusters, marks
from hvd_elastic.virtual.state import (
    ClusterState,
    HostState,
    HostStatus,
    cluster_folder,
    cluster_names,
    clusters_folder,
    load_state,
    locked,
    save_state,
    unwritable,
)

_BACKENDS: dict[str, type[Loopback | Namespaces]] = {"loopback": Loopback, "netns": Namespaces}
"""Classes that implement hosts: addresses of the loopback interface, or namespaces."""


class VirtualCluster(AbstractContextManager["VirtualCluster"]):
    """A cluster of hosts on this machine that can be disconnected, crashed and booted.

    Create one with :meth:`up` or find one with :meth:`find`. All state is read from the cluster's
    folder, so several objects in several processes can refer to the same cluster. Used as a context
    manager, it removes the cluster at the end::

        with VirtualCluster.up(hosts=3, slots=2) as cluster:
            subprocess.run(["ssh", "-F", cluster.ssh_config, cluster.hosts[0], "hostname"])
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = cluster_folder(name)
        self._backends: dict[str, Loopback | Namespaces] = {}

    # ---- create and find

    @classmethod
    def up(
        cls,
        hosts: int = 3,
        slots: int = 2,
        *,
        name: str | None = None,
        rate: str | None = None,
        loopback: bool | None = None,
        cpus: float | None = None,
        shares: Iterable[str | os.PathLike[str]] = (),
        hostfile: str | os.PathLike[str] | None = None,
        users: Sequence[str] = (),
    ) -> VirtualCluster:
        """Create a cluster and wait until every host accepts ssh logins.

        Args:
            hosts: number of hosts, 1 to 250.
            name: name of the cluster, whose hosts are ``<name>-1``, …; None takes the first free
                one of vc1, vc2, ….
            rate: link rate of each host in each direction, such as ``1gbit``.
            loopback: use addresses of 127/8 instead of namespaces; None: only if not root.
            cpus: number of CPU cores that each host may use.
            shares: files and folders under /tmp, /data or /run that all hosts shall see, although
                each has its own of these. The running Python and this package are always shared.
            hostfile: path of a second copy of the hostfile.
            users: names of accounts to be made on this machine, which can log in to the hosts.

        Raises:
            UsageError: an argument is out of range.
            VirtualClusterError: a program is missing, the name is in use, or the kernel refuses.
        """
        plan.parse_shape(f"{hosts}x{slots}")
        if name is not None:
            plan.check_name(name)
        bits = plan.parse_rate(rate).bits_per_s if rate is not None else None
        if cpus is not None and not 0.01 <= cpus <= 4096:
            raise UsageError(f"a CPU share of {cpus:g} cores makes no sense; write 0.01 to 4096")
        for program in ("sshd", "ssh-keygen"):
            find_tool(program)
        user = login_user()
        on_loopback = _choose_loopback(loopback)
        if on_loopback and (bits is not None or cpus is not None):
            raise VirtualClusterError(
                "link rates and CPU shares need hosts in network namespaces; leave out --rate and "
                "--cpus, or make the cluster as root, without --loopback"
            )
        if users and on_loopback:
            raise VirtualClusterError(
                "accounts need hosts in network namespaces; leave out --users, or make the cluster "
                "as root, without --loopback"
            )
        with locked(clusters_folder()):
            name = name or _free_name()
            cluster = cls(name)
            if cluster.folder.exists():
                raise VirtualClusterError(
                    f"a cluster {name} exists in {cluster.folder}; choose another --name, or take "
                    f"it down with: virtclust down --name {name}"
                )
            if users:
                accounts.check_names(users, name)
            state = ClusterState(
                name=name,
                backend="loopback" if on_loopback else "netns",
                slots=slots,
                user=user,
                rate_bits_per_s=bits,
                cpus=cpus,
                shares=() if on_loopback else _all_shares(shares),
                users=tuple(users),
            )
            try:
                with _writing(cluster.folder):
                    cluster.folder.mkdir(mode=0o700)
                    save_state(cluster.folder, state)
                    sshfiles.make_keys([cluster.folder / "id_ed25519"])
                    if users:
                        accounts.make(cluster.folder, users)
                    state = cluster._backend(state).prepare(state)
                    save_state(cluster.folder, state)
                    if hostfile is not None:
                        copy = Path(hostfile).expanduser().absolute()
                        state = replace(state, hostfiles=(str(copy),))
                    cluster._boot_new(state, range(1, hosts + 1))
            except BaseException:
                with uninterrupted():
                    cluster._remove()
                raise
        return cluster

    @classmethod
    def find(cls, name: str | None = None) -> VirtualCluster:
        """Return the cluster of that name; without a name, the only cluster there is."""
        names = cluster_names()
        if name is None and len(names) == 1:
            return cls(names[0])
        if name is not None and name in names:
            return cls(name)
        if not names:
            raise VirtualClusterError(
                f"there is no virtual cluster in {clusters_folder()}; "
                "make one with: virtclust up 3x2"
            )
        if name is None:
            raise UsageError(f"several clusters are up: {', '.join(names)}; say which with --name")
        raise VirtualClusterError(f"there is no cluster '{name}'; there are {', '.join(names)}")

    @classmethod
    def find_host(cls, host: str, name: str | None = None) -> tuple[VirtualCluster, str]:
        """Return the cluster that has this host, and the host's full name."""
        if name is None:
            for candidate in cluster_names():
                state = load_state(cluster_folder(candidate))
                if state and any(host == entry.name for entry in state.hosts):
                    return cls(candidate), host
        cluster = cls.find(name)
        return cluster, cluster.state.host(host).name

    @classmethod
    def every(cls) -> list[VirtualCluster]:
        """Return all clusters of this user, including those of which only processes are left."""
        folder = clusters_folder()
        orphans = {Path(path).name for path in marked_clusters() if Path(path).parent == folder}
        return [cls(name) for name in sorted({*cluster_names(), *orphans})]

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the cluster, as :meth:`down` does."""
        self.down()

    # ---- properties

    @property
    def state(self) -> ClusterState:
        """State of the cluster, read from its folder."""
        state = load_state(self.folder)
        if state is None:
            raise VirtualClusterError(f"cluster {self.name} is not up")
        return state

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts in the order of the hostfile."""
        return [host.name for host in self.state.hosts]

    @property
    def users(self) -> list[str]:
        """Names of the accounts that were made for the cluster."""
        return list(self.state.users)

    @property
    def hostfile(self) -> Path:
        return self.folder / "hostfile"

    @property
    def ssh_config(self) -> Path:
        """Path of the ssh configuration, for ``ssh -F`` and ``--ssh-config``."""
        return self.folder / "ssh_config"

    @property
    def loopback(self) -> bool:
        return self.state.backend == "loopback"

    @property
    def leader_address(self) -> str:
        """Address at which the hosts reach this machine."""
        state = self.state
        return "127.0.0.1" if self.loopback else plan.leader_address(state.subnet)

    def address(self, host: str) -> str:
        return self.state.host(host).address

    def data(self, host: str) -> Path:
        """Return this machine's path of the host's ``/data`` (namespaces only)."""
        return self.folder / "hosts" / self.state.host(host).name / "data"

    def status(self, host: str) -> HostStatus:
        """Return a host's status; ``off`` also if its processes were killed."""
        state = self.state
        entry = state.host(host)
        alive = self._backend(state).pids(entry, system=True)
        return entry.status if alive else "off"

    def pids(self, host: str, *, system: bool = False) -> set[int]:
        """Return the process ids, as seen on this machine, of a host's processes.

        Args:
            system: include the host's first process and its listening sshd, which always run.
        """
        state = self.state
        return self._backend(state).pids(state.host(host), system)

    # ---- actions

    def cut(self, host: str) -> None:
        """Disconnect the host's network cable: packets are lost silently in both directions."""
        self._set_link(host, "cut")

    def heal(self, host: str) -> None:
        """Connect the host's network cable again."""
        self._set_link(host, "up")

    def crash(self, host: str, *, silent: bool = False) -> None:
        """Kill all processes of the host, its sshd included; start it again with :meth:`boot`.

        Args:
            silent: disconnect the cable first, so that peers do not see connections close, as in a
                power failure.
        """
        with locked(self.folder.parent):
            state = self.state
            entry = state.host(host)
            self._backend(state).crash(state, entry, silent)
            save_state(self.folder, state.with_status(entry.name, "off"))

    def boot(self, host: str) -> None:
        """Boot a crashed host with the same name, address, host key and /data; /tmp is empty."""
        with locked(self.folder.parent):
            state = self.state
            entry = state.host(host)
            backend = self._backend(state)
            if entry.status != "off" and backend.pids(entry, system=True):
                raise VirtualClusterError(f"host {entry.name} is running ({entry.status})")
            # A host that died by itself may have left processes or its network interface.
            backend.crash(state, entry, False)
            try:
                with _writing(self.folder):
                    backend.boot(state, [entry])
            except BaseException:
                with uninterrupted():
                    backend.crash(state, entry, False)
                    save_state(self.folder, state.with_status(entry.name, "off"))
                raise
            save_state(self.folder, state.with_status(entry.name, "up"))

    def add(self, hosts: int = 1) -> list[str]:
        """Add hosts of the same kind, also to the hostfile; return their names."""
        with locked(self.folder.parent):
            before = self.state
            last = max((host.index for host in before.hosts), default=0)
            if hosts < 1 or last + hosts > plan.MAX_HOSTS:
                raise UsageError(
                    f"{hosts} more hosts: a cluster has at most {plan.MAX_HOSTS}, "
                    f"and {self.name} has {last}"
                )
            new = range(last + 1, last + hosts + 1)
            try:
                with _writing(self.folder):
                    return self._boot_new(before, new)
            except BaseException:
                with uninterrupted():
                    backend = self._backend(before)
                    for index in new:
                        name = f"{self.name}-{index}"
                        backend.crash(before, HostState(name, index, "", 0), False)
                        shutil.rmtree(self.folder / "hosts" / name, ignore_errors=True)
                    self._write_files(before)
                raise

    def down(self) -> None:
        """End the cluster and remove everything it created; does nothing if it does not exist."""
        if not self.folder.exists() and str(self.folder) not in marked_clusters():
            return
        with locked(self.folder.parent):
            self._remove()

    def run_on(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside a host, without ssh; ``options`` as of `subprocess.run`.

        On the loopback interface it runs on this machine, marked as a process of the host.
        """
        command, environment = self._inside(host, argv, env)
        options.setdefault("capture_output", "stdout" not in options and "stderr" not in options)
        return subprocess.run(command, env=environment, text=True, **options)

    def popen_on(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command as :meth:`run_on` does, without waiting for it.

        Signals to the returned process reach nsenter, not the command.
        """
        command, environment = self._inside(host, argv, env)
        return subprocess.Popen(command, env=environment, text=True, **options)

    def kill(self, host: str, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process, given its id *on the host* (its ``os.getpid()``).

        Hosts in namespaces number their processes from 1, so ``os.kill`` with that id would reach
        another process.
        """
        state = self.state
        os.kill(self._backend(state).local_pid(state.host(host), pid), number)

    # ---- private

    def _backend(self, state: ClusterState) -> Loopback | Namespaces:
        # Kept because finding the hosts' first processes takes long.
        if state.backend not in self._backends:
            self._backends[state.backend] = _BACKENDS[state.backend](self.folder)
        return self._backends[state.backend]

    def _boot_new(self, before: ClusterState, indices: Iterable[int]) -> list[str]:
        """Create and start hosts; the state file lists them once they answer."""
        backend = self._backend(before)
        addresses = {index: plan.host_address(before.subnet, index) for index in indices}
        new = [
            HostState(f"{before.name}-{index}", index, address, backend.free_port(address))
            for index, address in addresses.items()
        ]
        folders = [self.folder / "hosts" / host.name for host in new]
        for folder in folders:
            for path in (folder, *(folder / name for name in ("root", "tmp", "data"))):
                path.mkdir(parents=True)
                path.chmod(0o755)  # other users of the host see it, whatever the umask
        sshfiles.make_keys(folder / sshfiles.HOST_KEY for folder in folders)
        login_key = (self.folder / "id_ed25519.pub").read_text()
        user_keys = {user: accounts.public_key(user) for user in before.users}
        for folder in folders:
            (folder / "authorized_keys").touch(mode=0o600)
            (folder / "authorized_keys").write_text(login_key)
            for user, key in user_keys.items():
                path = folder / sshfiles.USER_KEYS / user
                path.parent.mkdir(exist_ok=True)
                path.write_text(key)
                for each in (path.parent, path):  # sshd reads it as that user
                    each.chmod(0o755)
        running = tuple(replace(host, status="up") for host in new)
        state = replace(before, hosts=(*before.hosts, *running))
        backend.publish(state)
        backend.boot(state, new)
        self._write_files(state)
        return [host.name for host in new]

    def _write_files(self, state: ClusterState) -> None:
        self._backend(state).publish(state)
        files = {
            self.ssh_config: sshfiles.client_config(
                state, state.user, self.folder / "id_ed25519", self.folder / "known_hosts"
            ),
            self.folder / "known_hosts": sshfiles.known_hosts(state, self.folder),
            # The hostfile last: the hosts that it names must be reachable for those who watch it.
            self.hostfile: sshfiles.hostfile_text(state),
        }
        for copy in state.hostfiles:
            files[Path(copy)] = sshfiles.hostfile_text(state)
        for path, text in files.items():
            try:
                write_whole(path, text, mode=0o644)
            except OSError as error:
                if path.parent == self.folder:
                    raise unwritable(path, error.strerror) from error
                raise VirtualClusterError(f"{path} cannot be written: {error.strerror}") from error
        for user in state.users:
            home = Path(pwd.getpwnam(user).pw_dir)
            known = home / ".ssh/known_hosts"
            own = {
                ".ssh/config": sshfiles.client_config(state, user, home / accounts.KEY, known),
                ".ssh/known_hosts": sshfiles.known_hosts(state, self.folder),
                "hostfile": sshfiles.hostfile_text(state),
            }
            accounts.write_files(user, own)
        save_state(self.folder, state)

    def _inside(
        self, host: str, argv: Sequence[str], env: Mapping[str, str] | None
    ) -> tuple[list[str], dict[str, str]]:
        state = self.state
        entry = state.host(host)
        environment = dict(os.environ if env is None else env)
        environment.update(marks(self.folder, entry.name))
        return self._backend(state).inside(entry, argv), environment

    def _set_link(self, host: str, status: HostStatus) -> None:
        with locked(self.folder.parent):
            state = self.state
            entry = state.host(host)
            if self.status(entry.name) == "off":
                done = "cut" if status == "cut" else "healed"
                raise VirtualClusterError(
                    f"host {entry.name} is off, so its cable cannot be {done}; "
                    f"start it with: virtclust boot {entry.name}"
                )
            self._backend(state).set_link(entry, status)
            save_state(self.folder, state.with_status(entry.name, status))

    def _remove(self) -> None:
        """Remove everything; the caller holds the lock."""
        state: ClusterState | None = None
        # A state file that cannot be read must not prevent the removal.
        with contextlib.suppress(VirtualClusterError):
            state = load_state(self.folder)
        for name, backend in _BACKENDS.items():
            if state is None or state.backend == name:
                backend(self.folder).remove(state)
        if os.geteuid() == 0:
            accounts.remove(self.folder)
        if state:
            _remove_copies(state)
        try:
            shutil.rmtree(self.folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise VirtualClusterError(
                f"the processes of cluster {self.name} have ended, but its folder {self.folder} "
                f"cannot be removed: {error}"
            ) from error
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()


def _remove_copies(state: ClusterState) -> None:
    for copy in map(Path, state.hostfiles):
        with contextlib.suppress(OSError):
            # If the user has edited the copy, it stays.
            if copy.read_text() == sshfiles.hostfile_text(state):
                copy.unlink()


def _choose_loopback(asked: bool | None) -> bool:
    if asked:
        return True
    refusal = why_no_namespaces()
    if refusal and asked is False:
        raise VirtualClusterError(
            f"{refusal}; run virtclust as root, or make hosts on the loopback interface "
            "with --loopback"
        )
    return refusal is not None


def _free_name() -> str:
    taken = set(cluster_names())
    return next(
        name for name in (f"vc{number}" for number in range(1, 10_000)) if name not in taken
    )


def _all_shares(asked: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    given = [Path(share).expanduser().absolute() for share in asked]
    for path in given:
        if not path.exists():
            raise UsageError(f"--share {path}: there is no such file or folder")
    return hidden_shares([*map(str, given), *default_shares()])


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an OSError into an error that names the path that cannot be written."""
    try:
        yield
    except OSError as error:
        raise unwritable(Path(error.filename or folder), error.strerror) from error
