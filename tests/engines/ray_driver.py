"""A user's Ray program that trains the probe script, started as ``hvd-elastic run`` would be."""

from __future__ import annotations

import argparse
import sys

from hvd_elastic.ray import ElasticTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--run-id")
parser.add_argument("--audit", action="store_true")
parser.add_argument("--checkpoint-every", type=float)
parser.add_argument("--min-np", type=int)
parser.add_argument("--max-np", type=int)
parser.add_argument("command", nargs="*")
args = parser.parse_args(sys.argv[2:])

ElasticTrainer(
    args.command[1],
    args.command[2:],
    scaling=(args.min_np, args.max_np),
    resources_per_worker={"slots": 2},
    run_options={
        "run_id": args.run_id,
        "audit": args.audit,
        "checkpoint_every_s": args.checkpoint_every,
    },
).fit()
