"""Measures how fast a script's loader reads, without training: ``hvd-elastic bench input``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from hvd_elastic.formatting import count
from hvd_elastic.policy.input import Reading
from hvd_elastic.programs.usable import usable_cores
from hvd_elastic.worker.input_times import InputTimes

SECONDS_VARIABLE = "HVD_ELASTIC_BENCH_INPUT_S"
"""Environment variable with the time to read for [s]; the script does not train if it is set."""
RESULT_VARIABLE = "HVD_ELASTIC_BENCH_INPUT_RESULT"
"""Environment variable with the path of the file for the result."""
_IDLE = 0.5
"""Cores of a host that are not used, from which on another process would be faster."""
_WARM_SHARE = 0.25
"""Part of the time that is not counted: loader processes start, and have read ahead."""


@dataclass(frozen=True)
class InputRate:
    """Speed of a loader.

    Attributes:
        examples, seconds: examples that were read, and the time that it took [s].
        cpu_s: processor time of that [s]; None: not known.
        delay_s: time in which the readers waited for a core [s].
        processes: number of processes that read; 0: the training process; None: not known.
        bound: what limits the rate: ``cores``, ``storage`` (or the network), or ``unknown``.
        batch_size: examples in a step of the script.
        cores: number of cores of this host.
    """

    examples: int
    seconds: float
    cpu_s: float | None
    delay_s: float
    processes: int | None
    bound: str
    batch_size: int
    cores: int

    @property
    def examples_per_s(self) -> float:
        """Examples that this host reads in a second."""
        return self.examples / self.seconds

    @property
    def remedy(self) -> str:
        """Return what would make it faster, in words."""
        match self.bound:
            case "unknown":
                return "more prefetch and num_parallel_calls of map, or a cheaper transform"
            case "storage":
                return (
                    "the readers wait for storage or the network: more num_workers wait for more "
                    "files at a time, data on this host, in shards, or smaller; not more cores"
                )
        in_use = ((self.cpu_s or 0.0) + self.delay_s) / self.seconds
        more = (
            "a further host that reads (--input-hosts)"
            if in_use > self.cores - _IDLE
            else f"more num_workers, up to the {count(self.cores, 'core')} of this host"
        )
        return f"the readers compute: {more}, or a cheaper transform such as a scaled decode"

    @classmethod
    def read(cls, path: Path) -> InputRate | None:
        """Return the result in a file; None if there is none."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None


def _bound(read: Reading) -> str:
    if read.cpu_s is None:
        return "unknown"
    return "cores" if read.computes else "storage"


class InputBench:
    """Counts what is read within a time, and writes the result.

    Args:
        seconds: time to read for, at least one step [s].
        result: path of the file for the result.
        times: measures the reading.
        clock: returns the time [s].
    """

    def __init__(
        self,
        seconds: float,
        result: Path,
        times: InputTimes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._result = seconds, result
        self._times, self._clock = times, clock
        self._began: float | None = None
        self._base: tuple[float, Reading] | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str], times: InputTimes) -> InputBench | None:
        """Return the measurement that a process's environment asks for, or None."""
        if SECONDS_VARIABLE not in environment:
            return None
        seconds, result = environment[SECONDS_VARIABLE], environment[RESULT_VARIABLE]
        return cls(float(seconds), Path(result), times)

    def is_over(self) -> bool:
        """Return whether enough was read; called after each step."""
        now, reading = self._clock(), self._times.reading()
        if self._began is None:
            self._began = now
        if reading is None:
            return False
        if self._base is None:
            if now - self._began >= _WARM_SHARE * self._seconds:
                self._base = now, reading
            return False
        return now - self._began >= self._seconds and reading.examples > self._base[1].examples

    def write_result(self, batch_size: int) -> NoReturn:
        """Write the result and end the script."""
        reading = self._times.reading()
        assert reading is not None
        assert self._base is not None
        since, base = self._base
        read = reading.since(base)
        rate = InputRate(
            examples=read.examples,
            seconds=self._clock() - since,
            cpu_s=read.cpu_s,
            delay_s=read.delay_s,
            processes=read.processes,
            bound=_bound(read),
            batch_size=batch_size,
            cores=usable_cores(),
        )
        self._result.write_text(json.dumps(asdict(rate)), encoding="utf-8")
        raise SystemExit(0)
