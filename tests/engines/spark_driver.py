"""A user's Spark program that trains the probe script, started as ``hvd-elastic run`` would be."""

from __future__ import annotations

import argparse
import sys

from benchmarks.testbed.spark_session import make_session
from hvd_elastic.spark import TorchDistributor

parser = argparse.ArgumentParser()
parser.add_argument("--run-id")
parser.add_argument("--audit", action="store_true")
parser.add_argument("--checkpoint-every", type=float)
parser.add_argument("--failure-timeout", type=float)
parser.add_argument("--np", type=int)
parser.add_argument("--min-np", type=int)
parser.add_argument("--max-np", type=int)
parser.add_argument("command", nargs="*")
args = parser.parse_args(sys.argv[2:])

spark = make_session()
distributor = TorchDistributor(
    args.np,
    local_mode=False,
    use_gpu=False,
    min_processes=args.min_np,
    max_processes=args.max_np,
    run_options={
        "run_id": args.run_id,
        "audit": args.audit,
        "checkpoint_every_s": args.checkpoint_every,
        "failure_timeout_s": args.failure_timeout,
    },
)
distributor.run(args.command[1], *args.command[2:])
spark.stop()
