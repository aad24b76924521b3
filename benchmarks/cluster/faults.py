"""Measures what the cluster tools and their peers do when something is wrong, once each.

Hosts are process namespaces, so ``pkill`` on one of them affects nothing else on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import nine_kinds
from benchmarks.cluster.commands import our_tool
from benchmarks.testbed.command import Say, check_names
from benchmarks.testbed.figures import Conditions, Result, conditions
from benchmarks.testbed.hosts import end_processes, write_ssh
from hvd_elastic.errors import RunError, VirtualClusterError
from hvd_elastic.virtual import VirtualCluster

HOSTS = 8
RANKS = 4
LIMIT_S = 120.0
AFTER_S = 2.0
FAULTS: dict[str, str] = {
    "healthy": "checkclust on 8 hosts where nothing is wrong: seconds, findings",
    "dead": "one of 8 hosts is off: seconds until the others' results are shown, until the end",
    "key": "a host's key has changed: hosts on which the command ran",
    "launcher": "kill -9 of the launcher of 4 ranks, 12 processes: how many are left after 2 s",
    "killed": "a worker with nine kinds of process crashes: left, and bystanders hurt, afterwards",
}
WANTED: dict[str, dict[str, float]] = {
    "healthy": {"seconds": 10.0, "findings": 0.0},
    "dead": {"results": 1.0, "end": 6.0},
    "key": {"ran": 0.0},
    "launcher": {"left": 0.0},
    "killed": {"left": 0.0, "hurt": 0.0},
}
"""Upper bound of each value for our tools."""
_PEERS = ("pdsh", "clush", "horovodrun", "mpirun", "pkill")
# Started by its path, since this checkout is not on the module path of the hosts.
_NINE = [sys.executable, str(Path(nine_kinds.__file__))]
_WAIT = "import time; time.sleep(600)"

Values = dict[str, float]
Case = tuple[str, Sequence[str], Callable[[Sequence[str]], Values]]
"""Name of a tool, its command line, and the function that runs the command and measures."""


@dataclass(frozen=True)
class Seen:
    """Figures of one tool in one row.

    Attributes:
        row: name of the row (see :data:`FAULTS`).
        tool: name of the tool.
        values: measured values; empty if the tool is not installed.
        wanted: upper bound of each value; for our tools only.
        note: remark for the reader.
    """

    row: str
    tool: str
    values: Values
    wanted: Values
    note: str = ""


class _Measuring:
    def __init__(self, cluster: VirtualCluster, folder: Path, peers: bool, say: Say) -> None:
        self._cluster = cluster
        self._hostfile = str(cluster.hostfile)
        self._config = ["-F", str(cluster.ssh_config)]
        self._folder = folder
        self._peers = peers
        self._say = say
        self._environment = {
            **os.environ,
            "HVD_ELASTIC_HOME": str(folder),
            # horovodrun stores there which hosts it has reached.
            "HOME": str(folder),
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        write_ssh(folder / "ssh", cluster.ssh_config)
        self.found: list[Seen] = []

    def measure(self, row: str) -> None:
        """Measure each tool of a row, and end all of its processes on the hosts afterwards."""
        cases: dict[str, Callable[[], Iterator[Case]]] = {
            "healthy": self._healthy,
            "dead": self._dead,
            "key": self._key,
            "launcher": self._launcher,
            "killed": self._killed,
        }
        for tool, command, run in cases[row]():
            peer = tool.startswith(_PEERS)
            if peer and not self._peers:
                continue
            if shutil.which(command[0]) is None:
                self.found.append(Seen(row, tool, {}, {}, f"{command[0]} is not installed"))
            else:
                try:
                    self.found.append(Seen(row, tool, run(command), {} if peer else WANTED[row]))
                finally:
                    for host in self._cluster.hosts:
                        if self._cluster.status(host) != "off":
                            end_processes(self._cluster, host)
                            (self._cluster.data(host) / "told").unlink(missing_ok=True)
            self._say(_line(self.found[-1]))

    # ---- rows

    def _healthy(self) -> Iterator[Case]:
        def check(command: Sequence[str]) -> Values:
            begun = time.monotonic()
            lines, _ = self._start(command, stdout=subprocess.PIPE).communicate(timeout=LIMIT_S)
            seconds = round(time.monotonic() - begun, 2)
            hosts = [line for line in map(json.loads, lines.splitlines()) if line["kind"] == "host"]
            checks = [check for host in hosts for check in host.get("checks", ())]
            found = [check["name"] for check in checks if check["level"] != "ok"]
            return {"seconds": seconds, "findings": float(len(found) + HOSTS - len(hosts))}

        yield "checkclust", our_tool("checkclust", self._hostfile, "--json"), check

    def _dead(self) -> Iterator[Case]:
        *others, dead = self._cluster.hosts
        self._cluster.crash(dead, silent=True)
        commands = {
            "runclust": our_tool("runclust", self._hostfile, "echo here"),
            **_shells([*others, dead], "echo here"),
        }
        for tool, command in commands.items():
            yield tool, command, lambda begun: self._follow(begun, len(others))
        self._cluster.boot(dead)

    def _key(self) -> Iterator[Case]:
        host, other = self._cluster.hosts[:2]
        known = self._cluster.folder / "known_hosts"
        lines = known.read_text().splitlines()
        of = {at: line for at, line in enumerate(lines) if self._cluster.address(host) in line}
        wrong = next(line for line in lines if self._cluster.address(other) in line).split()[-1]
        for at, line in of.items():
            lines[at] = " ".join([*line.split()[:-1], wrong])
        changed, config = self._folder / "changed", self._folder / "config"
        changed.write_text("\n".join(lines) + "\n")
        text = self._cluster.ssh_config.read_text()
        config.write_text(text.replace(str(known), str(changed)))
        write_ssh(self._folder / "ssh", config)
        mark = self._cluster.data(host) / "ran"
        touch = "touch /data/ran"
        one = ("-F", str(config), self._hostfile, "--hosts", host)
        commands = {
            "runclust": our_tool("runclust", *one, touch),
            **_shells([host], touch),
            "horovodrun": _horovodrun([host], touch.split()),
        }

        def touched(command: Sequence[str]) -> Values:
            self._run(command)
            ran = mark.exists()
            mark.unlink(missing_ok=True)
            return {"ran": float(ran)}

        for tool, command in commands.items():
            yield tool, command, touched
        write_ssh(self._folder / "ssh", self._cluster.ssh_config)

    def _launcher(self) -> Iterator[Case]:
        hosts = self._cluster.hosts[:RANKS]
        hostfile = self._folder / "ranks"
        hostfile.write_text("".join(f"{host} slots=1\n" for host in hosts))
        slots = ",".join(f"{host}:1" for host in hosts)
        worker = [*_NINE, "/data/told", "2"]
        grace = ("--leader-grace", "0", *self._config, "--", *worker)
        commands = {
            "hvd-elastic run --leader-grace 0": our_tool(
                "hvd_elastic", "run", "-H", str(hostfile), *grace
            ),
            "runclust": our_tool("runclust", str(hostfile), *self._config, shlex.join(worker)),
            "horovodrun": _horovodrun(hosts, worker),
            "mpirun": ["mpirun", "-np", str(RANKS), "-H", slots, *worker],
        }
        for tool, command in commands.items():
            yield tool, command, lambda begun: self._kill_launcher(begun, hosts)

    def _killed(self) -> Iterator[Case]:
        host = self._cluster.hosts[0]
        hostfile = self._folder / "one"
        hostfile.write_text(f"{host} slots=1\n")
        worker = [*_NINE, "/data/told"]
        named = (*self._config, "--run-id", "nine", "--", *worker)
        run = our_tool("hvd_elastic", "run", "-H", str(hostfile), *named)
        kill = our_tool("killclust", str(hostfile), *self._config, "--run", "nine")
        ssh, pkill = ["ssh", host, shlex.join(worker)], ["ssh", host, "pkill -9 python"]
        yield "killclust --run", kill, lambda end: self._crash_and_end(host, run, end)
        yield "pkill -9 python", pkill, lambda end: self._crash_and_end(host, ssh, end)

    # ---- what they do

    def _follow(self, command: Sequence[str], wanted: int) -> Values:
        begun = time.monotonic()
        process = self._start(command, stdout=subprocess.PIPE)
        assert process.stdout is not None, "it was asked for"
        found = 0
        values = {}
        for line in process.stdout:
            found += b"here" in line
            if found == wanted and "results" not in values:
                values["results"] = round(time.monotonic() - begun, 2)
        process.wait(LIMIT_S)
        return {**values, "end": round(time.monotonic() - begun, 2)}

    def _kill_launcher(self, command: Sequence[str], hosts: Sequence[str]) -> Values:
        process = self._start(command)
        pids = {host: self._told(host, 3, process) for host in hosts}
        process.kill()
        process.wait()
        time.sleep(AFTER_S)
        return {"left": float(sum(self._alive(host, pid) for host in hosts for pid in pids[host]))}

    def _crash_and_end(self, host: str, start: Sequence[str], end: Sequence[str]) -> Values:
        bystanders = [
            self._cluster.popen_on(host, [sys.executable, "-c", _WAIT], env=variables)
            for variables in ({}, {"HVD_ELASTIC_RUN_ID": "another"}, {"HOROVOD_RANK": "0"})
        ]
        process = self._start(start)
        try:
            pids = self._told(host, len(nine_kinds.KINDS) + 1, process)
            process.kill()
            process.wait()
            with contextlib.suppress(ProcessLookupError):
                self._cluster.kill(host, pids[-1])
            self._run(end)
            return {
                "left": float(sum(self._alive(host, pid) for pid in pids)),
                "hurt": float(sum(each.poll() is not None for each in bystanders)),
            }
        finally:
            for each in bystanders:
                each.kill()
                each.wait()

    # ---- helpers

    def _start(self, command: Sequence[str], stdout: int | None = None) -> subprocess.Popen[bytes]:
        with (self._folder / "output").open("ab") as output:
            return subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=output,
                start_new_session=True,
            )

    def _run(self, command: Sequence[str]) -> None:
        """Run a command until it ends or LIMIT_S is over, with any exit status."""
        process = self._start(command)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _told(self, host: str, count: int, process: subprocess.Popen[bytes]) -> list[int]:
        """Return the process ids on the host of a worker and its processes; its own is last."""
        path = self._cluster.data(host) / "told"
        deadline = time.monotonic() + LIMIT_S
        while True:
            lines = path.read_text().splitlines() if path.exists() else []
            if len(lines) >= count:
                lines.sort(key=lambda line: line.endswith("the worker"))
                return [int(line.split()[0]) for line in lines]
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (self._folder / "output").read_text(errors="replace")[-500:]
                raise RunError(f"no worker on {host}: {tail}")
            time.sleep(0.05)

    def _alive(self, host: str, pid: int) -> bool:
        try:
            self._cluster.kill(host, pid, 0)
        except (ProcessLookupError, VirtualClusterError):
            return False
        return True


def _shells(hosts: Sequence[str], command: str) -> dict[str, list[str]]:
    names = ",".join(hosts)
    return {
        "pdsh": ["pdsh", "-R", "ssh", "-w", names, command],
        "clush": ["clush", "-w", names, command],
    }


def _horovodrun(hosts: Sequence[str], command: Sequence[str]) -> list[str]:
    where = ",".join(f"{host}:1" for host in hosts)
    options = ["--gloo", "--network-interfaces", "lo", "-np", str(len(hosts)), "-H", where]
    return ["horovodrun", *options, *command]


def measure_faults(rows: Sequence[str], peers: bool, say: Say) -> Result:
    """Measure the given rows.

    Args:
        rows: names in :data:`FAULTS`.
        peers: whether other tools are measured too.
        say: called with every figure.

    Raises:
        UsageError: a row is unknown.
        VirtualClusterError: this process is not root.
    """
    check_names("--faults", rows, FAULTS)
    load_before = os.getloadavg()
    with (
        tempfile.TemporaryDirectory(prefix="hvd_elastic-faults-") as folder,
        VirtualCluster.up(HOSTS, 1, loopback=False) as cluster,
    ):
        measuring = _Measuring(cluster, Path(folder), peers, say)
        for row in rows:
            measuring.measure(row)
    taken = conditions("virtual hosts (namespaces)", "Each was seen once.", load_before)
    return faults_result(taken, measuring.found)


def faults_result(taken: Conditions, found: Sequence[Seen]) -> Result:
    """Return the result with the measured figures."""
    meanings = {row: FAULTS[row] for row in dict.fromkeys(seen.row for seen in found)}
    lines = [*map(_line, found), "", *(f"{row}: {text}" for row, text in meanings.items())]
    body = {"rows_mean": meanings, "rows": found}
    return Result("cluster_faults", taken, body, ["\n".join(lines)])


def _line(seen: Seen) -> str:
    values = ", ".join(f"{name} {value:g}" for name, value in seen.values.items())
    wanted = ", ".join(f"{name} {value:g}" for name, value in seen.wanted.items())
    limit = f" (at most {wanted})" if wanted else ""
    return f"{seen.row:9} {seen.tool:33} {values or seen.note}{limit}"
