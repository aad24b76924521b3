"""Figures of a benchmark: median and range, the machine they were taken on, and the kept file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

__all__ = ["Conditions", "Figure", "conditions", "figure", "ratio", "write_result"]


@dataclass(frozen=True)
class Figure:
    """Repeated measurements of one time.

    Attributes:
        median_s, min_s, max_s: of the samples [s]; None when nothing was measured.
        samples_s: in the order they were taken.
    """

    median_s: float | None
    min_s: float | None
    max_s: float | None
    samples_s: tuple[float, ...]

    def __str__(self) -> str:
        if self.median_s is None:
            return "-"
        digits = 1 if self.median_s >= 100 else 2 if self.median_s >= 1 else 3
        text = f"{self.median_s:.{digits}f} s"
        if len(self.samples_s) > 1:
            text += f" ({self.min_s:.{digits}f} to {self.max_s:.{digits}f})"
        return text


def figure(samples: Sequence[float]) -> Figure:
    """Median and range of samples [s].

    >>> str(figure([2.0, 1.5, 4.0]))
    '2.00 s (1.50 to 4.00)'
    >>> str(figure([]))
    '-'
    """
    rounded = tuple(round(sample, 4) for sample in samples)
    if not rounded:
        return Figure(None, None, None, ())
    return Figure(round(statistics.median(rounded), 4), min(rounded), max(rounded), rounded)


def ratio(other: Figure, ours: Figure) -> float | None:
    """How many times longer the other's median is than ours.

    >>> ratio(figure([6.0]), figure([3.0]))
    2.0
    """
    if not other.median_s or not ours.median_s:
        return None
    return round(other.median_s / ours.median_s, 2)


@dataclass(frozen=True)
class Conditions:
    """On what, and beside what, figures were taken.

    Attributes:
        when: start, UTC.
        cores: cores that these processes may use.
        processor: its model.
        load_before: the machine's load averages (1, 5, 15 minutes) at the start.
        load_after: the 1-minute one at the end; the benchmark itself is in it.
        versions: of Python and of the packages that matter.
        hosts: what the virtual hosts are.
        note: what else one must know to read the figures.
    """

    when: str
    cores: int
    processor: str
    load_before: tuple[float, float, float]
    load_after: float
    versions: dict[str, str]
    hosts: str
    note: str

    def sentence(self) -> str:
        """For below a table."""
        one, five, _ = self.load_before
        return (
            f"{self.cores} cores of one machine ({self.processor}), {self.hosts}; load average "
            f"before: {one:.2f} (1 min), {five:.2f} (5 min), after: {self.load_after:.2f}. "
            f"{self.note}"
        )


def conditions(
    hosts: str,
    note: str,
    load_before: tuple[float, float, float],
    more_versions: Mapping[str, str] | None = None,
) -> Conditions:
    """The conditions of a benchmark that ends now."""
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for package in ("hvd-elastic", "horovod", "torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    versions |= more_versions or {}
    return Conditions(
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cores=len(os.sched_getaffinity(0)),
        processor=processor_model(Path("/proc/cpuinfo")),
        load_before=load_before,
        load_after=os.getloadavg()[0],
        versions=versions,
        hosts=hosts,
        note=note,
    )


def processor_model(cpuinfo: Path) -> str:
    """The processor's name as the kernel tells it; its architecture where it has none."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()


def write_result(path: Path, benchmark: str, taken: Conditions, body: dict[str, Any]) -> None:
    """Write a result as JSON, readable by people as well."""
    content = {"benchmark": benchmark, "conditions": asdict(taken), **body}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
