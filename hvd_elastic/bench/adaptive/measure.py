"""Starts the jobs, gathers their figures, and makes tables and a JSON file of them."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_elastic.bench.adaptive import rule_job
from hvd_elastic.bench.figures import conditions, write_result
from hvd_elastic.bench.launchers import STATIC, Order
from hvd_elastic.bench.testbed import Testbed, make_testbed
from hvd_elastic.errors import RunError
from hvd_elastic.model.step_time import Observation, fit_step_time

__all__ = ["digits_rows", "main", "prediction_errors", "rule_rows", "target_rows"]

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 1800
PARTS = "noise,digits,rules,overhead,times,target"
SPLITS = 20
"""Random halves of the configurations that the step time is fitted to."""


def run_job(module: str, ranks: int, *arguments: object) -> Any:
    """What rank 0 of one job on this machine wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        job = [sys.executable, "-m", f"hvd_elastic.bench.adaptive.{module}", str(out)]
        job += [str(argument) for argument in arguments]
        if ranks > 1:
            launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo"]
            job = [*launcher, "-np", str(ranks), *job]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run(
                job, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"{' '.join(job)} took more than {LIMIT_S} s") from None
        if done.returncode != 0 or not out.exists():
            raise RunError(f"{' '.join(job)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return json.loads(out.read_text(encoding="utf-8"))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def noise_rows(seeds: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Estimated over exact noise scale, for each kind of training."""
    rows = []
    for count in ranks:
        for found in run_job("noise_job", count, seeds):
            ratios = found.pop("ratios")
            row = {"ranks": count, **found, **spread(ratios), "checkpoints": len(ratios)}
            rows.append(row)
            print(
                f"{count} ranks  {row['problem']:8}{row['optimizer']:5} accumulation "
                f"{row['accumulation_steps']}  {row['weights']:9}median {row['median']:.2f}  "
                f"from {row['lowest']:.2f} to {row['highest']:.2f}",
                flush=True,
            )
    return rows


def digits_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Measured noise scale over that of brute force, on the digits network.

    Args:
        found: what ``digits_job`` wrote: the fields of its ``Kind``, ``frozen_steps``, and
            ``measured`` (None: all noise, no end to it) and ``brute_force`` of each seed.

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
    """The noise scale of the digits network, measured and by brute force."""
    rows = []
    for count in ranks:
        for found in digits_rows(run_job("digits_job", count, seeds)):
            row = {"ranks": count, **found}
            rows.append(row)
            measured = "no estimate is finite"
            if row["median"] is not None:
                measured = (
                    f"measured {row['median']:.2f} times that, from {row['lowest']:.2f} to "
                    f"{row['highest']:.2f}, {row['without_end']} of {row['seeds']} without end"
                )
            print(
                f"{count} ranks  {row['optimizer']:5}{row['trained_steps']:3} steps, then "
                f"{row['frozen_steps']:4} frozen, batch norm {row['batch_norm']:10}noise scale "
                f"{row['brute_force']:5.0f}, {measured}",
                flush=True,
            )
    return rows


def rule_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a scale makes of the loss at the same progress, against the initial batch size.

    Args:
        found: what ``rule_job`` wrote: ``seed``, ``scale``, ``losses``, ``least_loss``, ``steps``.

    Returns:
        For each scale above 1, over all seeds: the ratio of losses at each checkpoint, the ratio of
        what they are above the least loss, and the steps that were needed.
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
    """AdaScale on a convex problem, two ranks."""
    rows = []
    for row in rule_rows(run_job("rule_job", 2, "adascale", seeds)):
        row = {"ranks": 2, "rule": "adascale", "progress": list(rule_job.PROGRESS), **row}
        rows.append(row)
        ratios = ", ".join(f"{ratio:.3f}" for ratio in row["loss_ratio"])
        print(
            f"adascale {row['scale']:2}x: loss at progress {row['progress']}: {ratios} times that "
            f"at 1x (worst {row['worst_loss_ratio']:.3f}); {row['steps']:.0f} steps instead of "
            f"{row['steps_at_scale_1']:.0f}",
            flush=True,
        )
    return rows


def overhead_rows(rounds: int) -> list[dict[str, Any]]:
    """Step time with everything adaptive beside that of Horovod's own optimizer, two ranks."""
    times = run_job("overhead_job", 2, rounds)
    bare, ours = (statistics.median(times[name]) for name in ("bare", "adaptive"))
    ratio = statistics.median(
        mine / theirs for mine, theirs in zip(times["adaptive"], times["bare"], strict=True)
    )
    row = {"ranks": 2, "parameters": 2_002_000, "bare_s": bare, "adaptive_s": ours, "ratio": ratio}
    print(
        f"2 M parameters, 2 ranks: bare {1000 * bare:.2f} ms, adaptive {1000 * ours:.2f} ms; "
        f"median of {rounds} ratios {ratio:.3f}",
        flush=True,
    )
    return [{**row, "blocks": times}]


def prediction_errors(observations: Sequence[Observation], splits: int = SPLITS) -> list[float]:
    """Fitted to half of the configurations, how far off the other half is predicted.

    Args:
        observations: one for each configuration.
        splits: random halves that are tried, always the same ones.

    Returns:
        ``|predicted / measured - 1|`` of every configuration left out, of all splits.
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
    """Step times on virtual hosts, fitted and predicted, for each link rate."""
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
        print(
            f"links of {rate}: step times of {len(found)} configurations, half of them predicted: "
            f"median error {100 * row['median']:.1f} %, worst {100 * row['highest']:.0f} %",
            flush=True,
        )
    return rows


def _timed_on(bed: Testbed, slots: Mapping[str, int]) -> list[Observation]:
    out = bed.scratch / "times.json"
    out.unlink(missing_ok=True)
    script = Path(__file__).with_name("times_job.py")
    order = Order(
        training=[str(script), str(out), str(len(slots))],
        slots=slots,
        min_np=sum(slots.values()),
        max_np=sum(slots.values()),
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    with bed.job(STATIC, order) as job:
        while (status := job.ended()) is None:
            job.sleep()
        if status or not out.exists():
            raise RunError(f"timing steps on {dict(slots)} failed:\n{job.output_tail()}")
    return [Observation(**each) for each in json.loads(out.read_text(encoding="utf-8"))]


def target_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How long each way took to reach the target, against the best fixed batch.

    Args:
        found: what ``target_job`` wrote: ``batch`` (a size, or ``"adaptive"``), ``seconds`` (None
            where the target was missed), ``steps``, ``last_batch``.
    """
    rows: list[dict[str, Any]] = []
    for batch in dict.fromkeys(row["batch"] for row in found):
        mine = [row for row in found if row["batch"] == batch]
        reached = [row["seconds"] for row in mine if row["seconds"] is not None]
        row: dict[str, Any] = {"batch": batch, "seeds": len(mine), "missed": len(mine)}
        row["missed"] -= len(reached)
        row["last_batch"] = statistics.median(each["last_batch"] for each in mine)
        rows.append({**row, **(spread(reached) if reached else {"median": None})})
    fixed = [row for row in rows if row["batch"] != "adaptive" and not row["missed"]]
    best = min((row["median"] for row in fixed), default=None)
    for row in rows:
        known = best is not None and row["median"] is not None
        row["times_best_fixed"] = row["median"] / best if known else None
    return rows


def measure_target(seeds: int) -> list[dict[str, Any]]:
    """Time to a test accuracy on the digits, two ranks."""
    rows = target_rows(run_job("target_job", 2, seeds))
    for row in rows:
        if row["median"] is None:
            print(f"batch {row['batch']}: the target was missed in all {row['seeds']} trainings")
            continue
        beside_best = row["times_best_fixed"] or math.nan
        print(
            f"batch {row['batch']!s:9}{row['median']:.2f} s to the target, from "
            f"{row['lowest']:.2f} to {row['highest']:.2f}, missed in {row['missed']} of "
            f"{row['seeds']}; {beside_best:.2f} times the best fixed batch; "
            f"last batch {row['last_batch']:.0f}",
            flush=True,
        )
    return rows


def main() -> None:
    """The command line of ``benchmarks/adaptive.py``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=PARTS, help="which, separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="trainings for each row")
    parser.add_argument("--ranks", default="1,2,4", help="for the noise, the digits' included")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of steps for the overhead")
    parser.add_argument("--rates", default="100mbit,1gbit", help="of links, for the step times")
    parser.add_argument("--out", type=Path, help="folder for a JSON file of each part")
    args = parser.parse_args()
    wanted = args.parts.split(",")
    ranks = [int(count) for count in args.ranks.split(",")]
    measure: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "noise": lambda: noise_rows(args.seeds, ranks),
        "digits": lambda: measure_digits(args.seeds, ranks),
        "rules": lambda: measure_rules(args.seeds),
        "overhead": lambda: overhead_rows(args.rounds),
        "times": lambda: times_rows(args.rates.split(",")),
        "target": lambda: measure_target(args.seeds),
    }
    if unknown := set(wanted) - set(measure):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: valid are {PARTS}")
    for part in wanted:
        load = os.getloadavg()
        rows = measure[part]()
        taken = conditions("this machine", "Ranks share the processors of one machine.", load)
        print(taken.sentence(), flush=True)
        if args.out:
            write_result(
                args.out / f"adaptive_{part}.json", f"adaptive_{part}", taken, {part: rows}
            )
