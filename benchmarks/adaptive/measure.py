"""Starts the jobs, collects their figures, and writes tables and JSON files."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.adaptive.examples import PROBLEMS, SCALES, crossing, examples_rows, median_error
from benchmarks.adaptive.jobs import changes, rules
from benchmarks.adaptive.launch import ADAPTDL, run_adaptdl, run_job
from benchmarks.testbed.command import at_least_one, end_with, names, numbers
from benchmarks.testbed.environments import PeerMissingError
from benchmarks.testbed.figures import Result, conditions, spread
from benchmarks.testbed.hosts import Testbed, make_testbed
from benchmarks.testbed.launchers import ROOT, STATIC, Order
from hvd_elastic.errors import RunError
from hvd_elastic.model.goodput import statistical_efficiency
from hvd_elastic.model.step_time import Observation, fit_step_time

PARTS = "noise,digits,rules,times,changes,distorted,examples"
FIXED = (32, 64, 128, 256, 512)
"""Fixed batch sizes on the distorted digits, to compare the adaptive batch with."""
SPLITS = 20
"""Number of random halves of the configurations that the step-time model is fitted to."""
SPREAD = ("median", "lowest", "highest")
_WHEN = ("before", "after")
"""Keys of the conditions before and after a change in the rows of the job ``changes``."""


def noise_rows(seeds: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return the ratio of estimated and exact noise scale for each kind of training."""
    rows = []
    for count in ranks:
        for found in run_job("noise", count, seeds):
            ratios = found.pop("ratios")
            rows.append({"ranks": count, **found, **spread(ratios), "checkpoints": len(ratios)})
    return rows


def digits_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratio of measured noise scale and that of brute force, on the digits network.

    Args:
        found: rows of the job ``digits``: the fields of its ``Kind``, ``frozen_steps``, and
            ``measured`` (None: infinite) and ``brute_force`` for each seed.

    Returns:
        A row for each kind and number of frozen steps, over its seeds.
    """
    fields = ("optimizer", "trained_steps", "batch_norm", "frozen_steps")
    kinds: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in found:
        kinds.setdefault(tuple(row[field] for field in fields), []).append(row)
    rows = []
    for kind, mine in kinds.items():
        row = {**dict(zip(fields, kind, strict=True)), "seeds": len(mine)}
        row["brute_force"] = statistics.median(each["brute_force"] for each in mine)
        ended = [each for each in mine if each["measured"] is not None]
        row["without_end"] = len(mine) - len(ended)
        ratios = [each["measured"] / each["brute_force"] for each in ended]
        rows.append({**row, **(spread(ratios) if ratios else {"median": None})})
    return rows


def measure_digits(seeds: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Measure the noise scale of the digits network, by the optimizer and by brute force."""
    return [
        {"ranks": count, **row}
        for count in ranks
        for row in digits_rows(run_job("digits", count, seeds))
    ]


def rule_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare the loss at larger batches with that at the initial batch, at the same progress.

    Args:
        found: rows of the job ``rules``: ``seed``, ``scale``, ``losses``, ``least_loss``,
            ``steps``.

    Returns:
        For each scale above 1, over all seeds: the ratio of losses at each checkpoint, the ratio of
        their differences to the least loss, and the number of steps needed.
    """
    initial = {row["seed"]: row for row in found if row["scale"] == 1}
    rows = []
    for scale in sorted({row["scale"] for row in found} - {1}):
        mine = [row for row in found if row["scale"] == scale]
        off, excess = [], []
        for row in mine:
            theirs = np.array(initial[row["seed"]]["losses"])
            own, least = np.array(row["losses"]), row["least_loss"]
            off.append(own / theirs)
            excess.append((own - least) / (theirs - least))
        rows.append(
            {
                "scale": scale,
                "loss_ratio": np.median(off, axis=0).tolist(),
                "worst_loss_ratio": float(max(np.ravel(off), key=lambda value: abs(value - 1))),
                "excess_ratio": np.median(excess, axis=0).tolist(),
                "steps": statistics.median(row["steps"] for row in mine),
                "steps_at_scale_1": statistics.median(row["steps"] for row in initial.values()),
            }
        )
    return rows


def measure_rules(seeds: int) -> list[dict[str, Any]]:
    """Measure AdaScale on a convex problem, with two ranks."""
    known = {"ranks": 2, "rule": "adascale", "progress": list(rules.PROGRESS)}
    return [{**known, **row} for row in rule_rows(run_job("rules", 2, "adascale", seeds))]


def prediction_errors(observations: Sequence[Observation], splits: int = SPLITS) -> list[float]:
    """Fit the step-time model to half of the configurations and predict the other half.

    Args:
        observations: one for each configuration.
        splits: number of random halves, always the same ones.

    Returns:
        ``|predicted / measured - 1|`` of every predicted configuration, over all splits.
    """
    shuffled = random.Random(0)
    errors: list[float] = []
    for _ in range(splits):
        order = shuffled.sample(observations, len(observations))
        half = len(order) // 2
        model = fit_step_time(order[:half])
        for seen in order[half:]:
            times = model.predict(
                seen.hosts, seen.ranks, seen.atomic_batch_size, seen.accumulation_steps
            )
            errors.append(abs(float(times.step_s) / seen.step_s - 1))
    return errors


def times_rows(rates: Sequence[str]) -> list[dict[str, Any]]:
    """Measure and predict step times on virtual hosts, for each link rate."""
    rows = []
    for rate in rates:
        found: list[Observation] = []
        with make_testbed(2, rate=rate) as bed:
            for slots in ({0: 1}, {0: 2}, {0: 1, 1: 1}):
                on = {bed.hosts[host]: count for host, count in slots.items()}
                found += _timed_on(bed, on)
        errors = prediction_errors(found)
        row: dict[str, Any] = {"rate": rate, "configurations": len(found), **spread(errors)}
        rows.append({**row, "observations": [vars(each) for each in found]})
    return rows


def _timed_on(bed: Testbed, slots: Mapping[str, int]) -> list[Observation]:
    out = bed.scratch / "times.json"
    out.unlink(missing_ok=True)
    script = Path(__file__).parent / "jobs/__main__.py"
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    training = [str(script), "times", str(out), str(len(slots))]
    order = Order(slots, training, sum(slots.values()), environment=environment)
    with STATIC.job(bed, order) as job:
        while (status := job.ended()) is None:
            job.sleep()
        if status or not out.exists():
            raise RunError(f"timing steps on {dict(slots)} failed:\n{job.output_tail()}")
    return [Observation(**each) for each in json.loads(out.read_text(encoding="utf-8"))]


def known_goodput(
    batch: int, extra: int, at: Mapping[str, float], rest_s: float, ranks: int = 2
) -> float:
    """Return the goodput of a batch in the job ``changes`` [useful examples/s].

    Args:
        batch: global batch size.
        extra: passes besides the first.
        at: conditions that the job wrote: ``noise_scale``, and times of a pass.
        rest_s: time of a step besides the sleeps of its passes [s].
    """
    step_s = (extra + 1) * at["pass_s"] + at["example_s"] * batch / ranks + rest_s
    useful = batch * statistical_efficiency(at["noise_scale"], changes.INITIAL, batch)
    return float(useful / step_s)


def changes_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return how soon the batch follows new conditions.

    Args:
        found: rows that the job ``changes`` wrote.

    Returns:
        A row for each kind of change, over its seeds. ``steps``: number of steps from the change to
        the first batch that is nearer to the best one and has more goodput under the known
        conditions; None: there was none. ``wrong``: number of earlier changes to a batch with less
        goodput.
    """
    rows = []
    for name in dict.fromkeys(each["change"] for each in found):
        mine = [each for each in found if each["change"] == name]
        trainings = [_first_right_change(each) for each in mine]
        steps = [each["steps"] for each in trainings if each["steps"] is not None]
        row: dict[str, Any] = {"change": name, "ranks": 2, "seeds": len(mine)}
        for field in ("noise_scale", "pass_s", "example_s"):
            row[field] = [statistics.median(each[when][field] for each in mine) for when in _WHEN]
        for field in ("batch", "best_before", "best_now", "gain"):
            row[field] = statistics.median(each[field] for each in trainings)
        row["direction"] = "up" if row["best_now"] > row["batch"] else "down"
        row["never"] = len(mine) - len(steps)
        row["wrong"] = sum(each["wrong"] for each in trainings)
        row |= spread(steps) if steps else {"median": None}
        rows.append({**row, "trainings": trainings})
    return rows


def _first_right_change(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a training did after its change, judged under the known conditions."""
    rest_s, sizes = found["rest_s"], range(changes.INITIAL, changes.LARGEST + 1)
    best = {
        when: max(sizes, key=lambda size: known_goodput(size, 0, found[when], rest_s))
        for when in _WHEN
    }
    now, target = found["after"], best["after"]
    *_, held = (each for each in found["batches"] if each[0] <= found["step"])
    before = known_goodput(held[1], held[2], now, rest_s)
    row = {
        "seed": found["seed"],
        "batch": held[1],
        "best_before": best["before"],
        "best_now": target,
        "gain": known_goodput(target, 0, now, rest_s) / before,
        "steps": None,
        "wrong": 0,
        "rest_s": rest_s,
        "batches": found["batches"],
    }
    at = held
    for step, size, extra in found["batches"][found["batches"].index(held) + 1 :]:
        goodput = known_goodput(size, extra, now, rest_s)
        if goodput > before and abs(size - target) < abs(held[1] - target):
            return {**row, "steps": step - found["step"]}
        row["wrong"] += goodput < known_goodput(at[1], at[2], now, rest_s)
        at = step, size, extra
    return row


def measure_changes(seeds: int) -> list[dict[str, Any]]:
    """Measure how soon the batch follows a change of conditions, with two ranks."""
    return changes_rows(run_job("changes", 2, seeds))


def target_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return how long each way to choose the batch took to the target, against the best fixed one.

    A training that misses the target counts as slower than any that reaches it.

    Args:
        found: rows of the job ``distorted``: ``batch`` (a size, ``"adaptive"``, or a peer's name),
            ``seconds`` (None if the target was missed), and ``whole_s``, ``accuracy`` and
            ``last_batch`` at the end of its schedule, or ``failed`` with the reason if the job
            died.
    """
    rows: list[dict[str, Any]] = []
    for batch in dict.fromkeys(row["batch"] for row in found):
        mine = [row for row in found if row["batch"] == batch]
        ended = [row for row in mine if "failed" not in row]
        seconds = [math.inf if row["seconds"] is None else row["seconds"] for row in ended]
        row: dict[str, Any] = {"batch": batch, "seeds": len(mine)}
        row["missed"], row["failed"] = seconds.count(math.inf), len(mine) - len(ended)
        for field in ("last_batch", "accuracy", "whole_s"):
            row[field] = statistics.median(each[field] for each in ended) if ended else None
        found_s = spread(seconds) if ended else dict[str, float]()
        rows.append({**row, **{name: _known(found_s.get(name)) for name in SPREAD}})
    for field, than in (("median", ""), ("whole_s", "_whole")):
        sure = [row for row in rows if row[field] and not row["failed"]]
        fixed = [row[field] for row in sure if isinstance(row["batch"], int)]
        ours = [row[field] for row in sure if row["batch"] == "adaptive"]
        for row in rows:
            for name, medians in (("times_best_fixed", fixed), ("times_adaptive", ours)):
                known = medians and row[field] is not None
                row[name + than] = row[field] / min(medians) if known else None
    return rows


def _known(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def measure_distorted(seeds: Sequence[int], peer: str | None) -> list[dict[str, Any]]:
    """Measure the time to a test accuracy on distorted digits, with two ranks."""
    found: list[dict[str, Any]] = []
    # The batches alternate, so that a disturbance of the machine affects all of them equally.
    for seed in seeds:
        for batch in ("adaptive", *FIXED, "horovod"):
            found += run_job("distorted", 2, batch, seed)
        if peer is None:
            continue
        try:
            found += run_adaptdl("adaptdl_distorted.py", 2, seed)
        except RunError as error:
            found.append({"batch": peer, "seed": seed, "failed": str(error)})
    rows = target_rows(found)
    for row in rows:
        row["trainings"] = [each for each in found if each["batch"] == row["batch"]]
        if row["failed"]:
            row["why"] = next(each["failed"] for each in row["trainings"] if "failed" in each)
    return rows


def measure_examples(seeds: int, problems: Sequence[str]) -> list[dict[str, Any]]:
    """Measure the examples needed at larger batches, and predict them; two ranks."""
    rows: list[dict[str, Any]] = []
    for name in problems:
        problem, found = PROBLEMS[name], list[dict[str, Any]]()
        most = float(problem.most_examples)
        for scale in SCALES:
            batch = problem.initial * scale
            mine = run_job("examples", 2, name, batch, most, seeds)
            found += mine
            row = examples_rows(found)[-1]
            row["trainings"] = [
                {"seed": each["seed"], "examples": crossing(each["curve"], each["level"])}
                for each in mine
            ]
            rows.append(row)
            if row["examples"] is not None:
                # In theory twice the batch needs at most twice the examples; 4 leaves a margin.
                most = min(float(problem.most_examples), 4 * row["examples"])
    error = median_error(rows)
    return [*rows, {"problem": "all", "median_error": error if math.isfinite(error) else None}]


def peer_if_there(wanted: bool) -> str | None:
    """Return the name of AdaptDL, or None if it is not asked for or cannot be installed."""
    if not wanted:
        return None
    try:
        ADAPTDL.make()
    except PeerMissingError as error:
        print(f"AdaptDL: not measured: {error}", flush=True)
        return None
    return "AdaptDL"


def main() -> int:
    """Run ``benchmarks/adaptive.py`` with its command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="adaptive.py", description=__doc__)
    parser.add_argument("--parts", type=names, default=PARTS, help="which, separated by commas")
    parser.add_argument("--seeds", type=at_least_one, default=3, help="trainings for each row")
    parser.add_argument("--first-seed", type=int, default=0, help="of distorted")
    told = "for the noise, the digits' included"
    parser.add_argument("--ranks", type=numbers, default="1,2,4", help=told)
    told = "of links, for the step times"
    parser.add_argument("--rates", type=names, default="100mbit,1gbit", help=told)
    known = ",".join(PROBLEMS)
    parser.add_argument("--problems", type=names, default=known, help=f"for the examples: {known}")
    parser.add_argument("--no-peers", action="store_true", help="without AdaptDL")
    parser.add_argument("--out", type=Path, help="folder for a JSON file of each part")
    args = parser.parse_args()
    distorted_seeds = range(args.first_seed, args.first_seed + args.seeds)
    measure: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "noise": lambda: noise_rows(args.seeds, args.ranks),
        "digits": lambda: measure_digits(args.seeds, args.ranks),
        "rules": lambda: measure_rules(args.seeds),
        "times": lambda: times_rows(args.rates),
        "changes": lambda: measure_changes(args.seeds),
        "distorted": lambda: measure_distorted(distorted_seeds, peer),
        "examples": lambda: measure_examples(args.seeds, args.problems),
    }
    if unknown := set(args.parts) - set(measure):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: valid are {PARTS}")
    if unknown := set(args.problems) - set(PROBLEMS):
        parser.error(f"--problems: {', '.join(sorted(unknown))}: valid are {known}")
    peer: str | None = None

    def measure_parts() -> None:
        nonlocal peer
        peer = peer_if_there(not args.no_peers and "distorted" in args.parts)
        versions = {} if peer is None else {"adaptdl": ADAPTDL.version("adaptdl")}
        for part in args.parts:
            load = os.getloadavg()
            rows = measure[part]()
            note = "Ranks share the processors of one machine."
            taken = conditions("this machine", note, load, versions)
            result = Result(f"adaptive_{part}", taken, {part: rows})
            result.show(Console(width=220))
            if args.out:
                result.write(args.out / f"adaptive_{part}.json")

    return end_with(measure_parts)
