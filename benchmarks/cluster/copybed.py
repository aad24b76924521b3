"""Virtual hosts with slow links, and copies to them: timed from the command to its end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.commands import our_tool
from benchmarks.testbed.hosts import restore_hosts
from benchmarks.testbed.launchers import start_logged
from benchmarks.testbed.links import limit_link
from hvd_elastic.errors import RunError
from hvd_elastic.virtual import VirtualCluster, plan
from hvd_elastic.virtual.tools import run_tool

DESTINATION = "/data/set"
LIMIT_S = 900.0
# Of each packet, as the kernel counts them: Ethernet 14 bytes, IPv4 20, TCP with time stamps 32.
_HEADERS = 66


@dataclass(frozen=True)
class Timed:
    """One copy.

    Attributes:
        seconds: from the command to its end.
        sent_bytes: what left this machine by its link to the hosts, packet headers included.
        payload_bytes: the same without the headers of Ethernet, IP and TCP.
        complete: hosts whose copy is byte for byte the source.
    """

    seconds: float
    sent_bytes: int
    payload_bytes: int
    complete: tuple[str, ...]


class CopyBed:
    """Hosts whose links, this machine's included, carry so many bits a second in each direction.

    Args:
        cluster: the hosts.
        scratch: a folder of this machine.
        bits_per_s: the rate.
    """

    def __init__(self, cluster: VirtualCluster, scratch: Path, bits_per_s: int) -> None:
        self.cluster = cluster
        self.hosts = cluster.hosts
        self.scratch = scratch
        self.bytes_per_s = bits_per_s / 8
        self._interface = plan.interface_name(cluster.state.subnet)

    def copy(self, host: str) -> Path:
        """A host's copy, as seen from this machine."""
        return self.cluster.data(host) / Path(DESTINATION).name

    def ours(self, source: Path, hostfile: Path | None = None) -> list[str]:
        """The command line of copyclust, to all hosts or to those of another hostfile."""
        hosts = str(hostfile or self.cluster.hostfile)
        return our_tool("copyclust", hosts, str(source), DESTINATION)

    def pull(self, command: str, names: Path) -> list[str]:
        """The command line of copyclust --pull for all hosts.

        Args:
            command: what brings a file of a store, with its placeholders.
            names: a file with the names of what is there.
        """
        options = ("--pull", command, "--list", str(names))
        return our_tool("copyclust", str(self.cluster.hostfile), *options, DESTINATION)

    def run(self, command: str) -> list[str]:
        """The command line of runclust for all hosts."""
        return our_tool("runclust", str(self.cluster.hostfile), command)

    def rsync(self, source: Path, host: str) -> list[str]:
        """The command line of rsync to one host."""
        ssh = f"ssh -F {self.cluster.ssh_config} -o ControlPath=none"
        return ["rsync", "-a", "-e", ssh, f"{source}/", f"{host}:{DESTINATION}/"]

    def time(
        self,
        source: Path,
        commands: Sequence[Sequence[str]],
        meanwhile: Callable[[Sequence[subprocess.Popen[bytes]]], None] | None = None,
        *,
        together: bool = True,
    ) -> Timed:
        """Runs the commands, at the same time or one after the other.

        Args:
            source: what the hosts are compared with afterwards.
            commands: what is run.
            meanwhile: called with the processes when they have begun.
            together: whether all are run at the same time.
        """
        bytes_before, packets_before = self._sent()
        begun = time.monotonic()
        processes = []
        for command in commands:
            processes.append(start_logged(command, self.scratch / "output", os.environ))
            if not together:
                processes[-1].wait(LIMIT_S)
        if meanwhile is not None:
            meanwhile(processes)
        for process in processes:
            process.wait(LIMIT_S)
        seconds = time.monotonic() - begun
        bytes_after, packets_after = self._sent()
        sent = bytes_after - bytes_before
        payload = sent - _HEADERS * (packets_after - packets_before)
        wanted = fingerprint(source)
        complete = [host for host in self.hosts if fingerprint(self.copy(host)) == wanted]
        return Timed(seconds, sent, payload, tuple(complete))

    def clear(self) -> None:
        """Empties the hosts' data folders and brings back hosts that are off."""
        restore_hosts(self.cluster)
        for host in self.hosts:
            for entry in self.cluster.data(host).iterdir():
                shutil.rmtree(entry)
        # What was written for the last copy must not be what the disk does during the next.
        os.sync()

    def put_there(self, source: Path) -> None:
        """The source at the destination of every host, as if it had been copied before."""
        for host in self.hosts:
            shutil.copytree(source, self.copy(host), symlinks=True)
        os.sync()

    def arrived(self, host: str) -> int:
        """Bytes of unfinished large files that a host has."""
        found = 0
        with contextlib.suppress(FileNotFoundError):
            for path in (self.copy(host) / ".hvd_elastic-part").iterdir():
                found += path.stat().st_size
        return found

    def wait_for(self, host: str, size: int) -> None:
        """Until so many bytes of an unfinished file have arrived at a host."""
        deadline = time.monotonic() + LIMIT_S
        while self.arrived(host) < size:
            if time.monotonic() > deadline:
                raise RunError(f"{size} bytes never arrived at {host}")
            time.sleep(0.02)

    def wait_until_complete(self, hosts: Sequence[str], name: str) -> float:
        """Until the hosts have a file under its name; how long that took [s]."""
        begun = time.monotonic()
        files = [self.copy(host) / name for host in hosts]
        while not all(file.exists() for file in files):
            if time.monotonic() - begun > LIMIT_S:
                raise RunError(f"{', '.join(hosts)} never had everything")
            time.sleep(0.05)
        return time.monotonic() - begun

    def slow_down(self, host: str, share: float) -> None:
        """Limits a host's link, in both directions, to a share of the others'."""
        limit_link(self.cluster, host, int(self.bytes_per_s * 8 * share))

    def _sent(self) -> tuple[int, int]:
        """Bytes and packets that have left this machine by its link to the hosts."""
        folder = Path("/sys/class/net", self._interface, "statistics")
        size, packets = (int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets"))
        return size, packets


def fingerprint(folder: Path) -> str:
    """One digest of names, times and contents of all files of a folder; "" where there is none."""
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)} {path.stat().st_mtime_ns // 1000}".encode())
            with path.open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def make_copy_bed(hosts: int, rate: str, scratch: Path) -> Iterator[CopyBed]:
    """Virtual hosts for as long as the block lasts; this machine's link to them is limited too."""
    limit = plan.parse_rate(rate)
    with VirtualCluster.up(hosts, 1, rate=rate, loopback=False) as cluster:
        interface = plan.interface_name(cluster.state.subnet)
        run_tool(["tc", "qdisc", "add", "dev", interface, "root", *limit.arguments.split()])
        yield CopyBed(cluster, scratch, limit.bits_per_s)
