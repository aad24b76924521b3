"""Measures how long a checkpoint pauses training, and when it is complete; see README.md here.

Run it: ``python benchmarks/checkpoints.py --out benchmarks/results/checkpoints.json``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.testbed.command import Say, run_benchmark
from benchmarks.testbed.figures import Result, conditions, figure
from benchmarks.testbed.launchers import OUR_PROGRAM, ROOT
from hvd_elastic.errors import RunError
from hvd_elastic.records.json_lines import read_records

RANKS = (1, 2)
CHECKPOINT_EVERY_S = 2.0
ROWS_PER_TENSOR, COLUMNS = 1000, 1000
DEADLINE_S = 900.0


def train(args: argparse.Namespace) -> None:
    """Run the training script: each step sleeps and trains a small layer beside frozen tensors."""
    import torch
    from torch.utils.data import TensorDataset

    import hvd_elastic.torch as hvd

    hvd.init()
    tensors = max(1, args.parameters // (ROWS_PER_TENSOR * COLUMNS))
    model: Any = torch.nn.Module()
    model.small = torch.nn.Linear(4, 1)
    model.large = torch.nn.ParameterList(
        torch.nn.Parameter(torch.zeros(ROWS_PER_TENSOR, COLUMNS), requires_grad=False)
        for _ in range(tensors)
    )
    # Frozen parameters are copied like others, but have no gradients whose reduction takes time.
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    torch.manual_seed(0)
    loader: hvd.DataLoader[Any] = hvd.DataLoader(TensorDataset(torch.randn(8 * args.steps, 4)), 8)

    @hvd.run
    def steps(state: hvd.State) -> tuple[float, float]:
        fresh: list[float] = []
        longest, before = 0.0, float("inf")
        for _ in hvd.epochs(1):
            for (inputs,) in loader:
                optimizer.zero_grad()
                model.small(inputs).square().mean().backward()
                time.sleep(args.step_time)
                optimizer.step()
                state.commit()
                now = time.monotonic()
                longest, before = max(longest, now - before), now
        # For comparison, the former way: rank 0 copies everything into new memory between steps.
        for _ in range(3):
            began = time.monotonic()
            copies = [value.to("cpu", copy=True) for value in model.state_dict().values()]
            fresh.append(time.monotonic() - began)
            del copies
        return statistics.median(fresh), longest

    fresh_copy_s, longest_step_s = steps(hvd.State(model=model, optimizer=optimizer))
    hvd.report(fresh_copy_s=fresh_copy_s, longest_step_s=longest_step_s)


def measure_run(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Run once with ``ranks`` ranks on this machine; return figures from its events."""
    with tempfile.TemporaryDirectory(prefix="hvd-elastic-bench-") as home:
        run = [
            *(*OUR_PROGRAM, "run", "--np", str(ranks), "--run-id", "bench"),
            *("--checkpoint-every", str(CHECKPOINT_EVERY_S), "--"),
            *(sys.executable, __file__, "--train", "--parameters", str(options.parameters)),
            *("--steps", str(options.steps), "--step-time", str(options.step_time)),
        ]
        environment = {**os.environ, "HVD_ELASTIC_HOME": home, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
        )
        if done.returncode != 0:
            raise RunError(f"the run with {ranks} ranks failed:\n{done.stdout}{done.stderr}")
        events = read_records(Path(home) / "runs" / "bench" / "events.jsonl")
    taken = [event for event in events if event["kind"] == "checkpoint"]
    said = next(e for e in reversed(events) if e["kind"] == "metrics" and "fresh_copy_s" in e)
    # The last checkpoint is taken after training, when it delays no step.
    during = taken[:-1] or taken
    megabytes = taken[0]["bytes"] / 1e6
    blocked = figure([event["blocked_s"] for event in during])
    return {
        "megabytes": round(megabytes, 1),
        "shards": taken[0]["shards"],
        "checkpoints": len(taken),
        "copy_in_fresh_memory_s": round(said["fresh_copy_s"], 4),
        "blocked_s": blocked,
        "blocked_ms_per_mb": round(1e3 * (blocked.median_s or 0.0) / megabytes, 4),
        "longest_step_s": round(said["longest_step_s"], 4),
        "complete_after_s": figure([event["seconds"] for event in during]),
    }


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure one run for each number of ranks."""
    load_before = os.getloadavg()
    found = []
    for ranks in RANKS:
        say(f"a run with {ranks} rank(s)")
        found.append({"ranks": ranks, **measure_run(options, ranks)})
    note = f"{options.parameters} parameters, steps padded with {options.step_time} s."
    return Result("checkpoints", conditions("this machine", note, load_before), {"runs": found})


def main() -> int:
    """Run the benchmark, or with ``--train`` its script; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-time", type=float, default=0.2, help="pause in each step [s]")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    if "--train" in sys.argv:
        train(parser.parse_args())
        return 0
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
