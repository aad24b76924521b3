"""Virtual hosts with slow links, and copies to them, timed from the command to its end."""

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
from hvd_elastic.virtual.processes import run_tool

DESTINATION = "/data/set"
LIMIT_S = 900.0
# Bytes of a packet's headers as the kernel counts them: Ethernet 14, IPv4 20, TCP with stamps 32.
_HEADERS = 66


@dataclass(frozen=True)
class Timed:
    """Result of one copy.

    Attributes:
        seconds: time from the command to its end.
        sent_bytes: bytes that this machine sent over its link to the hosts, with packet headers.
        payload_bytes: the same without the headers of Ethernet, IP and TCP.
        complete: hosts whose copy is identical to the source.
    """

    seconds: float
    sent_bytes: int
    payload_bytes: int
    complete: tuple[str, ...]


class CopyBed:
    """Virtual hosts and this machine, all with links of the same limited rate.

    Args:
        cluster: virtual hosts.
        scratch: folder of this machine for output.
        bits_per_s: rate of every link in each direction.
    """

    def __init__(self, cluster: VirtualCluster, scratch: Path, bits_per_s: int) -> None:
        self.cluster = cluster
        self.hosts = cluster.hosts
        self.scratch = scratch
        self.bytes_per_s = bits_per_s / 8
        self._interface = plan.interface_name(cluster.state.subnet)

    def copy(self, host: str) -> Path:
        """Return the path of a host's copy on this machine."""
        return self.cluster.data(host) / Path(DESTINATION).name

    def ours(self, source: Path, hostfile: Path | None = None) -> list[str]:
        """Return the command line of copyclust, to all hosts or to those of another hostfile."""
        hosts = str(hostfile or self.cluster.hostfile)
        return our_tool("copyclust", hosts, str(source), DESTINATION)

    def pull(self, command: str, names: Path) -> list[str]:
        """Return the command line of copyclust --pull for all hosts.

        Args:
            command: command that fetches a file from a store, with its placeholders.
            names: file with the names of the files in the store.
        """
        options = ("--pull", command, "--list", str(names))
        return our_tool("copyclust", str(self.cluster.hostfile), *options, DESTINATION)

    def run(self, command: str) -> list[str]:
        """Return the command line of runclust for all hosts."""
        return our_tool("runclust", str(self.cluster.hostfile), command)

    def rsync(self, source: Path, host: str) -> list[str]:
        """Return the command line of rsync to one host."""
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
        """Run copy commands and time them.

        Args:
            source: folder that the hosts' copies are compared with afterwards.
            commands: command lines to run.
            meanwhile: called with the processes once they have started.
            together: whether to run all at the same time instead of one after the other.
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
        """Boot hosts that are off, and empty the data folders of all hosts."""
        restore_hosts(self.cluster)
        for host in self.hosts:
            for entry in self.cluster.data(host).iterdir():
                shutil.rmtree(entry)
        # Writes that are still pending would slow down the next copy.
        os.sync()

    def put_there(self, source: Path) -> None:
        """Put the source at the destination on every host, as if it had been copied before."""
        for host in self.hosts:
            shutil.copytree(source, self.copy(host), symlinks=True)
        os.sync()

    def arrived(self, host: str) -> int:
        """Return the size of the unfinished large files on a host [bytes]."""
        found = 0
        with contextlib.suppress(FileNotFoundError):
            for path in (self.copy(host) / ".hvd_elastic-part").iterdir():
                found += path.stat().st_size
        return found

    def wait_for(self, host: str, size: int) -> None:
        """Wait until ``size`` bytes of unfinished files have arrived at a host, or raise."""
        deadline = time.monotonic() + LIMIT_S
        while self.arrived(host) < size:
            if time.monotonic() > deadline:
                raise RunError(f"{size} bytes never arrived at {host}")
            time.sleep(0.02)

    def wait_until_complete(self, hosts: Sequence[str], name: str) -> float:
        """Wait until all hosts have the finished file ``name``; return how long that took [s]."""
        begun = time.monotonic()
        files = [self.copy(host) / name for host in hosts]
        while not all(file.exists() for file in files):
            if time.monotonic() - begun > LIMIT_S:
                raise RunError(f"{', '.join(hosts)} never had everything")
            time.sleep(0.05)
        return time.monotonic() - begun

    def slow_down(self, host: str, share: float) -> None:
        """Limit a host's link in both directions to a fraction of the others' rate."""
        limit_link(self.cluster, host, int(self.bytes_per_s * 8 * share))

    def _sent(self) -> tuple[int, int]:
        """Return the bytes and packets that this machine has sent over its link to the hosts."""
        folder = Path("/sys/class/net", self._interface, "statistics")
        size, packets = (int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets"))
        return size, packets


def fingerprint(folder: Path) -> str:
    """Return a digest of names, times and contents of a folder's files; "" for no folder."""
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
    """Start virtual hosts with limited links, this machine's too, and end them after the block."""
    limit = plan.parse_rate(rate)
    with VirtualCluster.up(hosts, 1, rate=rate, loopback=False) as cluster:
        interface = plan.interface_name(cluster.state.subnet)
        run_tool(["tc", "qdisc", "add", "dev", interface, "root", *limit.arguments.split()])
        yield CopyBed(cluster, scratch, limit.bits_per_s)
