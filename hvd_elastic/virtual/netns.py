"""Virtual hosts in namespaces: network, host name, mounts, processes, System V IPC.

Nothing is persistent: there are no named network namespaces and no mounts outside the hosts. Two
kinds of processes hold all namespaces, and when they die the kernel removes everything:

- the *switch* holds a network namespace with the bridge. The bridge has its own namespace because
  the machine's packet filter would otherwise filter traffic between hosts (Docker sets it to drop
  packets). A veth pair connects it with the machine, whose end has the leader's address.
- each host's first process (``host.sh``) is PID 1 of the host's process namespace; its parent
  ``unshare`` stays outside.

A host's network cable is a veth pair from the bridge (``p1``, ``p2``, …) to ``eth0`` in the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hvd_elastic.errors import VirtualClusterError
from hvd_elastic.programs.processes import Process, is_alive, read
from hvd_elastic.virtual import plan, sshfiles
from hvd_elastic.virtual.processes import (
    SWITCH,
    CpuGroups,
    Holder,
    find_tool,
    kill_all,
    marked_processes,
    marks,
    namespace_of,
    plain_environment,
    processes_in_namespace,
    reap_started,
    run_tool,
    wait_until_up,
)
from hvd_elastic.virtual.state import ClusterState, HostState, HostStatus

SEEN_IN_HOST = Path("/run/virtclust")
"""Path of a host's own folder inside the host."""

UNSHARE = ["--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child=KILL"]
NSENTER = ["--net", "--uts", "--mount", "--ipc", "--pid", "--root"]
# Each virtual host has its own address, so all can use the standard port.
SSH_PORT = 22
HIDDEN = ("/tmp", "/data", "/run")  # noqa: S108  # names of folders; nothing is written to them

# States in /proc/net/tcp in which the peer does not know yet that the connection is closed:
# ESTABLISHED, FIN_WAIT1, LAST_ACK, CLOSING.
_UNTOLD = {"01", "04", "09", "0B"}
_CLOSED_S = 0.5
"""How long the kernel may take to close a dead host's connections [s]."""


def why_no_namespaces() -> str | None:
    """Return why this process cannot create namespaces; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for name in ("unshare", "nsenter", "ip", "tc", "mount"):
        find_tool(name)
    done = subprocess.run(
        [
            find_tool("unshare"),
            *UNSHARE,
            "sh",
            "-c",
            "mount -n -t tmpfs none /tmp && ip link add type bridge",
        ],
        capture_output=True,
        text=True,
        cwd="/",
    )
    if done.returncode == 0:
        return None
    return f"this root may not make namespaces ({done.stderr.strip() or 'refused'})"


class Namespaces:
    """Hosts of one cluster in namespaces.

    Args:
        folder: folder of the cluster; its name is the cluster's name.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.folder = folder
        self._first_processes: dict[str, Process] = {}

    # ---- the whole cluster

    def prepare(self, state: ClusterState) -> ClusterState:
        """Create the bridge and its connection to the machine; return the state with the subnet."""
        switch = Holder(
            [find_tool("unshare"), "--net", "--", "sh", "-c", "echo made; exec sleep infinity"],
            plain_environment(marks(self.folder, SWITCH)),
            self.folder / "switch.log",
        )
        switch.expect("made", "the switch of the cluster")
        switch.let_go()
        rng = random.SystemRandom()
        for subnet in plan.free_subnets(_subnets_in_use(), rng):
            interface = plan.interface_name(subnet)
            # The name acts as a lock: of callers with the same subnet, the kernel refuses one.
            if _try_interface(interface, switch.pid):
                break
        else:
            raise VirtualClusterError(
                "no private /24 network is free: routes of this machine overlap all of 10/8, "
                "172.16/12, 192.168/16 and 198.18/15; see 'ip route'"
            )
        self._switch_batch(
            switch.pid,
            [
                "link set lo up",
                "link add br0 type bridge forward_delay 0 stp_state 0 mcast_snooping 0",
                "link set br0 addrgenmode none",
                "link set br0 up",
                "link set uplink addrgenmode none",
                "link set uplink master br0",
                "link set uplink up",
            ],
        )
        run_tool(
            ["ip", "-batch", "-"],
            text_in=(
                f"link set {interface} addrgenmode none\n"
                f"address add {plan.leader_address(subnet)}/24 brd + dev {interface}\n"
                f"link set {interface} up\n"
            ),
        )
        return replace(state, subnet=subnet)

    def free_port(self, address: str) -> int:
        """Return the port of a host's sshd; each host has an address and all ports of its own."""
        return SSH_PORT

    def publish(self, state: ClusterState) -> None:
        """Write the hosts' /etc/hosts, in place, because the file is mounted in running hosts."""
        text = sshfiles.etc_hosts(
            state, (plan.leader_address(state.subnet), socket.gethostname().split(".")[0])
        )
        (self.folder / "etc_hosts").touch(mode=0o644)
        with (self.folder / "etc_hosts").open("a+") as file:
            file.truncate(0)
            file.write(text)

    def remove(self, state: ClusterState | None) -> None:
        """End all processes and remove everything but the folder, as far as it exists."""
        for pid in self._switch_pids():
            # Deleted inside the switch, so that it cannot be the interface of another cluster.
            with contextlib.suppress(VirtualClusterError):
                run_tool(["nsenter", "-t", str(pid), "-n", "ip", "link", "delete", "uplink"])
        kill_all(lambda: marked_processes(self.folder), f"cluster {self.name}")
        reap_started()
        if state and state.subnet:
            self._wait_interface_gone(plan.interface_name(state.subnet))
        groups = CpuGroups.find(self.group_name)
        if groups:
            groups.remove()

    # ---- single hosts

    def boot(self, state: ClusterState, hosts: Sequence[HostState]) -> None:
        """Boot hosts at the same time and wait until their sshd answer."""
        switch = self._switch()
        started = []
        for host in hosts:
            folder = self.folder / "hosts" / host.name
            _empty(folder / "tmp")
            (folder / "tmp").chmod(0o1777)
            holder = Holder(
                [
                    find_tool("unshare"),
                    *UNSHARE,
                    "--",
                    "sh",
                    str(Path(__file__).with_name("host.sh")),
                ],
                plain_environment(self._host_environment(state, host)),
                folder / "boot.log",
            )
            started.append((host, holder))
        batch: list[str] = []
        for host, holder in started:
            holder.expect("made", f"host {host.name}")
            port = f"p{host.index}"
            mac = plan.hardware_address(state.subnet, host.index)
            batch += [
                f"link add {port} type veth peer name eth0 address {mac} netns {holder.pid}",
                f"link set {port} addrgenmode none",
                f"link set {port} master br0",
                f"link set {port} up",
            ]
        self._switch_batch(switch, batch)
        if state.rate_bits_per_s:
            tbf = plan.Rate(state.rate_bits_per_s).arguments
            lines = [f"qdisc add dev p{host.index} root {tbf}" for host in hosts]
            self._switch_batch(switch, lines, program="tc")
        for _, holder in started:
            holder.tell("go")
        wait_until_up(self.folder, started)

    def crash(self, state: ClusterState, host: HostState, silent: bool) -> None:
        """End all processes of the host at once.

        The kernel then closes its connections, and the peers are notified. With ``silent`` the
        cable is disconnected first, so that the peers notice nothing, as in a power failure.
        """
        first = self._first_process(host.name)
        if first is not None:
            if silent:
                self.set_link(host, "cut")
            with contextlib.ExitStack() as stack:
                # Keep the network until the kernel has closed the connections. A host that is
                # ending by itself has left it, while its PID 1 waits for its last processes.
                network = None
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    network = stack.enter_context(Path(f"/proc/{first.pid}/ns/net").open("rb"))
                self._end_host(host.name)
                if network is not None and not silent:
                    _let_connections_end(network.fileno())
        self._end_host(host.name)
        with contextlib.suppress(VirtualClusterError):
            self._switch_batch(self._switch(), [f"link delete p{host.index}"])
        reap_started()

    def set_link(self, host: HostState, status: HostStatus) -> None:
        """Disconnect the host's cable (``cut``) or connect it (``up``)."""
        direction = "down" if status == "cut" else "up"
        self._switch_batch(self._switch(), [f"link set p{host.index} {direction}"])

    def pids(self, host: HostState, system: bool) -> set[int]:
        first = self._first_process(host.name)
        if first is None:
            return set()
        found = {process.pid for process in _processes_beside(first)}
        return found if system else found - {first.pid, self._listener(host, found)}

    def local_pid(self, host: HostState, pid: int) -> int:
        """Return the id on this machine of the process ``pid`` of the host."""
        for candidate in self.pids(host, system=True):
            chain = _pid_chain(candidate)
            if chain and chain[-1] == pid:
                return candidate
        raise VirtualClusterError(f"host {host.name} has no process {pid}")

    def inside(self, host: HostState, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs ``argv`` inside a host."""
        first = self._first_process(host.name)
        if first is None:
            raise VirtualClusterError(
                f"host {host.name} is off; start it with: virtclust boot {host.name}"
            )
        return [find_tool("nsenter"), "-t", str(first.pid), *NSENTER, "--", *argv]

    # ---- private

    def _host_environment(self, state: ClusterState, host: HostState) -> dict[str, str]:
        folder = self.folder / "hosts" / host.name
        (folder / "sshd_config").touch(mode=0o600)
        (folder / "sshd_config").write_text(
            sshfiles.sshd_config(
                host,
                folder=SEEN_IN_HOST,
                cluster_folder=self.folder,
                with_users=bool(state.users),
            )
        )
        group = ""
        if state.cpus is not None:
            groups = CpuGroups.find(self.group_name)
            if groups is None:
                raise VirtualClusterError(
                    "--cpus needs a mounted control group file system with the cpu controller, "
                    "and this machine has none; leave --cpus out"
                )
            group = str(groups.make(host.name, state.cpus))
        rate = state.rate_bits_per_s
        return {
            **marks(self.folder, host.name),
            "VC_HOST": host.name,
            "VC_FOLDER": str(folder),
            "VC_CLUSTER": str(self.folder),
            "VC_ADDRESS": host.address,
            "VC_TBF": plan.Rate(rate).arguments if rate else "",
            "VC_CGROUP": group,
            "VC_SHARES": "\n".join(state.shares),
            "VC_SSHD": find_tool("sshd"),
            "VC_IP": find_tool("ip"),
            "VC_TC": find_tool("tc"),
        }

    @property
    def group_name(self) -> str:
        """Name of this cluster's control group, made from the folder's path to be unique."""
        return "hvd_elastic" + str(self.folder).replace("/", "-")

    def _switch_pids(self) -> list[int]:
        return [process.pid for process in marked_processes(self.folder, SWITCH)]

    def _switch(self) -> int:
        for pid in self._switch_pids():
            return pid
        raise VirtualClusterError(
            f"the switch of cluster {self.name} is gone (somebody killed it, or the machine was "
            f"started anew); take it down with: virtclust down --name {self.name}"
        )

    def _switch_batch(self, switch: int, lines: Iterable[str], program: str = "ip") -> None:
        run_tool(
            ["nsenter", "-t", str(switch), "-n", program, "-batch", "-"],
            text_in="".join(f"{line}\n" for line in lines),
        )

    def _first_process(self, host: str) -> Process | None:
        """Return the process that is PID 1 on the host; None if the host is off."""
        known = self._first_processes.get(host)
        if known is not None and is_alive(known):
            return known
        for process in marked_processes(self.folder, host):
            chain = _pid_chain(process.pid)
            if len(chain) > 1 and chain[-1] == 1:
                self._first_processes[host] = process
                return process
        return None

    def _listener(self, host: HostState, pids: Iterable[int]) -> int:
        """Return the id of the sshd that listens; 0 if there is none."""
        with contextlib.suppress(OSError, ValueError):
            number = int((self.folder / "hosts" / host.name / "sshd.pid").read_text())
            for pid in pids:
                if _pid_chain(pid)[-1:] == [number]:
                    return pid
        return 0

    def _end_host(self, host: str) -> None:
        first = self._first_process(host)

        def find() -> list[Process]:
            # With its PID 1 the kernel ends a process namespace, so all processes end at once.
            # PID 1 ends when all others are reaped, so nsenter, which stops with its child, has to
            # be killed too: it is outside of the namespace, and marked.
            beside = _processes_beside(first) if first is not None and is_alive(first) else []
            return [*beside, *marked_processes(self.folder, host)]

        kill_all(find, f"host {host}")

    def _wait_interface_gone(self, interface: str) -> None:
        # The kernel removes the interfaces of a dead namespace in the background.
        deadline = time.monotonic() + 10
        while Path(f"/sys/class/net/{interface}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def _subnets_in_use() -> list[str]:
    """Return the networks for which this machine has a route or an address, except the default."""
    routes = json.loads(run_tool(["ip", "-4", "-json", "route", "show", "table", "all"]))
    return [route["dst"] for route in routes if route["dst"] != "default"]


def _try_interface(interface: str, switch: int) -> bool:
    if Path(f"/sys/class/net/{interface}").exists():
        return False
    try:
        words = f"link add {interface} type veth peer name uplink netns {switch}"
        run_tool(["ip", *words.split()])
    except VirtualClusterError as error:
        if "File exists" in str(error):
            return False
        raise
    return True


def _processes_beside(first: Process) -> list[Process]:
    """Return all processes in the process namespace of a host's first process."""
    inode = namespace_of(first.pid, "pid")
    return [] if inode is None else processes_in_namespace(inode)


def _pid_chain(pid: int) -> list[int]:
    """Return the ids of a process in all its process namespaces, the machine's first."""
    for line in read(pid, "status").splitlines():
        if line.startswith(b"NSpid:"):
            return [int(word) for word in line.split()[1:]]
    return []


def _let_connections_end(network: int) -> None:
    """Wait until the kernel has closed a dead host's connections, or the time is over."""
    deadline = time.monotonic() + _CLOSED_S
    command = [find_tool("nsenter"), f"--net=/proc/self/fd/{network}", "cat", "/proc/net/tcp"]
    while time.monotonic() < deadline:
        done = subprocess.run(command, pass_fds=[network], capture_output=True, text=True)
        if done.returncode != 0:
            return
        if not any(line.split()[3] in _UNTOLD for line in done.stdout.splitlines()[1:]):
            return
        time.sleep(0.005)


def _empty(folder: Path) -> None:
    """Make an empty folder, removing what was there: /tmp does not survive a boot."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def default_shares() -> tuple[str, ...]:
    """Return the paths of Python and this package that hosts would not see otherwise."""
    import sys

    package = Path(__file__).resolve().parents[2]
    wanted = {Path(sys.prefix), Path(sys.base_prefix), package}
    return hidden_shares(map(str, sorted(wanted)))


def hidden_shares(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that hosts would not see, without those inside another one of them."""
    found: list[str] = []
    for text in sorted({str(Path(path).absolute()) for path in paths}, key=len):
        path = Path(text)
        if any(path.is_relative_to(place) for place in HIDDEN) and text not in HIDDEN:
            if not any(path.is_relative_to(other) for other in found):
                found.append(text)
    return tuple(found)
