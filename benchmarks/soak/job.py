"""The run that a soak disturbs: starts and ends it, and finds its processes on the hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from typing_extensions import Self

from benchmarks.soak.records import RecordFolder
from benchmarks.soak.schedule import MIN_NP
from benchmarks.testbed.launchers import OUR_PROGRAM, ROOT, start_logged, write_hostfile
from benchmarks.testbed.run_processes import (
    agents_on,
    left_on_host,
    processes_of,
    temporary_entries,
    workers_of,
)
from hvd_elastic.errors import RunError
from hvd_elastic.records.json_lines import Follower, Record, decode_record
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.virtual import VirtualCluster

CLEAN_S = 15.0
"""Time after the end of a run by which nothing of it may be left on any host."""

_CHECKPOINT_EVERY_S = 2.0
_KEEP_CHECKPOINTS = 4
_POLL_S = 0.05


@dataclass(frozen=True)
class Target:
    """A process of the run, as seen from this machine.

    Attributes:
        role: ``leader``, ``agent`` or ``worker``.
        host: host that it runs on.
        name: name of a worker; empty for the others.
        slot: slot of a worker; 0 for the others.
        pid: process id on this machine.
        born: start time by the system's clock; distinguishes later processes with the same id.
    """

    role: str
    host: str
    name: str
    slot: int
    pid: int
    born: float

    @property
    def label(self) -> str:
        """Name for the report."""
        return self.name or f"{self.role} {self.host} (process {self.pid})".replace("  ", " ")

    def send(self, number: int) -> bool:
        """Send a signal; return whether the process was still alive."""
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if psutil.Process(self.pid).create_time() == self.born:
                os.kill(self.pid, number)
                return True
        return False


@dataclass(frozen=True)
class Ground:
    """Hosts and folders that runs use.

    Attributes:
        hosts: all hosts that a hostfile may name.
        scratch: folder that this machine and all hosts see.
        data: folder of the data set, inside ``scratch``.
        cluster: the virtual hosts.
    """

    hosts: tuple[str, ...]
    scratch: Path
    data: Path
    cluster: VirtualCluster

    @property
    def namespaces(self) -> bool:
        """Whether links can be cut and disks can be filled."""
        return not self.cluster.loopback

    @property
    def description(self) -> str:
        """How many hosts of which kind these are."""
        kind = "addresses of the loopback network" if self.cluster.loopback else "namespaces"
        return f"{len(self.hosts)} virtual hosts ({kind})"


class SoakJob:
    """``hvd-elastic run`` with the soak's training script.

    As a context manager it ends all processes of the run.

    Args:
        ground: hosts and folders to use.
        run_id: id of the run.
        hosts: host → slots of the first hostfile.
        failure_timeout_s: time without a sign of life after which a host counts as lost [s].
        step_time_s: time added to each step [s].
        epochs: number of epochs to train; None: until :meth:`ask_to_end`.
    """

    def __init__(
        self,
        ground: Ground,
        run_id: str,
        hosts: Mapping[str, int],
        *,
        failure_timeout_s: float,
        step_time_s: float,
        epochs: int | None = None,
    ) -> None:
        self.ground = ground
        self.run_id = run_id
        self.hosts = dict(hosts)
        self.wanted: int | None = None
        self.events: list[Record] = []
        self.lives = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.home = ground.scratch / "home"
        self.folder = RunFolder(self.home / "runs" / run_id)
        self.hostfile = ground.scratch / f"{run_id}.hosts"
        self.output = ground.scratch / f"{run_id}.out"
        self._until = ground.scratch / f"{run_id}.enough"
        self._records_folder = ground.scratch / f"{run_id}.records"
        self._records_folder.mkdir()
        self.records = RecordFolder(self._records_folder)
        self.chronicle = self.records.chronicle
        self._follower = Follower(self.folder.events, decode_record)
        self._temporary = temporary_entries(ground.cluster)
        self._run = [
            *("--run-id", run_id, "--hostfile", str(self.hostfile), "--audit"),
            *("--min-np", str(MIN_NP), "--checkpoint-every", str(_CHECKPOINT_EVERY_S)),
            *("--keep-checkpoints", str(_KEEP_CHECKPOINTS)),
            *("--failure-timeout", str(failure_timeout_s)),
            *("--ssh-config", str(ground.cluster.ssh_config)),
            *("--", sys.executable, str(ROOT / "benchmarks/soak/train.py")),
            *("--data", str(ground.data), "--records", str(self._records_folder)),
            *("--until", str(self._until), "--step-time", str(step_time_s)),
            *(() if epochs is None else ("--epochs", str(epochs))),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_at_once()

    def end_at_once(self) -> None:
        """End the run and all of its processes, in any state."""
        for target in self.targets():
            target.send(signal.SIGCONT)
            if target.role == "leader":
                target.send(signal.SIGTERM)
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(CLEAN_S)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        for target in self.targets():
            target.send(signal.SIGKILL)

    # -- starting and ending ---------------------------------------------------------------

    def start(self) -> None:
        """Start the run."""
        self.write_hostfile()
        self._launch(*self._run)

    def resume(self) -> None:
        """Start another leader, which resumes the run."""
        self._launch("--resume", self.run_id)

    def ask_to_end(self) -> None:
        """Have training end at the end of the present epoch."""
        self._until.touch()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the leader; return its exit status, or None if it has not ended."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self.poll()
        return self.process.poll()

    def output_tail(self) -> str:
        """Return the last lines that the leaders printed."""
        text = self.output.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-20:])

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another command of hvd-elastic as the same user."""
        command, environment = [*OUR_PROGRAM, *arguments], self._environment()
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)

    def _launch(self, *arguments: str) -> None:
        self.lives += 1
        # In a new session, so that Ctrl-C reaches only the soak, which ends the run in order.
        self.process = start_logged(
            [*OUR_PROGRAM, "run", *arguments],
            self.output,
            self._environment(),
            cwd=self.ground.scratch,
            new_session=True,
        )

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HVD_", "HOROVOD_"))}
        kept |= {"HVD_ELASTIC_HOME": str(self.home), "PYTHONPATH": str(ROOT)}
        return kept | {"OMP_NUM_THREADS": "1"}

    # -- following -------------------------------------------------------------------------

    def poll(self) -> None:
        """Read new events of the run and new records of its processes."""
        self.events += self._follower.poll()
        self.records.poll()

    def leader_alive(self) -> bool:
        """Return whether the newest leader is alive."""
        return self.process is not None and self.process.poll() is None

    def newest_leader_hears_since(self, mono: float) -> bool:
        """Return whether the newest leader has received metrics after a time [s, monotonic]."""
        lives = [n for n, event in enumerate(self.events) if event["kind"] == "run_started"]
        if len(lives) < self.lives:
            return False
        heard = (e for e in reversed(self.events[lives[-1] :]) if e["kind"] == "metrics")
        newest = next(heard, None)
        return newest is not None and newest["mono"] > mono

    def trains_as_wanted(self) -> bool:
        """Return whether the current world has a rank in each slot that the run should use."""
        world = self.chronicle.current
        if world is None or len(world.members) != world.size:
            return False
        if self.wanted is not None:
            return world.size == self.wanted
        return dict(world.slots()) == self.hosts

    def story(self, since: float = 0.0) -> list[str]:
        """Return the run's own events after a time [s, monotonic], the newest 60 lines."""
        lines = []
        for event in self.events:
            if event["mono"] >= since and event["kind"] not in ("metrics", "checkpoint"):
                rest = {k: v for k, v in event.items() if k not in ("t", "mono", "kind", "command")}
                lines.append(f"{event['mono'] - since:8.2f} {event['kind']} {rest}")
        return lines[-60:]

    # -- the hostfile ----------------------------------------------------------------------

    def write_hostfile(self, extra: str = "") -> None:
        """Rewrite the hostfile; ``extra``: further lines."""
        write_hostfile(self.hostfile, self.hosts, extra)

    # -- finding processes -----------------------------------------------------------------

    def targets(self) -> list[Target]:
        """Return the leader, agents and workers that are alive now."""
        found = []
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(psutil.Error):
                leader = psutil.Process(self.process.pid)
                found.append(Target("leader", "", "", 0, leader.pid, leader.create_time()))
        found += self.agents()
        for worker in workers_of(self.run_id):
            with contextlib.suppress(psutil.Error):
                born = psutil.Process(worker.pid).create_time()
                found.append(Target("worker", **vars(worker), born=born))
        return found

    def workers(self, host: str | None = None) -> list[Target]:
        """Return the workers of one host or of all."""
        return [t for t in self.targets() if t.role == "worker" and host in (None, t.host)]

    def agents(self, host: str | None = None) -> list[Target]:
        """Return the agents of one host or of all."""
        hosts = self.ground.hosts if host is None else [host]
        found = []
        for where, process in agents_on(self.ground.cluster, hosts):
            with contextlib.suppress(psutil.Error):
                found.append(Target("agent", where, "", 0, process.pid, process.create_time()))
        return found

    # -- after the end ---------------------------------------------------------------------

    def left_behind(self) -> list[str]:
        """Return what is still on a host :data:`CLEAN_S` after the end; should be empty."""
        end = time.monotonic() + CLEAN_S
        while (left := [*self._left()]) and time.monotonic() < end:
            time.sleep(_POLL_S)
        return left

    def _left(self) -> Iterator[str]:
        for process in processes_of(self.run_id):
            with contextlib.suppress(psutil.Error):
                yield f"process {process.pid}: {' '.join(process.cmdline()[:6])}"
        for host in self.ground.hosts:
            yield from left_on_host(self.ground.cluster, host, self.run_id)
        spool = self.home / "spool" / self.run_id
        if spool.exists():
            inside = [*spool.rglob("*")]
            # Disks that the soak has mounted there stay until its own end.
            if not any(path.is_mount() for path in inside):
                yield f"the folder {spool}"
            for path in inside:
                if not path.is_mount():
                    yield f"spool: {path.relative_to(spool)}"
        if self.folder.leader_alive():
            yield "the lock of the leader"
        for host, name in sorted(temporary_entries(self.ground.cluster) - self._temporary):
            yield f"{host}: /tmp/{name}"

    def keep(self, folder: Path) -> None:
        """Copy the run folder, records and output, to find the cause of a failure."""
        folder.mkdir(parents=True, exist_ok=True)
        for source in (self.folder.path, self._records_folder):
            if source.is_dir():
                ignored = shutil.ignore_patterns("*.pt", "leader.lock", "ballast")
                shutil.copytree(source, folder / source.name, ignore=ignored, dirs_exist_ok=True)
        if self.output.exists():
            shutil.copy(self.output, folder)


def checked_end(job: SoakJob, timeout_s: float) -> str:
    """End training and wait for it; return what is wrong, or "".

    Raises:
        RunError: the run was never started.
    """
    if job.process is None:
        raise RunError(f"run {job.run_id} was not started")
    job.ask_to_end()
    status = job.wait(timeout_s)
    if status is None:
        return f"the run did not end within {timeout_s:.0f} s of being asked to"
    if status != 0:
        return f"the run ended with status {status}:\n{job.output_tail()}"
    return ""
