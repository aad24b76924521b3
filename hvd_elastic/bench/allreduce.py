"""Measures how fast the ranks of a run sum tensors of different sizes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvd_elastic.bench.background_run import PATIENCE_S, BackgroundRun, Say
from hvd_elastic.bench.step_timer import PREFIX
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import bytes_words, count
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.run_events import Metrics, ReadEvent, RescaleStarted

LEAST_BYTES, MOST_BYTES = 1 << 10, 1 << 30
_FACTOR = 4
_SIZE_S = 120.0
"""How long the sums of one size may take [s]."""


@dataclass(frozen=True)
class Sum:
    """Figures of the sums of one size, as nccl-tests define them.

    Attributes:
        size: size of the tensor [bytes].
        seconds: mean time of a sum [s].
        algorithm_bandwidth: size / time [bytes/s].
        bus_bandwidth: algorithm bandwidth times 2 (n - 1) / n, which each link carries in each
            direction in a ring of n ranks [bytes/s].
    """

    size: int
    seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float


@dataclass(frozen=True)
class Sums:
    """Result of the benchmark.

    Attributes:
        slots, hosts: number of ranks, and of the hosts that they are on.
        sums: figures of each size, the smallest first.
    """

    slots: int
    hosts: int
    sums: tuple[Sum, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the result for a file."""
        return {"benchmark": "allreduce", **asdict(self)}


def tensor_sizes(most: int) -> list[int]:
    """Return the sizes to measure [bytes], up to ``most``.

    >>> tensor_sizes(5000), tensor_sizes(1 << 30)[-1] == 1 << 30
    ([1024, 4096, 5000], True)
    """
    sizes = []
    size = LEAST_BYTES
    while size < most:
        sizes.append(size)
        size *= _FACTOR
    return [*sizes, most]


def measure_allreduce(
    hostfile: Path,
    hosts: Sequence[Host],
    slots: int | None,
    most: int,
    options: Sequence[str],
    say: Say,
) -> Sums:
    """Sum tensors of 1 KiB up to ``most`` over the ranks.

    Args:
        slots: number of ranks; None: all slots.
        most: largest size [bytes].
        options: further options of ``hvd-elastic run``.
        say: called with a line of progress.

    Raises:
        UsageError: there are fewer than two slots, or fewer than ``slots``.
        RunError: a worker failed; names the cause.
    """
    there = sum(host.slots for host in hosts)
    ranks = there if slots is None else slots
    if not 2 <= ranks <= there:
        raise UsageError(
            f"--np {ranks}: a sum needs two slots or more, and {hostfile} has "
            f"{count(there, 'slot')} in all"
        )
    used = 1
    sizes = tensor_sizes(most)
    command = [sys.executable, "-m", "hvd_elastic.bench.allreduce_torch", *map(str, sizes)]
    say(f"starting {count(ranks, 'process')}")
    found = []
    with BackgroundRun(hostfile, command, ranks, options, "the benchmark") as run:
        for size in sizes:

            def look(event: ReadEvent, name: str = f"{PREFIX}{size}_s") -> float | None:
                nonlocal used
                if isinstance(event, RescaleStarted):
                    used = len(event.hosts)
                if isinstance(event, Metrics) and event.size == ranks:
                    return event.values.get(name)
                return None

            seconds = run.wait(look, f"sums of {bytes_words(size)}", PATIENCE_S + _SIZE_S)
            algorithm = size / seconds
            found.append(Sum(size, seconds, algorithm, algorithm * 2 * (ranks - 1) / ranks))
            say(f"{bytes_words(size)}: {bytes_words(found[-1].bus_bandwidth)}/s")
    return Sums(ranks, used, tuple(found))
