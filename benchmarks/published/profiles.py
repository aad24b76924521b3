"""Read the published workloads and measured profiles of the Pollux artifact.

A profile has the step times of an application by placement and batch size, and its gradient
statistics by epoch and batch size, both measured on hosts of 4 NVIDIA T4.

Source: Pollux, OSDI 2021, its artifact in petuum/adaptdl (Apache-2.0).
"""

from __future__ import annotations

import csv
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvd_elastic.errors import UsageError
from hvd_elastic.model.goodput import BatchLimits

_FIXED = {"ncf": 32768}
"""Applications that every policy trains on one slot with this batch size, as in the artifact."""
_MOST_SLOTS = 64
"""Profiles end at this number of slots."""


@dataclass(frozen=True)
class _Times:
    sizes: np.ndarray
    step_s: np.ndarray
    sync_s: np.ndarray

    def at(self, size: float) -> tuple[float, float]:
        """Return the times of a step and of its all-reduce [s] at an atomic batch size."""
        step = float(np.interp(size, self.sizes, self.step_s))
        return step, float(np.interp(size, self.sizes, self.sync_s))


class Application:
    """A profiled application.

    Args:
        folder: folder of the profile.
        constants: entry of the application in ``constants.json``.

    Attributes:
        name: its name.
        limits: limits of its batch.
        epochs: number of epochs of a job.
        total: steps of the initial batch size that a job needs.
        fixed_batch: batch size that is never changed; None: the job adapts.
        most_slots: largest number of slots of a job.
    """

    def __init__(self, folder: Path, constants: dict[str, float]) -> None:
        self.name = folder.name
        smallest, largest = int(constants["min_local_bsz"]), int(constants["max_batch_size"])
        self.limits = BatchLimits(
            int(constants["init_batch_size"]), largest, smallest, int(constants["max_local_bsz"])
        )
        self.epochs = int(constants["max_epochs"])
        self.fixed_batch = _FIXED.get(self.name)
        self.most_slots = 1 if self.fixed_batch else min(_MOST_SLOTS, largest // smallest)
        self._placements = _read_times(folder / "placements.csv", ["placement"])
        self._scales = _read_scales(folder, self._placements)
        self._cache: dict[tuple[tuple[int, ...], int], tuple[float, float]] = {}
        self._batches: list[int] = []
        gradients, steps = [], []
        for path in sorted(folder.glob("validation-*.csv"), key=_batch_of):
            rows = _rows(path)[: self.epochs]
            self._batches.append(_batch_of(path))
            gradients.append([[float(row[key]) for row in rows] for key in _GRADIENT])
            steps.append([0.0, *(float(row["iteration"]) for row in rows)])
        self._steps = np.asarray(steps)  # batch sizes x ends of epochs
        self._gradients = np.asarray(gradients)  # batch sizes x (progress, sqr, var) x epochs
        self._ends = np.append(0.0, self._gradients[:, 0].min(axis=0))
        self.total = float(self._ends[-1])

    def end_of_epoch(self, epoch: int) -> float:
        """Return the progress after so many epochs [steps of the initial batch size]."""
        return float(self._ends[epoch])

    def steps_after(self, batch: int, epoch: int) -> float:
        """Return the number of steps of a batch size that are left after so many epochs."""
        left = self._steps[:, -1] - self._steps[:, epoch]
        return float(np.interp(batch, self._batches, left))

    def gradient_statistics(self, batch: int, epoch: int) -> tuple[float, float]:
        """Return the squared norm of the gradient and its variance at the initial batch size."""
        values = self._gradients[:, 1:, epoch]
        square, variance = (float(np.interp(batch, self._batches, each)) for each in values.T)
        return square, variance

    def step_times(self, placement: Sequence[int], atomic: int) -> tuple[float, float]:
        """Return the times of a step and of its all-reduce [s].

        Args:
            placement: slots on each host.
            atomic: atomic batch size [examples].
        """
        key = (tuple(placement), atomic)
        if key not in self._cache:
            self._cache[key] = self._times(key[0], atomic)
        return self._cache[key]

    def _times(self, placement: tuple[int, ...], atomic: int) -> tuple[float, float]:
        turned = min(placement[i:] + placement[:i] for i in range(len(placement)))
        known = self._placements.get(tuple(int(digit) for digit in "".join(map(str, turned))))
        if known is not None:
            return known.at(atomic)
        hosts, slots = min(len(placement), 16), sum(placement)
        numbers = sorted({nodes for nodes, _ in self._scales})
        below = numbers[max(0, bisect_right(numbers, hosts) - 1)]
        above = numbers[min(len(numbers) - 1, bisect_left(numbers, hosts))]
        share = 0.0 if above == below else (hosts - below) / (above - below)
        low = self._at_hosts(below, slots / hosts, atomic)
        high = self._at_hosts(above, slots / hosts, atomic)
        step, sync = ((1 - share) * a + share * b for a, b in zip(low, high, strict=True))
        return step, sync

    def _at_hosts(self, hosts: int, density: float, atomic: int) -> tuple[float, float]:
        scales = self._scales
        points = sorted(slots for nodes, slots in scales if nodes == hosts)
        times = np.asarray([scales[hosts, slots].at(atomic) for slots in points])
        x = density * hosts
        return float(np.interp(x, points, times[:, 0])), float(np.interp(x, points, times[:, 1]))


_GRADIENT = ("progress", "grad_sqr", "grad_var")


@dataclass(frozen=True)
class SubmittedJob:
    """A job of a workload.

    Attributes:
        name: its name.
        submitted_s: when it was submitted [s].
        application: what it trains.
        asked_slots, asked_batch: number of slots and batch size for a policy that changes neither.
    """

    name: str
    submitted_s: float
    application: Application
    asked_slots: int
    asked_batch: int


def read_applications(folder: Path) -> dict[str, Application]:
    """Read all profiles of a folder that has ``constants.json`` and ``profiles/``.

    Raises:
        UsageError: a file is missing or is not a profile; names it.
    """
    path = folder / "constants.json"
    try:
        constants = json.loads(path.read_text(encoding="utf-8"))["applications"]
        return {
            name: Application(folder / "profiles" / name, constants[name]) for name in constants
        }
    except OSError as error:
        raise UsageError(
            f"{folder} is not a folder of profiles: {error.strerror}: {error.filename}; it needs "
            "constants.json and profiles/APPLICATION/*.csv (docs/scheduling.md)"
        ) from error
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(f"the profiles of {folder} cannot be read: {error!r}") from error


def read_workload(path: Path, applications: dict[str, Application]) -> list[SubmittedJob]:
    """Read a workload: CSV with ``name,time,application,num_replicas,batch_size``.

    Raises:
        UsageError: names file, line, problem and valid values.
    """
    jobs = []
    for number, row in enumerate(_rows(path), 2):
        try:
            application = applications[row["application"]]
            slots, batch = int(row["num_replicas"]), int(row["batch_size"])
            at = float(row["time"])
            name = row["name"]
        except KeyError as error:
            known = ", ".join(sorted(applications))
            raise UsageError(
                f"{path}, line {number}: {error} is not known; columns are name, time, "
                f"application, num_replicas and batch_size, applications {known}"
            ) from error
        except (TypeError, ValueError) as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
        jobs.append(SubmittedJob(name, at, application, slots, batch))
    if not jobs:
        raise UsageError(f"{path} has no jobs")
    return jobs


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _batch_of(path: Path) -> int:
    return int(path.stem.removeprefix("validation-"))


def _read_times(path: Path, keys: list[str]) -> dict[tuple[int, ...], _Times]:
    groups: dict[tuple[int, ...], list[tuple[float, float, float]]] = defaultdict(list)
    for row in _rows(path):
        key = tuple(int(row[name]) for name in keys)
        if keys == ["placement"]:
            key = tuple(int(digit) for digit in row["placement"])
        times = tuple(float(row[name]) for name in ("local_bsz", "step_time", "sync_time"))
        groups[key].append(times)  # type: ignore[arg-type]
    return {key: _Times(*np.asarray(sorted(rows)).T) for key, rows in groups.items()}


def _read_scales(
    folder: Path, placements: dict[tuple[int, ...], _Times]
) -> dict[tuple[int, int], _Times]:
    """Return times by number of hosts and slots; of several placements the fullest hosts first."""
    found = {}
    for placement, times in placements.items():
        found[len(placement), sum(placement)] = times
    for key, times in _read_times(
        folder / "scalability.csv", ["num_nodes", "num_replicas"]
    ).items():
        found[key[0], key[1]] = times
    return found
