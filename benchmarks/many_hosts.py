"""Measures what a leader costs by the number of hosts: at rest, and in pauses; see README.md here.

Leader and agents are the real ones, connected by ssh on this machine. The workers import no torch
and form no ring (``many_hosts_worker.py``), so that hundreds fit on one machine.

A pause here takes as long as the cores of this machine need for all agents and workers. On hosts of
their own these work at the same time, and the leader adds at most the processor time that it uses
in the pause. This is its part of the pause; what it would have used at rest in the same time is
subtracted, since a pause on hosts of their own is short.

Run it: ``python benchmarks/many_hosts.py --out benchmarks/results/many_hosts.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.testbed.command import Say, numbers, run_benchmark
from benchmarks.testbed.figures import Result, conditions, plain
from benchmarks.testbed.launchers import OUR_PROGRAM, ROOT, start_logged
from benchmarks.testbed.many_names import SSHDS, ManyNames
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.records.json_lines import Record, read_records
from hvd_elastic.virtual import VirtualCluster

if TYPE_CHECKING:
    from typing_extensions import Self

WORKER = ROOT / "benchmarks/many_hosts_worker.py"
REST_S = 20.0
"""Time at rest over which the leader's processor time is measured [s]."""
SETTLE_S = 3.0
SAMPLE_EVERY_S = 0.005
LIMIT_S = 240.0
MB = 1e6

Found = TypeVar("Found")


@dataclass(frozen=True)
class Row:
    """Figures of a leader with a number of hosts.

    Attributes:
        hosts: number of hosts, one worker on each.
        start_s: time from the command until all workers have met, on this machine [s].
        start_cpu_s: processor time of the leader in it [s].
        rest_percent: share of a core that the leader uses at rest [%].
        memory_mb, threads: peak memory of the leader [MB], and its threads.
        join_part_s, kill_part_s: processor time of the leader in the pause of a join, and from a
            ``kill -9`` of a worker until the others have met again, beyond that at rest [s].
        join_cpu_s, kill_cpu_s: all of its processor time in these pauses [s].
        join_s, kill_s: length of these pauses on this machine [s].
        status_s: duration of ``hvd-elastic status`` [s].
    """

    hosts: int
    start_s: float
    start_cpu_s: float
    rest_percent: float
    memory_mb: float
    threads: int
    join_part_s: float
    kill_part_s: float
    join_cpu_s: float
    kill_cpu_s: float
    join_s: float
    kill_s: float
    status_s: float


class ProcessorTime:
    """Samples the processor time of a process while the block runs."""

    def __init__(self, pid: int) -> None:
        self._clock = (~pid << 3) | 2  # clock_getcpuclockid(3)
        self._samples: list[tuple[float, float]] = []
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def now(self) -> float:
        """Return the processor time of all its threads so far [s]."""
        return time.clock_gettime(self._clock)

    def between(self, begin: float, end: float) -> float:
        """Return the processor time between two times [s, monotonic]."""
        times = [at for at, _ in self._samples]
        first, last = (bisect_left(times, at) for at in (begin, end))
        used = [cpu for _, cpu in self._samples]
        return used[min(last, len(used) - 1)] - used[max(first - 1, 0)]

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_EVERY_S):
            self._samples.append((time.monotonic(), self.now()))


class Run:
    """A run on many hosts, led by a process of its own.

    Args:
        folder: folder for its files.
        names: names of the hosts.
        hosts: number of hosts at the start, which is also the least number of workers.
    """

    def __init__(self, folder: Path, names: ManyNames, hosts: int) -> None:
        self._names = names
        self._hostfile = folder / "hostfile"
        self._home = folder / "home"
        self._joined = folder / "joined"
        self._output = folder / "output"
        self.use(hosts)
        run = ("run", "--run-id", "bench", "--min-np", str(hosts), "--checkpoint-every", "0")
        files = ("--hostfile", str(self._hostfile), "--ssh-config", str(names.config))
        worker = (sys.executable, str(WORKER), str(self._joined))
        self._environment = {**os.environ, "HVD_ELASTIC_HOME": str(self._home)}
        command = [*OUR_PROGRAM, *run, *files, "--", *worker]
        self.leader = start_logged(command, self._output, self._environment)

    def use(self, hosts: int) -> None:
        """Let the hostfile have this number of hosts."""
        self._names.hostfile(hosts).replace(self._hostfile)

    def events(self, kind: str) -> list[Record]:
        """Return the events of a kind so far."""
        events = read_records(self._home / "runs/bench/events.jsonl")
        return [event for event in events if event["kind"] == kind]

    def met(self, generation: int, size: int) -> dict[int, tuple[int, float]] | None:
        """Return process id and time of meeting [s, monotonic] by rank; None: not all have met."""
        lines = self._joined.read_text().splitlines() if self._joined.exists() else []
        entries = [line.split() for line in lines]
        found = {int(r): (int(pid), float(at)) for g, r, pid, at in entries if int(g) == generation}
        return found if len(found) == size else None

    def wait(self, look: Callable[[], Found | None], what: str) -> Found:
        """Call ``look`` until it returns something true; return that.

        Raises:
            RunError: the leader has ended, or the time is over.
        """
        deadline = time.monotonic() + LIMIT_S
        while not (found := look()):
            if self.leader.poll() is not None or time.monotonic() > deadline:
                tail = self._output.read_text()[-1500:]
                raise RunError(f"{what} did not happen within {LIMIT_S:.0f} s: {tail}")
            time.sleep(0.1)
        return found

    def wait_for_world(self, size: int, after: int) -> tuple[Record, dict[int, tuple[int, float]]]:
        """Wait until a later generation of this size has met; return its announcement and ranks."""

        def formed() -> tuple[Record, dict[int, tuple[int, float]]] | None:
            for announced in self.events("rescale_started"):
                number = announced["generation"]
                if number > after and announced["to_size"] == size:
                    ranks = self.met(number, size)
                    if ranks is not None:
                        return announced, ranks
            return None

        return self.wait(formed, f"a world of {size}")

    def status(self) -> float:
        """Return the duration of ``hvd-elastic status`` [s]."""
        begun = time.monotonic()
        command = [*OUR_PROGRAM, "status", "bench"]
        subprocess.run(command, env=self._environment, check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - begun

    def end(self) -> None:
        """Stop the run and wait for the end of its leader."""
        self.leader.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.leader.wait(60)
        self.leader.kill()
        self.leader.wait()


@contextlib.contextmanager
def run_on(hosts: int) -> Iterator[Run]:
    """Start a run on all but one of the hosts for the length of the block."""
    with (
        tempfile.TemporaryDirectory(prefix="hvd_elastic-many-") as folder,
        VirtualCluster.up(min(SSHDS, hosts), 1, loopback=True) as cluster,
    ):
        run = Run(Path(folder), ManyNames(cluster, Path(folder), hosts), hosts - 1)
        try:
            yield run
        finally:
            run.end()


def measure_row(hosts: int) -> Row:
    """Start a run, let it rest, let a host join, and kill a worker."""
    begun = time.monotonic()
    with run_on(hosts) as run, ProcessorTime(run.leader.pid) as used:
        process = psutil.Process(run.leader.pid)
        started, ranks = run.wait_for_world(hosts - 1, 0)
        start_s, start_cpu_s = max(at for _, at in ranks.values()) - begun, used.now()
        time.sleep(SETTLE_S)
        before, since = used.now(), time.monotonic()
        time.sleep(REST_S)
        rest = (used.now() - before) / (time.monotonic() - since)
        run.use(hosts)
        joined, ranks = run.wait_for_world(hosts, started["generation"])
        join_end = max(at for _, at in ranks.values())
        time.sleep(SETTLE_S)
        killed = time.monotonic()
        os.kill(ranks[hosts - 1][0], signal.SIGKILL)
        _, ranks = run.wait_for_world(hosts - 1, joined["generation"])
        kill_end = max(at for _, at in ranks.values())
        run.wait_for_world(hosts, joined["generation"])  # with the replacement
        join_s, kill_s = join_end - joined["mono"], kill_end - killed
        join_cpu_s, kill_cpu_s = (
            used.between(joined["mono"], join_end),
            used.between(killed, kill_end),
        )
        return Row(
            hosts,
            start_s,
            start_cpu_s,
            100 * rest,
            _peak_memory(run.leader.pid) / MB,
            process.num_threads(),
            join_cpu_s - rest * join_s,
            kill_cpu_s - rest * kill_s,
            join_cpu_s,
            kill_cpu_s,
            join_s,
            kill_s,
            run.status(),
        )


def _peak_memory(pid: int) -> int:
    """Return the peak of a process's resident memory [bytes]."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure a row for each number of hosts.

    Raises:
        UsageError: a number is too small.
    """
    if min(options.counts) < 3:
        raise UsageError("--counts: a run needs 3 hosts or more, since one joins and one is killed")
    load_before = os.getloadavg()
    rows = []
    for hosts in options.counts:
        rows.append(measure_row(hosts))
        row = rows[-1]
        say(
            f"{hosts} hosts: {row.rest_percent:.1f} % of a core at rest, {row.join_part_s:.3f} s "
            f"of the join ({row.join_cpu_s:.3f} s in {row.join_s:.1f} s), {row.kill_part_s:.3f} s "
            f"after the kill ({row.kill_cpu_s:.3f} s in {row.kill_s:.1f} s)"
        )
    note = "The agents and workers share the cores with the leader, which real hosts do not."
    hosts = f"names of {SSHDS} sshds on the loopback interface"
    return Result("many_hosts", conditions(hosts, note, load_before), {"leader": plain(rows)})


def main() -> int:
    """Run the benchmark with its command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="many_hosts.py", description="What a leader costs by the number of hosts."
    )
    parser.add_argument("--counts", type=numbers, default="16,64,128,256", help="numbers of hosts")
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
