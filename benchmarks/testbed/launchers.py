"""Launchers of a training script on several hosts, each with its default settings.

There are two kinds: a *driver* is one program on the leader that connects to the hosts itself and
reads a list of hosts; *agents* are started by us over ssh, one for each host or worker. For both
kinds :meth:`Job.use` sets the hosts and workers.

Settings that a launcher needs beyond its defaults to run on virtual hosts are made here, with the
reason.
"""

from __future__ import annotations

import abc
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

from benchmarks.testbed.environments import PeerEnvironment, PeerMissingError
from benchmarks.testbed.hosts import Testbed
from benchmarks.testbed.marks import Lane, MarkFolder, Process
from hvd_elastic.errors import RunError
from hvd_elastic.records.json_lines import Record, read_records
from hvd_elastic.signals import uninterrupted

Found = TypeVar("Found")

ROOT = Path(__file__).resolve().parents[2]
OUR_PROGRAM = (sys.executable, "-m", "hvd_elastic.cli.app")
_POLL_S = 0.02
_RDZV_PORT = 29400
_STORE_PORT = 29600
_RESTARTS = 100_000


class FailedPlayError(RunError):
    """A job did not reach the state that was waited for.

    Attributes:
        short: short reason for the table.
        detail: last lines of the job's output.
    """

    def __init__(self, short: str, detail: str = "") -> None:
        super().__init__(f"{short}:\n{detail}" if detail else short)
        self.short = short
        self.detail = detail


@dataclass(frozen=True)
class Order:
    """Description of a job to launch.

    Attributes:
        slots: host → number of workers at the start.
        training: training script and its arguments.
        min_np: fewest workers to train with.
        max_np: most workers that the job will ever have; 0: those at the start.
        np: workers wanted; None: one in every slot. Agents always start one in every slot.
        options: further options for ``hvd-elastic run``; other launchers ignore them.
        environment: further environment variables for launcher and workers.
    """

    slots: Mapping[str, int]
    training: Sequence[str] = ()
    min_np: int = 1
    max_np: int = 0
    np: int | None = None
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """Number of workers at the start."""
        return self.np or sum(self.slots.values())

    @property
    def most(self) -> int:
        """Largest number of workers that the job will ever have."""
        return self.max_np or self.workers


class Job(abc.ABC):
    """One launched training job.

    Attributes:
        launcher: name of the launcher.
        asked: when the command was started [s, monotonic].
        marks: marks that the job's processes write.
        folder: folder of the job, which all hosts see.
    """

    def __init__(self, launcher: str, bed: Testbed, folder: Path, order: Order) -> None:
        self.launcher = launcher
        self.bed = bed
        self.folder = folder
        self.order = order
        self.marks = MarkFolder(folder / "marks")
        self.asked = time.monotonic()

    @property
    def events_path(self) -> Path:
        """Path of ``events.jsonl``; for jobs of hvd-elastic only."""
        return self.folder / "home/runs/bench/events.jsonl"

    def events(self, kind: str) -> list[Record]:
        """Return the events of a kind; for jobs of hvd-elastic only."""
        return [event for event in read_records(self.events_path) if event["kind"] == kind]

    def newest(self, lane: Lane) -> Process:
        """Return the process that was started last in a lane (host and slot)."""
        return next(p for p in reversed(self.marks.processes) if p.lane == lane)

    @abc.abstractmethod
    def use(self, slots: Mapping[str, int]) -> float:
        """Set the hosts and their workers; return when [s, monotonic]."""

    @abc.abstractmethod
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Return the processes on this machine whose end means the end of the job."""

    def time_plain(self, launcher: Launcher, host: str, limit_s: float) -> float:
        """Run the workload on a host without a launcher until it is ready, and return the time [s].

        Of our own launchers only: their workloads run under plain ``python`` too.
        """
        folder = self.folder / "plain"
        (folder / "marks").mkdir(parents=True)
        command = [sys.executable, *_marked(folder, self.order, *launcher.marking)]
        found, began = MarkFolder(folder / "marks"), time.monotonic()

        def ready() -> Process | None:
            found.poll()
            return next((each for each in found.processes if each.ready is not None), None)

        with (folder / "output").open("wb") as out:
            streams = {"stdout": out, "stderr": subprocess.STDOUT}
            environment = _driver_environment(self.order)
            plain = self.bed.cluster.popen_on(host, command, env=environment, **streams)
        process = self.wait(ready, limit_s, "plain Python was not ready")
        self.bed.kill(host, process.pid)
        plain.wait()
        assert process.ready is not None
        return process.ready - began

    def sleep(self) -> None:
        """Sleep between two checks: short compared with the figures, long compared with a check."""
        time.sleep(_POLL_S)

    def ended(self) -> int | None:
        """Return the exit status if the job is over, else None."""
        statuses = [process.poll() for process in self.processes()]
        if not statuses or None in statuses:
            return None
        return next((status for status in statuses if status), 0)

    def wait(self, look: Callable[[], Found | None], limit_s: float, never: str = "never") -> Found:
        """Read the marks and call ``look`` until it returns something true; return that.

        Args:
            look: function that returns a false value as long as the condition is not met.
            limit_s: longest time to wait [s].
            never: description of what did not happen, for the table.

        Raises:
            FailedPlayError: the job ended, or the time was over.
        """
        deadline = time.monotonic() + limit_s
        while True:
            ended = self.ended() is not None
            self.marks.poll()
            found = look()
            if found:
                return found
            if ended:
                raise FailedPlayError("the job died", self.output_tail())
            if time.monotonic() > deadline:
                raise FailedPlayError(f"{never} within {limit_s:.0f} s", self.output_tail())
            self.sleep()

    def output_tail(self) -> str:
        """Return the last lines that the launcher printed."""
        lines: list[str] = []
        for path in sorted(self.folder.glob("output*")):
            lines += path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return "\n".join(lines)

    def end(self) -> None:
        """End the job's processes on this machine; the testbed ends those on hosts."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], name: str = "output"
    ) -> subprocess.Popen[bytes]:
        # In a session of its own, so that Ctrl-C reaches only the benchmark.
        return start_logged(
            command, self.folder / name, environment, cwd=self.folder, new_session=True
        )


class DriverJob(Job):
    """A job led by one program on this machine, the process ``process``."""

    def __init__(
        self,
        launcher: str,
        bed: Testbed,
        folder: Path,
        order: Order,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(launcher, bed, folder, order)
        self._environment = environment
        self.asked = self.use(order.slots)
        self.process = self._start(command, environment)

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [self.process]

    def use(self, slots: Mapping[str, int]) -> float:
        return write_hostfile(self.bed.hostfile, slots)

    def kill_leader(self) -> float:
        """Kill only the leader, with signal 9; return when [s, monotonic]."""
        asked = time.monotonic()
        self.process.kill()
        self.process.wait()
        return asked

    def resume(self) -> None:
        """Start another leader of hvd-elastic in place of the killed one."""
        command = [*OUR_PROGRAM, "run", "--resume", "bench"]
        self.process = self._start(command, self._environment, "output-resumed")


class AgentsJob(Job):
    """A job whose agents are started over ssh and ended with SIGTERM, as a user would."""

    def __init__(self, launcher: _AgentLauncher, bed: Testbed, folder: Path, order: Order) -> None:
        super().__init__(launcher.name, bed, folder, order)
        self._kind = launcher
        self._agents: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._slots: dict[str, int] = {}
        self._helpers: list[subprocess.Popen[bytes]] = []
        helper = launcher.helper(self)
        if helper:
            self._helpers.append(self._start(helper, os.environ, "output-helper"))
        self.asked = self.use(order.slots)

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return list(self._agents.values())

    def end(self) -> None:
        for process in self._helpers:
            process.kill()
            process.wait()
        super().end()

    def use(self, slots: Mapping[str, int]) -> float:
        asked = time.monotonic()
        for host in {*self._slots, *slots}:
            had, wanted = self._slots.get(host, 0), slots.get(host, 0)
            step = self._kind.workers_per_agent or max(1, wanted - had)
            for first in range(had, wanted, step):
                self._start_agent(host, first, min(step, wanted - first))
            for first in [f for h, f in self._agents if h == host and f >= wanted]:
                self._end_agent(host, first)
        self._slots = dict(slots)
        return asked

    def _start_agent(self, host: str, first: int, workers: int) -> None:
        name = f"{host}-{first}"
        variables = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "GLOO_SOCKET_IFNAME": "eth0",  # the only interface that reaches the other hosts
            "HVD_ELASTIC_BENCH_SLOT": str(first),
            **self._kind.variables(self),
            **self.order.environment,
        }
        settings = [f"{key}={value}" for key, value in variables.items()]
        command = shlex.join(["env", *settings, *self._kind.agent(self, host, first, workers)])
        remote = f"cd {self.folder} && echo $$ > agent-{name}.pid && exec {command}"
        ssh = ["ssh", "-F", str(self.bed.cluster.ssh_config), host, remote]
        self._agents[host, first] = self._start(ssh, os.environ, f"output-{name}")

    def _end_agent(self, host: str, first: int) -> None:
        process = self._agents.pop((host, first))
        self._helpers.append(process)  # ends slowly, and is waited for at the end of the job
        pid = int((self.folder / f"agent-{host}-{first}.pid").read_text())
        self.bed.cluster.kill(host, pid, signal.SIGTERM)


class Launcher(abc.ABC):
    """A way to launch training.

    Attributes:
        key: short name for ``--peers`` and the JSON file.
        name: name for tables.
        script: name of its version of the workload in ``benchmarks/peers/``.
        needs: module that must be importable, and how to install it.
        is_ours: whether it is ``hvd-elastic run``.
        marking: options of :mod:`benchmarks.testbed.marking` for its workload.
    """

    key: ClassVar[str]
    name: ClassVar[str]
    script: ClassVar[str]
    is_ours: ClassVar[bool] = False
    marking: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, str]] = ("torch", "PyTorch is not installed; use: make env")

    @property
    def workload(self) -> Path:
        """Path of :attr:`script`."""
        return ROOT / "benchmarks/peers" / self.script

    def prepare(self) -> list[Path]:
        """Make the launcher usable; return the folders that the hosts must see.

        Raises:
            PeerMissingError: it cannot be used; the message gives the reason.
        """
        module, missing = self.needs
        if importlib.util.find_spec(module) is None:
            raise PeerMissingError(missing)
        return []

    def versions(self) -> dict[str, str]:
        """Return the versions of packages that are not in this Python's environment."""
        return {}

    @abc.abstractmethod
    def launch(self, bed: Testbed, folder: Path, order: Order) -> Job:
        """Start a job."""

    @contextlib.contextmanager
    def job(self, bed: Testbed, order: Order) -> Iterator[Job]:
        """Launch a job for the length of the block; then end it and bring all hosts up again."""
        with bed.job_folder() as folder:
            job = self.launch(bed, folder, order)
            try:
                yield job
            finally:
                with uninterrupted():
                    job.end()


def start_logged(
    command: Sequence[str],
    output: Path,
    environment: Mapping[str, str],
    *,
    cwd: Path | None = None,
    new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a command without input, with its output appended to a file."""
    with output.open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=new_session,
        )


def write_hostfile(path: Path, slots: Mapping[str, int], extra: str = "") -> float:
    """Replace a hostfile, as an editor does; return when [s, monotonic]."""
    replacement = path.with_suffix(".new")
    lines = [f"{host} slots={count}\n" for host, count in slots.items()]
    replacement.write_text("".join(lines) + extra)
    asked = time.monotonic()
    replacement.replace(path)
    return asked


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _marked(folder: Path, order: Order, *options: str) -> list[str]:
    return ["-m", "benchmarks.testbed.marking", *options, str(folder / "marks"), *order.training]


def _driver_environment(order: Order, **more: str) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **order.environment, **more}
    # One thread per rank, the same for all launchers, since ranks share few cores.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


class _Ours(Launcher):
    key = "ours"
    name = "hvd-elastic run"
    script = "train_ours.py"
    is_ours = True

    def launch(self, bed: Testbed, folder: Path, order: Order) -> DriverJob:
        np = () if order.np is None else ("--np", str(order.np))
        command = [
            *(*OUR_PROGRAM, "run", "--run-id", "bench", *np),
            *("--hostfile", str(bed.hostfile), "--ssh-config", str(bed.cluster.ssh_config)),
            *("--min-np", str(order.min_np), *order.options, "--"),
            *(sys.executable, *_marked(folder, order, *self.marking)),
        ]
        environment = _driver_environment(order, HVD_ELASTIC_HOME=str(folder / "home"))
        return DriverJob(self.name, bed, folder, order, command, environment)


class _Keras(_Ours):
    key = "keras"
    name = "hvd-elastic run, model.fit"
    script = "train_keras.py"
    marking = ("--own-steps",)
    needs = ("horovod.tensorflow", "Horovod is not built for TensorFlow; use: make horovod")


class _StaticHorovod(Launcher):
    key = "horovod-static"
    name = "horovodrun -np"
    script = "train_horovod.py"
    needs = ("horovod", "Horovod is not installed; use: make horovod")

    def hosts(self, bed: Testbed, order: Order) -> list[str]:
        """Return the options that name the hosts."""
        return ["-H", ",".join(f"{host}:{n}" for host, n in order.slots.items())]

    def launch(self, bed: Testbed, folder: Path, order: Order) -> DriverJob:
        # horovodrun gives workers the name of the leader's interface, which differs on the hosts.
        interface = bed.interface if bed.cluster.loopback else "eth0"
        variables = [f"{key}={value}" for key, value in order.environment.items()]
        command = [
            *(sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(order.workers)),
            # Saves horovodrun the search for common interfaces, whose names differ on the hosts.
            *("--network-interfaces", bed.interface, *self.hosts(bed, order)),
            *("env", f"HOROVOD_GLOO_IFACE={interface}", *variables),
            *(sys.executable, *_marked(folder, order, *self.marking)),
        ]
        path = f"{bed.programs}{os.pathsep}{os.environ['PATH']}"
        # horovodrun caches in HOME for an hour which hosts it has reached over ssh.
        environment = _driver_environment(order, PATH=path, HOME=str(bed.scratch))
        return DriverJob(self.name, bed, folder, order, command, environment)


class _TensorFlowHorovod(_StaticHorovod):
    key = "horovod-tensorflow"
    marking = ("--own-steps",)


class _ElasticHorovod(_StaticHorovod):
    key = "horovod"
    name = "horovodrun --host-discovery-script"

    def hosts(self, bed: Testbed, order: Order) -> list[str]:
        bounds = ["--min-np", str(order.min_np), "--max-np", str(order.most)]
        return [*bounds, "--host-discovery-script", str(bed.discovery_script)]


class _AgentLauncher(Launcher):
    workers_per_agent: ClassVar[int]
    """Number of workers of one agent; 0: all workers of its host."""

    def launch(self, bed: Testbed, folder: Path, order: Order) -> Job:
        return AgentsJob(self, bed, folder, order)

    def helper(self, job: Job) -> list[str]:
        """Return the command of a program on the leader that the agents need; empty: none."""
        return []

    @abc.abstractmethod
    def variables(self, job: Job) -> dict[str, str]:
        """Return further variables for the agent's environment."""

    @abc.abstractmethod
    def agent(self, job: Job, host: str, first: int, workers: int) -> list[str]:
        """Return the command of one agent."""


class _Torchrun(_AgentLauncher):
    key = "torchrun"
    name = "torchrun"
    script = "train_torchrun.py"
    workers_per_agent = 0

    def variables(self, job: Job) -> dict[str, str]:
        # Without this setting an agent that joins hangs for 60 s and both agents end.
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def agent(self, job: Job, host: str, first: int, workers: int) -> list[str]:
        meeting = next(iter(job.order.slots))
        fewest = min(job.order.min_np, job.order.most)
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", f"{fewest}:{job.order.most}", "--nproc-per-node", str(workers)),
            *("--max-restarts", str(_RESTARTS), "--rdzv-backend", "c10d", "--rdzv-id", "bench"),
            *("--rdzv-endpoint", f"{job.bed.cluster.address(meeting)}:{_RDZV_PORT}"),
            *(*_marked(job.folder, job.order), "--snapshot", str(job.folder / "snapshot")),
        ]


class _MultiWorkerMirrored(_AgentLauncher):
    key = "mirrored"
    name = "MultiWorkerMirroredStrategy"
    script = "train_keras.py"
    needs = ("tensorflow", "TensorFlow is not installed; use: make env")
    workers_per_agent = 1

    def variables(self, job: Job) -> dict[str, str]:
        return {}

    def agent(self, job: Job, host: str, first: int, workers: int) -> list[str]:
        hosts = list(job.order.slots)
        named = [f"{job.bed.cluster.address(each)}:{_STORE_PORT}" for each in hosts]
        task = {"type": "worker", "index": hosts.index(host)}
        told = json.dumps({"cluster": {"worker": named}, "task": task})
        marked = _marked(job.folder, job.order, "--own-steps")
        return ["env", f"TF_CONFIG={told}", sys.executable, *marked]


class _Torchft(_AgentLauncher):
    key = "torchft"
    name = "torchft"
    script = "train_torchft.py"
    workers_per_agent = 1

    def __init__(self) -> None:
        self._environment = PeerEnvironment("torchft", ("torchft-nightly",), "torchft")

    def prepare(self) -> list[Path]:
        return [self._environment.make()]

    def versions(self) -> dict[str, str]:
        return {"torchft-nightly": self._environment.version("torchft-nightly")}

    def helper(self, job: Job) -> list[str]:
        address = job.bed.cluster.leader_address
        lighthouse = f"{address}:{free_port(address)}"
        job.folder.joinpath("lighthouse").write_text(lighthouse)
        program = str(self._environment.folder / "bin/torchft_lighthouse")
        return [program, "--bind", lighthouse, "--min_replicas", str(job.order.min_np)]

    def variables(self, job: Job) -> dict[str, str]:
        return {"TORCHFT_LIGHTHOUSE": f"http://{job.folder.joinpath('lighthouse').read_text()}"}

    def agent(self, job: Job, host: str, first: int, workers: int) -> list[str]:
        # As in its manual: a torchrun for each replica group, which restarts its worker.
        return [
            *(str(self._environment.python), "-m", "torch.distributed.run"),
            *("--nnodes", "1", "--nproc-per-node", str(workers)),
            # The other groups get the address of its store, which would be 127.0.0.1 by default.
            *("--master-addr", job.bed.cluster.address(host)),
            *("--master-port", str(_STORE_PORT + first), "--max-restarts", str(_RESTARTS)),
            *_marked(job.folder, job.order),
        ]


OURS: Launcher = _Ours()
KERAS: Launcher = _Keras()
STATIC: Launcher = _StaticHorovod()
STATIC_TENSORFLOW: Launcher = _TensorFlowHorovod()
ELASTIC: Launcher = _ElasticHorovod()
TORCHRUN: Launcher = _Torchrun()
MIRRORED: Launcher = _MultiWorkerMirrored()
TORCHFT: Launcher = _Torchft()

LAUNCHERS = (OURS, STATIC, ELASTIC)
"""Launchers whose start is measured."""
PEERS = {launcher.key: launcher for launcher in (OURS, KERAS, ELASTIC, TORCHRUN, TORCHFT)}
"""Launchers whose elasticity is measured."""
