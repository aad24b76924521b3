"""Measures time and memory of commands by the number of hosts, and predicts them for 1,000.

The hosts are many names of a few sshds; see :mod:`benchmarks.testbed.many_names`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.cluster.commands import our_tool, timed_call
from benchmarks.testbed.command import Say
from benchmarks.testbed.figures import Conditions, Result, conditions
from benchmarks.testbed.many_names import SSHDS, ManyNames
from hvd_elastic.errors import UsageError
from hvd_elastic.virtual import VirtualCluster

PREDICTED = 1000
OUTPUT_BYTES = (1_000_000, 1_000_000_000)
MB = 1e6
# Memory is not read from getrusage, whose peak includes that of the parent before exec.
_TELL = """
import atexit, os, re, sys
def tell():
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
    times = os.times()
    print(f"\\nMEASURED {int(peak) * 1024} {times.user + times.system}", file=sys.stderr)
atexit.register(tell)
"""


@dataclass(frozen=True)
class Grown:
    """Figures of a command that does nothing on a number of hosts.

    Attributes:
        hosts: number of hosts.
        seconds: duration of the call.
        cpu_s: processor time of runclust itself.
        peak_bytes: peak memory of runclust.
    """

    hosts: int
    seconds: float
    cpu_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Memory:
    """Peak memory of a command, and the amount of data that it transferred."""

    what: str
    data_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Model:
    """A straight line fitted to measurements: ``constant + per_host * hosts``."""

    constant: float
    per_host: float

    def at(self, hosts: int) -> float:
        """Return the predicted value for a number of hosts.

        >>> Model(0.1, 0.01).at(1000)
        10.1
        """
        return self.constant + self.per_host * hosts


def fit_growth(grown: Sequence[Grown]) -> dict[str, Model]:
    """Fit a line to each figure; return none with fewer than two different numbers of hosts.

    >>> some = [Grown(n, 1 + 0.5 * n, 0.1, 7) for n in (10, 20, 30)]
    >>> round(fit_growth(some)["seconds"].at(1000), 3)
    501.0
    """
    hosts = [each.hosts for each in grown]
    if len(set(hosts)) < 2:
        return {}
    models = {}
    for name in ("seconds", "cpu_s", "peak_bytes"):
        slope, constant = np.polyfit(hosts, [getattr(each, name) for each in grown], 1)
        models[name] = Model(float(constant), float(slope))
    return models


class _Bed:
    """Names for many hosts, and our tools that use them."""

    def __init__(self, cluster: VirtualCluster, folder: Path, names: int) -> None:
        self._names = ManyNames(cluster, folder, names)
        self._environment = {**os.environ, "HVD_ELASTIC_HOME": str(folder)}

    def hostfile(self, count: int) -> str:
        return str(self._names.hostfile(count))

    def measure(self, tool: str, *arguments: str) -> tuple[float, float, int]:
        """Run one of our tools; return duration [s], processor time [s] and peak memory [bytes]."""
        python, flag, program, *words = our_tool(tool, "-F", str(self._names.config), *arguments)
        command = [python, flag, _TELL + program, *words]
        seconds, errors = timed_call(command, self._environment)
        peak, cpu = errors.rpartition("MEASURED ")[2].split()
        return seconds, float(cpu), int(peak)


def measure_many(counts: Sequence[int], copied_bytes: int, say: Say) -> Result:
    """Measure calls on different numbers of hosts, and the leader's memory.

    Args:
        counts: numbers of hosts.
        copied_bytes: size of the larger of the two files that are copied.
        say: called with every figure.

    Raises:
        UsageError: a number is too small.
    """
    if not counts or min(counts) < 1:
        raise UsageError(f"numbers of hosts are 1 or more, not {', '.join(map(str, counts))}")
    load_before = os.getloadavg()
    grown, memory = [], []
    with (
        tempfile.TemporaryDirectory(prefix="hvd_elastic-many-") as folder,
        VirtualCluster.up(SSHDS, 1, loopback=True) as cluster,
    ):
        bed = _Bed(cluster, Path(folder), max(counts))
        for count in sorted(counts):
            grown.append(_measure_calls(bed, count))
            say(_grown_line(grown[-1]))
        one = bed.hostfile(1)
        for size in OUTPUT_BYTES:
            write = f"yes 0123456789abcdef0123456789abcdef | head -c {size}"
            _, _, peak = bed.measure("runclust", one, write)
            memory.append(Memory("runclust, output of one host", size, peak))
            say(_memory_line(memory[-1]))
        for size in (copied_bytes // 100, copied_bytes):
            source, there = Path(folder, "source"), Path(folder, "copy")
            with source.open("wb") as file:
                for _ in range(0, size, 1 << 20):
                    file.write(os.urandom(min(size, 1 << 20)))
            _, _, peak = bed.measure("copyclust", one, str(source), str(there))
            memory.append(Memory("copyclust, to one host", source.stat().st_size, peak))
            say(_memory_line(memory[-1]))
            there.unlink()
    note = (
        f"Every name is logged in to on its own, {SSHDS} sshds of this machine take the logins: "
        "the hosts' work shares its cores, which real hosts do not."
    )
    return many_result(conditions("virtual hosts (loopback)", note, load_before), grown, memory)


def many_result(taken: Conditions, grown: Sequence[Grown], memory: Sequence[Memory]) -> Result:
    """Return the result with its measurements and the predictions for more hosts."""
    models = fit_growth(grown)
    body = {
        "grown": grown,
        "memory": memory,
        "models": models,
        f"at_{PREDICTED}_hosts": {name: model.at(PREDICTED) for name, model in models.items()},
    }
    lines = [*map(_grown_line, grown), *map(_memory_line, memory), *_forecast(models)]
    return Result("cluster_many", taken, body, ["\n".join(lines)])


def _measure_calls(bed: _Bed, count: int) -> Grown:
    seconds, cpu_s, peak = bed.measure("runclust", bed.hostfile(count), "true")
    return Grown(count, round(seconds, 3), round(cpu_s, 3), peak)


def _grown_line(grown: Grown) -> str:
    return (
        f"{grown.hosts:5} hosts  {grown.seconds:7.2f} s, of it runclust's processor time "
        f"{grown.cpu_s:6.2f} s, memory {grown.peak_bytes / MB:4.0f} MB"
    )


def _memory_line(memory: Memory) -> str:
    peak = f"memory {memory.peak_bytes / MB:.0f} MB"
    return f"{memory.what:30} {memory.data_bytes / MB:6.0f} MB  {peak}"


def _forecast(models: dict[str, Model]) -> list[str]:
    if not models:
        return []
    predicted = {name: model.at(PREDICTED) for name, model in models.items()}
    per_host_ms = models["cpu_s"].per_host * 1000
    return [
        "",
        f"It rests on {per_host_ms:.1f} ms of one core here for each host connected to.",
        f"Straight lines say of {PREDICTED} hosts:",
        f"  at least {predicted['cpu_s']:.1f} s, however quick the hosts are",
        f"  where they share these cores: {predicted['seconds']:.1f} s",
        f"  memory: {predicted['peak_bytes'] / MB:.0f} MB",
    ]
