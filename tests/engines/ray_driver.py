"""A user's Ray program that trains the probe script, started as ``hvd-elastic run`` would be."""

from __future__ import annotations

import argparse
import os
import sys

import ray

from hvd_elastic.ray import ElasticTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--run-id")
parser.add_argument("--audit", action="store_true")
parser.add_argument("--checkpoint-every", type=float)
parser.add_argument("--failure-timeout", type=float)
parser.add_argument("--min-np", type=int)
parser.add_argument("--max-np", type=int)
parser.add_argument("command", nargs="*")
args = parser.parse_args(sys.argv[2:])

forwarded = (
    "DIST_TEST_LIFE",
    "PYTHONPATH",
    "HVD_ELASTIC_HOME",
    "OMP_NUM_THREADS",
    "HOROVOD_CYCLE_TIME",
)
env_vars = {name: os.environ[name] for name in forwarded if name in os.environ}
ray.init(runtime_env={"env_vars": env_vars}, log_to_driver=False)
ElasticTrainer(
    args.command[1],
    args.command[2:],
    scaling=(args.min_np, args.max_np),
    resources_per_worker={"slots": 2},
    run_options={
        "run_id": args.run_id,
        "audit": args.audit,
        "checkpoint_every_s": args.checkpoint_every,
        "failure_timeout_s": args.failure_timeout,
    },
).fit()
