"""A real job on a virtual cluster: started, followed, disturbed, ended, and checked afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from typing_extensions import Self

from benchmarks.testbed.run_processes import (
    WorkerProcess,
    agents_on,
    left_on_host,
    processes_of,
    processes_with,
    temporary_entries,
    workers_of,
)
from hvd_elastic.records.audit import AuditResult, check_audit
from hvd_elastic.records.json_lines import Follower, Record, decode_record, read_records
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.virtual import VirtualCluster
from tests.checked_events import check_event
from tests.paths import LIMIT_S, LITTLE_WORK, ROOT, WORKER_PYTHONPATH

__all__ = ["CLEAN_S", "RunningJob", "Stage", "WorkerProcess", "processes_with"]

PROBE = ROOT / "tests" / "dist" / "scripts" / "train_probe.py"
TENSORFLOW_PROBE = PROBE.with_name("train_probe_tensorflow.py")
PROBES = {
    "torch": [str(PROBE), "FOLDER"],
    "fit": [str(TENSORFLOW_PROBE), "FOLDER", "--style", "fit"],
    "loop": [str(TENSORFLOW_PROBE), "FOLDER", "--style", "loop"],
}
"""The probe script by the style of its training."""
DEADLINE_S = CLEAN_S = LIMIT_S
END_S = 4 * LIMIT_S
"""For a whole training."""
POLL_S = 0.02


@dataclass
class Stage:
    """Virtual hosts, and a folder that this machine and all of them see.

    Attributes:
        services: names of processes that belong on the hosts, such as those of an engine.
    """

    cluster: VirtualCluster
    folder: Path
    services: frozenset[str] = frozenset()

    @property
    def hosts(self) -> list[str]:
        return self.cluster.hosts

    def boot_all(self) -> None:
        """Start the hosts that a test has crashed."""
        for host in self.hosts:
            if self.cluster.status(host) == "off":
                self.cluster.boot(host)


class RunningJob:
    """``hvd-elastic run`` with the probe script, beside the test.

    As a context manager it ends everything it started, whatever happened.

    Args:
        stage: where.
        hosts: host name → slots, the hostfile in this order; None: there is no hostfile.
        options: more options of ``run``.
        script: command instead of the probe; FOLDER stands for the job's.
        script_options: of the probe.
        style: which probe, of :data:`PROBES`.
        program: what the interpreter is given for ``hvd-elastic``.
        verb: what of ours begins the run.
        stdout: where the first leader prints; None: into ``output``.
    """

    home_name = "home"

    def __init__(
        self,
        stage: Stage,
        hosts: Mapping[str, int] | None,
        *options: str,
        script: list[str] | None = None,
        script_options: tuple[str, ...] = (),
        style: str = "torch",
        program: tuple[str, ...] = ("-m", "hvd_elastic.cli.app"),
        verb: tuple[str, ...] = ("run",),
        stdout: int | None = None,
    ) -> None:
        self.stage = stage
        self.run_id = f"job-{secrets.token_hex(4)}"
        self.folder = stage.folder / self.run_id
        self.folder.mkdir()
        self.home = self.folder / self.home_name
        self.hostfile = self.folder / "hosts"
        where = []
        if hosts is not None:
            self.use(hosts)
            config = str(stage.cluster.ssh_config)
            where = ["--hostfile", str(self.hostfile), "--ssh-config", config]
        self.output = self.folder / "output"
        self.events: list[Record] = []
        self._run_folder = self.home / "runs" / self.run_id
        self._follower = Follower(self._run_folder / "events.jsonl", decode_record)
        self._lives = 0
        self._temporary = temporary_entries(stage.cluster)
        command = script or [sys.executable, *PROBES[style], *script_options]
        command = [str(self.folder) if word == "FOLDER" else word for word in command]
        # What gets no processor time for a while is not lost; tests of silence say so themselves.
        patience = ("--failure-timeout", "30")
        self.process = self._start(
            *(*verb, "--run-id", self.run_id, *where, "--audit"),
            *("--checkpoint-every", "1", *patience, *options, "--", *command),
            program=program,
            stdout=stdout,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        agents = agents_on(self.stage.cluster, self.stage.hosts)
        for process in [*processes_of(self.run_id), *(agent for _, agent in agents)]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    # -- starting and ending ---------------------------------------------------------------

    def _start(
        self,
        *arguments: str,
        program: tuple[str, ...] = ("-m", "hvd_elastic.cli.app"),
        stdout: int | None = None,
    ) -> subprocess.Popen[bytes]:
        self._lives += 1
        with self.output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self.environment(),
            )

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HVD_", "HOROVOD_"))}
        kept |= {"HVD_ELASTIC_HOME": str(self.home), "PYTHONPATH": WORKER_PYTHONPATH}
        return kept | LITTLE_WORK | {"DIST_TEST_LIFE": str(self._lives)}

    def command(self, *arguments: str) -> str:
        """Another command of ours, of the same user; what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "hvd_elastic.cli.app", *arguments],
            capture_output=True,
            text=True,
            env=self.environment(),
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{arguments} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def resume(self, *options: str, alive: bool = False) -> None:
        """Another leader goes on with the run; ``alive``: in the processes that are there."""
        assert self.process.poll() is not None
        self._lives -= alive
        self.process = self._start("run", "--resume", self.run_id, *options)

    def lose_run_folder(self) -> None:
        """As if the leader's machine were gone for good."""
        self.poll()
        shutil.rmtree(self._run_folder)
        self._follower = Follower(self._run_folder / "events.jsonl", decode_record)

    def resume_elsewhere(self, *, alive: bool = False) -> None:
        """As another machine does, which has the hostfile and no record of the run."""
        config = str(self.stage.cluster.ssh_config)
        self.resume("--hostfile", str(self.hostfile), "--ssh-config", config, alive=alive)

    def wait(self, timeout_s: float = END_S) -> int:
        """Exit status of the leader."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {timeout_s:g} s; {self.story()}") from None
        self.poll()
        return status

    def finish(
        self,
        timeout_s: float = END_S,
        *,
        but_spools: bool = False,
        all_recorded: bool = True,
    ) -> AuditResult:
        """Let training end, and check all that must be true of a run that ended well.

        Args:
            timeout_s: for the end.
            but_spools: see :meth:`check_nothing_left`.
            all_recorded: see :meth:`check_audit`.
        """
        self.finish_without_audit(timeout_s, but_spools=but_spools)
        return self.check_audit(finished=True, all_recorded=all_recorded)

    def finish_without_audit(self, timeout_s: float = END_S, *, but_spools: bool = False) -> None:
        """As :meth:`finish`, where the records are of other runs too."""
        (self.folder / "enough").touch()
        assert self.wait(timeout_s) == 0, self.story()
        assert self.kinds("run_finished")[-1]["status"] == "succeeded", self.story()
        self.check_nothing_left(but_spools=but_spools)
        self.check_equal_parameters()

    def finish_leaving_files(self) -> None:
        """As :meth:`finish`, where a host that was lost may keep something."""
        (self.folder / "enough").touch()
        assert self.wait() == 0, self.story()
        self.check_audit(finished=True)
        self.check_equal_parameters()

    # -- following -------------------------------------------------------------------------

    def poll(self) -> None:
        new = self._follower.poll()
        for event in new:
            check_event(event)
        self.events += new

    def mark(self) -> int:
        """Now, as a place in the list of events."""
        self.poll()
        return len(self.events)

    def kinds(self, kind: str, since: int = 0) -> list[Record]:
        """Events of one kind since a mark."""
        self.poll()
        return [event for event in self.events[since:] if event["kind"] == kind]

    def wait_for(
        self,
        condition: Callable[[], Any],
        what: str,
        deadline_s: float = DEADLINE_S,
        *,
        ended_too: bool = False,
    ) -> Any:
        """Wait until ``condition`` is true and return it; fails when the run ends before."""
        end = time.monotonic() + deadline_s
        while True:
            ended = self.process.poll() is not None
            self.poll()
            found = condition()
            if found:
                return found
            assert ended_too or not ended, f"ended before: {what}; {self.story()}"
            assert time.monotonic() < end, f"{what}: not in {deadline_s:g} s; {self.story()}"
            time.sleep(POLL_S)

    def wait_event(self, kind: str, since: int, **fields: Any) -> Any:
        """The first event of a kind, with these fields, since a mark."""

        def find() -> Record | None:
            return next((e for e in self.kinds(kind, since) if fields.items() <= e.items()), None)

        return self.wait_for(find, f"event {kind} {fields or ''}")

    def size(self) -> int | None:
        """Processes that train together; None while that changes."""
        for event in reversed(self.events):
            if event["kind"] in ("rescale_finished", "taken_over"):
                return int(event["size"])
            if event["kind"] in ("rescale_started", "run_started", "waiting"):
                return None
        return None

    def wait_size(self, size: int, since: int = 0, deadline_s: float = DEADLINE_S) -> Record:
        """Wait until ``size`` processes train together, by a rescale since a mark."""

        def reached() -> Record | None:
            done = self.kinds("rescale_finished", since)
            return done[-1] if done and self.size() == size else None

        found: Record = self.wait_for(reached, f"training with {size} processes", deadline_s)
        return found

    def settled_on(self, hosts: Mapping[str, int]) -> bool:
        """Whether a worker trains in each of these slots, and none is coming or going."""
        slots = {(host, slot) for host in hosts for slot in range(hosts[host])}
        self.poll()
        known: set[tuple[str, int]] = set()
        for event in self.events:
            # A worker's end is reported a moment after its process is gone.
            if event["kind"] == "worker_standby":
                known.add((event["host"], event["local_rank"]))
            elif event["kind"] == "worker_left":
                known.discard((event["host"], event["local_rank"]))
        if self.size() != len(slots) or known != slots:
            return False
        # Looking through all processes takes a while, and this is asked often.
        return {(worker.host, worker.slot) for worker in self.workers()} == slots

    @property
    def step(self) -> int:
        """Steps made, as last heard."""
        made = [event["step"] for event in self.events if event["kind"] == "metrics"]
        return int(made[-1]) if made else 0

    def wait_steps(self, steps: int, deadline_s: float = DEADLINE_S) -> None:
        """Wait until training has gone on for ``steps`` more steps."""
        self.poll()
        wanted = self.step + steps
        self.wait_for(lambda: self.step >= wanted, f"step {wanted}", deadline_s)

    def story(self) -> str:
        """What happened, for a failed test."""
        self.poll()
        shown = [e for e in self.events if e["kind"] not in ("metrics", "checkpoint")][-40:]
        begin = self.events[0]["t"] if self.events else 0.0
        lines = []
        for event in shown:
            rest = {k: v for k, v in event.items() if k not in ("t", "mono", "kind")}
            lines.append(f"{event['t'] - begin:7.2f} {event['kind']} {rest}")
        text = self.output.read_text(errors="replace")[-3000:]
        return f"{self.run_id} at step {self.step}:\n" + "\n".join(lines) + f"\noutput:\n{text}"

    # -- disturbing ------------------------------------------------------------------------

    def use(self, hosts: Mapping[str, int]) -> None:
        """Write the hostfile, as an editor does: a new file in the place of the old."""
        new = self.hostfile.with_suffix(".new")
        new.write_text("".join(f"{host} slots={slots}\n" for host, slots in hosts.items()))
        new.replace(self.hostfile)

    def workers(self, host: str | None = None) -> list[WorkerProcess]:
        """Live workers by host and slot, newest incarnation only where two overlap."""
        found = [each for each in workers_of(self.run_id) if host in (None, each.host)]
        return sorted(found, key=lambda worker: (self.stage.hosts.index(worker.host), worker.slot))

    def worker(self, host: str, slot: int = 0) -> WorkerProcess:
        """The worker in a slot, which is there."""
        return next(worker for worker in self.workers(host) if worker.slot == slot)

    def name_of_rank(self, rank: int) -> str:
        """The worker that had this rank when one last said so."""
        return next(str(r["worker"]) for r in reversed(self.digests()) if r["rank"] == rank)

    def worker_of_rank(self, rank: int) -> WorkerProcess:
        """The worker with this rank."""
        name = self.name_of_rank(rank)
        return next(worker for worker in self.workers() if worker.name == name)

    def kill_workers(self, host: str | None = None) -> list[WorkerProcess]:
        """Kill -9 of the workers, those of a host or all, at one moment; return them.

        One after the other is not the same: those that still live go on without the first.
        """
        workers = self.workers(host)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, number)
        return workers

    def kill_agent(self, host: str) -> None:
        """Kill -9 of the agent of a host, if there is one."""
        for _, agent in [*agents_on(self.stage.cluster, [host])]:
            with contextlib.suppress(psutil.Error):
                agent.kill()

    def agent_pid(self, host: str) -> int:
        """The process of a host's agent."""
        return next(agent.pid for _, agent in agents_on(self.stage.cluster, [host]))

    # -- checking --------------------------------------------------------------------------

    def digests(self) -> list[dict[str, Any]]:
        """What the ranks said they hold."""
        path = self.folder / "digests.jsonl"
        # The last line may be incomplete while a rank appends to it.
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def check_equal_parameters(self) -> None:
        """All ranks hold the same, bit for bit, at the start of each generation and after."""
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
        for record in self.digests():
            key = tuple(record[name] for name in ("life", "generation", "kind", "step"))
            groups[key].append(record)
        for key, records in groups.items():
            held = {record["digest"] for record in records}
            assert len(held) == 1, (
                f"ranks differ at (life, generation, kind, step) {key}: {records}"
            )
        # A generation's first step needs the gradients of all its ranks, so all were there.
        life = 0
        for event in self.events:
            life += event["kind"] in ("run_started", "leader_cut_off")
            life -= event["kind"] == "taken_over"
            if event["kind"] == "rescale_finished":
                ranks = {
                    record["rank"]
                    for (of, generation, kind, _), records in groups.items()
                    if (of, generation, kind) == (str(life), event["generation"], "synced")
                    for record in records
                }
                assert ranks == set(range(event["size"])), f"{event}: {ranks} were compared"

    def audit(self, *, finished: bool = False) -> AuditResult:
        """What the records of the leader say now."""
        return check_audit(read_records(self._run_folder / "audit.jsonl"), finished=finished)

    def check_audit(self, *, finished: bool = False, all_recorded: bool = True) -> AuditResult:
        """Every example exactly once in each epoch.

        Args:
            finished: whether the last epoch is complete.
            all_recorded: whether no record may have died with who had it.
        """
        result = self.audit(finished=finished)
        right = result.ok if all_recorded else result.recorded and not result.faulty
        assert right, "\n".join([*result.problems(), self.story()])
        return result

    def check_nothing_left(
        self, hosts: list[str] | None = None, *, but_spools: bool = False
    ) -> None:
        """No process, socket, lock or temporary file, here or on a host, soon after the end.

        Args:
            hosts: look at these hosts alone, of a run that goes on elsewhere.
            but_spools: what a killed leader did not collect may stay.
        """
        end = time.monotonic() + CLEAN_S
        while left := [x for x in self._left(hosts) if not (but_spools and _is_left_on_purpose(x))]:
            assert time.monotonic() < end, f"left behind: {left}; {self.story()}"
            time.sleep(POLL_S)

    def _left(self, hosts: list[str] | None) -> Iterator[Any]:
        cluster = self.stage.cluster
        for host in hosts or self.stage.hosts:
            sockets = hosts is None or not cluster.loopback
            yield from left_on_host(
                cluster, host, self.run_id, self.stage.services, sockets=sockets
            )
            if (spool := self.home / "spool" / self.run_id / host).exists():
                yield spool
        if hosts is None:
            yield from processes_of(self.run_id)  # agents are on the hosts
            if (self.home / "spool").exists():
                yield self.home / "spool"
            if RunFolder(self._run_folder).leader_alive():
                yield "the lock of the leader"
            yield from temporary_entries(cluster) - self._temporary


def _is_left_on_purpose(left: Any) -> bool:
    """Whether it is a spool with what no leader has, or the folder of such."""
    names = ("*.shard", "*.save", "untold.jsonl")
    return isinstance(left, Path) and any(found for name in names for found in left.rglob(name))
