"""Starts the jobs, gathers their figures, and makes a table and a JSON file of them."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_elastic.bench.figures import conditions, write_result
from hvd_elastic.errors import RunError

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 300


def run_job(module: str, ranks: int, *arguments: object) -> Any:
    """What rank 0 of one job wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        job = [sys.executable, "-m", f"hvd_elastic.bench.adaptive.{module}", str(out)]
        job += [str(argument) for argument in arguments]
        if ranks > 1:
            launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", str(ranks)]
            job = [*launcher, *job]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(job, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode != 0 or not out.exists():
            raise RunError(f"{' '.join(job)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return json.loads(out.read_text(encoding="utf-8"))


def noise_rows(seeds: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Estimated over exact noise scale, for each kind of job."""
    rows = []
    for count, problem, kind, extra, weights in itertools.product(
        ranks, ("linear", "softmax"), ("sgd", "adam"), (0, 3), ("frozen", "training")
    ):
        found = [
            run_job("noise_job", count, problem, kind, extra, weights, seed)
            for seed in range(seeds)
        ]
        ratios = [ratio for one in found for ratio in one]
        row = {
            "ranks": count,
            "problem": problem,
            "optimizer": kind,
            "accumulation_steps": extra,
            "weights": weights,
            "median": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "checkpoints": len(ratios),
        }
        rows.append(row)
        print(
            f"{count} ranks  {problem:8}{kind:5} accumulation {extra}  {weights:9}"
            f"median {row['median']:.2f}  from {row['lowest']:.2f} to {row['highest']:.2f}",
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


def main() -> None:
    """The command line of ``benchmarks/adaptive.py``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="noise,overhead", help="which, separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="jobs for each row of noise")
    parser.add_argument("--ranks", default="1,2,4", help="for the noise")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of steps for the overhead")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    load = os.getloadavg()
    body: dict[str, Any] = {}
    if "noise" in args.parts:
        body["noise"] = noise_rows(args.seeds, [int(count) for count in args.ranks.split(",")])
    if "overhead" in args.parts:
        body["overhead"] = overhead_rows(args.rounds)
    if args.out:
        note = "ranks share the processors of one machine"
        write_result(args.out, "adaptive", conditions("this machine", note, load), body)
