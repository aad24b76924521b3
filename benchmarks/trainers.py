"""Measures what a fault costs a Trainer: the pause, steps done again, examples lost or read twice.

Run it: ``python benchmarks/trainers.py --trainer lightning``. A job trains on two hosts and
has one fault in the middle of an epoch; another one has none, with which it is compared. Beside
ours, ``torchrun`` and Ray Train start the workers again, and these go on from the last
checkpoint, of which there is one every seven steps on a disk that all hosts share.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.elasticity.rows import Act, kill, use
from benchmarks.elasticity.stage import Stage
from benchmarks.engines import ENGINES
from benchmarks.peers.fit_options import BATCH, EXAMPLES, SAVE_EVERY
from benchmarks.testbed.command import Say, at_least_one, check_names, names, run_benchmark
from benchmarks.testbed.environments import PeerMissingError
from benchmarks.testbed.figures import Result, conditions, spread
from benchmarks.testbed.hosts import Testbed
from benchmarks.testbed.launchers import OURS, ROOT, TORCHRUN, FailedPlayError, Job, Launcher, Order
from benchmarks.testbed.marks import Process, measure_change
from hvd_elastic.errors import UsageError

STEP_TIME_S = 0.1
_RANKS, _HOSTS = 2, 3
_STEPS = EXAMPLES // BATCH
"""Steps of an epoch."""
_FAULT_STEP = _STEPS + _STEPS // 2 + 3
"""Step after which the fault comes: within the second epoch, not at a checkpoint."""
_SETTLE_STEPS, _LIMIT_S = 5, 300.0
TRAINERS = {"lightning": "lightning", "transformers": "transformers"}
LAUNCHERS: dict[str, Launcher] = {
    "ours": OURS,
    "torchrun": TORCHRUN,
    "ray-train": ENGINES["ray"].theirs,
}
_JOINS = "a host joins"
_CANNOT = {
    ("ray-train", _JOINS): "it looks for more nodes once a minute, and the training is shorter"
}
"""Why a launcher is not measured with a fault."""


@dataclass(frozen=True)
class Fault:
    """What happens to a job.

    Attributes:
        act: causes it; returns when [s, monotonic].
        size: number of ranks that train on.
        victim: number of the host whose worker does not survive; None: there is none.
        epochs: epochs of the training, which goes on while a worker starts.
    """

    act: Act
    size: int
    victim: int | None = None
    epochs: int = 6


def _crash(job: Job) -> float:
    asked = time.monotonic()
    job.bed.cluster.crash(job.bed.hosts[1])
    return asked


FAULTS = {
    "a worker is killed": Fault(kill(1), 1, 1),
    "a host crashes": Fault(_crash, 1, 1),
    _JOINS: Fault(use(1, 1, 1), 3, epochs=20),
}


@dataclass(frozen=True)
class Used:
    """What the steps that count have used.

    Attributes:
        again: steps that were taken, undone, and taken again.
        lost: examples of all epochs that no step used.
        twice: uses of examples beyond the first of each in an epoch.
    """

    again: int
    lost: int
    twice: int


def examples_used(processes: Sequence[Process], epochs: int, examples: int) -> Used:
    """Return what was used, from the notes of all processes.

    A step is undone if a process that was started after it begins at it or before it.

    Args:
        processes: their marks; a note is [step from 1, epoch from 0, examples of the rank].
        epochs: epochs that were trained.
        examples: number of examples.

    >>> from benchmarks.testbed.marks import Step
    >>> def process(born, *steps):
    ...     made = Process("a", 1, born)
    ...     for mono, *note in steps:
    ...         made.steps.append(Step(mono, 1))
    ...         made.notes.append((len(made.steps), json.dumps(note)))
    ...     return made
    >>> first = process(0.0, (1.0, 1, 0, [0]), (2.0, 2, 0, [1]))
    >>> examples_used([first, process(3.0, (4.0, 2, 0, [2]), (5.0, 3, 0, [2]))], 1, 4)
    Used(again=1, lost=2, twice=1)
    """
    notes = [
        (process.steps[count - 1].mono, *json.loads(text))
        for process in processes
        for count, text in process.notes
    ]
    begins = [
        (process.born, json.loads(process.notes[0][1])[0]) for process in processes if process.notes
    ]
    undone, used = set(), [Counter[int]() for _ in range(epochs)]
    for mono, step, epoch, indices in notes:
        if any(born > mono and first <= step for born, first in begins):
            undone.add(step)
        else:
            used[epoch].update(indices)
    lost = sum(examples - len(each) for each in used)
    return Used(len(undone), lost, sum(each.total() - len(each) for each in used))


class Player:
    """Trains jobs of a Trainer.

    Args:
        bed: virtual hosts.
        trainer: key of :data:`TRAINERS`.
    """

    def __init__(self, bed: Testbed, trainer: str) -> None:
        self._bed, self._trainer = bed, trainer
        self._jobs = 0
        self._undisturbed: dict[tuple[str, int], Mapping[str, Any]] = {}

    def undisturbed(self, key: str, epochs: int) -> Mapping[str, Any]:
        """Return what a job without a fault learns."""
        if (key, epochs) not in self._undisturbed:
            self._undisturbed[key, epochs] = self.play(key, None, epochs)[1]
        return self._undisturbed[key, epochs]

    def play(
        self, key: str, fault: Fault | None, epochs: int
    ) -> tuple[dict[str, float], Mapping[str, Any]]:
        """Train a job; return its figures, and what it has learnt.

        Raises:
            FailedPlayError: the job ended early, or took too long.
        """
        self._jobs += 1
        folder = self._bed.scratch / f"fit{self._jobs}"
        folder.mkdir()
        script = ROOT / "benchmarks" / "peers" / f"fit_{self._trainer}.py"
        training = [str(script), "--launcher", key, "--ranks", str(_RANKS)]
        training += ["--folder", str(folder), "--epochs", str(epochs)]
        training += ["--step-time", str(STEP_TIME_S)]
        slots = dict.fromkeys(self._bed.hosts[:_RANKS], 1)
        most = max(_RANKS, fault.size if fault else 0)
        order = Order(slots=slots, training=training, max_np=most)
        with LAUNCHERS[key].job(self._bed, order) as job:
            figures: dict[str, float] = {}
            if fault is not None:
                job.wait(lambda: _has_taken(job, _FAULT_STEP), _LIMIT_S, "did not begin")
                asked = fault.act(job)
                victims = [] if fault.victim is None else [(self._bed.hosts[fault.victim], 0)]
                change = job.wait(
                    lambda: measure_change(
                        job.marks.processes, asked, fault.size, _SETTLE_STEPS, victims
                    ),
                    _LIMIT_S,
                )
                figures["pause_s"] = change.pause_s
            job.wait((folder / "end.json").exists, _LIMIT_S, "did not end")
            job.marks.poll()
            used = examples_used(job.marks.processes, epochs, EXAMPLES)
            figures |= {"again": used.again, "lost": used.lost, "twice": used.twice}
            return figures, json.loads((folder / "end.json").read_text(encoding="utf-8"))


def _has_taken(job: Job, steps: int) -> bool:
    return sum(len(each.steps) >= steps for each in job.marks.processes) >= _RANKS


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float | None]:
    """Return how far weights and metrics are from those of a job without a fault.

    >>> end = {"weights": [1.0, 2.0], "loss": {"1": 0.5}, "validation": 0.3}
    >>> differences({**end, "weights": [1.0, 2.5]}, end)
    {'weights': 0.5, 'epoch_loss': 0.0, 'validation': 0.0}
    """
    epoch = str(_FAULT_STEP // _STEPS)
    pairs = zip(found["weights"], expected["weights"], strict=True)
    losses = found["loss"].get(epoch), expected["loss"][epoch]
    return {
        "weights": max(abs(one - other) for one, other in pairs),
        "epoch_loss": None if losses[0] is None else abs(losses[0] - losses[1]),
        "validation": abs(found["validation"] - expected["validation"]),
    }


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure all faults with all launchers."""
    check_names("--trainer", [options.trainer], TRAINERS)
    check_names("--launchers", options.launchers, LAUNCHERS)
    check_names("--faults", options.faults, FAULTS)
    if importlib.util.find_spec(TRAINERS[options.trainer]) is None:
        raise UsageError(f"{TRAINERS[options.trainer]} is missing: make test-trainers")
    load_before = os.getloadavg()
    rows: list[dict[str, Any]] = []
    with Stage(_LIMIT_S, hosts=_HOSTS) as stage:
        player = Player(stage.bed(), options.trainer)
        for key in options.launchers:
            rows += _rows_of(player, key, options, say)
        hosts = stage.description
    note = (
        f"{_RANKS} ranks, epochs of {_STEPS} steps, padded to {1e3 * STEP_TIME_S:.0f} ms; the "
        f"fault comes after step {_FAULT_STEP}, checkpoints every {SAVE_EVERY} steps on a disk "
        "that all hosts share. Differences: from a job of the same launcher without a fault; "
        "epoch_loss: mean loss of the fault's epoch."
    )
    packages = dict.fromkeys((TRAINERS[options.trainer], "ray"))
    versions = {each: importlib.metadata.version(each) for each in packages}
    return Result("trainers", conditions(hosts, note, load_before, versions), {"faults": rows})


def _rows_of(
    player: Player, key: str, options: argparse.Namespace, say: Say
) -> list[dict[str, Any]]:
    """Return the rows of a launcher."""

    def tried(do: Callable[[], dict[str, Any]], fault: str) -> dict[str, Any]:
        try:
            found = do()
        except (FailedPlayError, PeerMissingError) as error:
            found = {"failed": getattr(error, "short", str(error))}
            say(f"{key}, {fault}: {error}")
        else:
            say(f"{key}, {fault}: {found}")
        return {"trainer": options.trainer, "launcher": key, "fault": fault, **found}

    def disturbed(fault: Fault) -> dict[str, Any]:
        LAUNCHERS[key].prepare()
        expected = player.undisturbed(key, fault.epochs)
        plays = [player.play(key, fault, fault.epochs) for _ in range(options.repetitions)]
        figures, end = plays[-1]
        pauses = [each["pause_s"] for each, _ in plays]
        counts = {name: figures[name] for name in ("again", "lost", "twice")}
        pause = {f"pause_{name}_s": value for name, value in spread(pauses).items()}
        of = fault.epochs * EXAMPLES
        return {**pause, **counts, "of": of, **differences(end, expected), "samples_s": pauses}

    rows = []
    for name in options.faults:
        if (key, name) in _CANNOT:
            row = {"trainer": options.trainer, "launcher": key, "fault": name}
            rows.append({**row, "failed": f"not measured: {_CANNOT[key, name]}"})
        else:
            rows.append(tried(partial(disturbed, FAULTS[name]), name))
    return rows


def main() -> int:
    """Run the benchmark with its command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="trainers.py", description=__doc__)
    told = f"whose Trainer trains: {', '.join(TRAINERS)}"
    parser.add_argument("--trainer", default="lightning", help=told)
    told = f"launchers ({','.join(LAUNCHERS)})"
    parser.add_argument("--launchers", type=names, default=[*LAUNCHERS], help=told)
    told = f"faults ({','.join(FAULTS)})"
    parser.add_argument("--faults", type=names, default=[*FAULTS], help=told)
    told = "jobs of each fault; the counts are those of the last one"
    parser.add_argument("--repetitions", "-n", type=at_least_one, default=3, help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
