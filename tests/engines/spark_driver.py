"""A user's Spark program that trains the probe script, started as ``hvd-elastic run`` would be."""

from __future__ import annotations

import argparse
import os
import sys

from pyspark.sql import SparkSession

from hvd_elastic.spark import TorchDistributor

parser = argparse.ArgumentParser()
parser.add_argument("--run-id")
parser.add_argument("--audit", action="store_true")
parser.add_argument("--checkpoint-every", type=float)
parser.add_argument("--np", type=int)
parser.add_argument("--min-np", type=int)
parser.add_argument("--max-np", type=int)
parser.add_argument("command", nargs="*")
args = parser.parse_args(sys.argv[2:])

builder = SparkSession.builder.master(os.environ["SPARK_URL"])
forwarded = ("DIST_TEST_LIFE", "OMP_NUM_THREADS", "HOROVOD_CYCLE_TIME", "PYTHONPATH")
settings = {
    "spark.driver.host": os.environ["SPARK_LOCAL_IP"],
    "spark.driver.bindAddress": os.environ["SPARK_LOCAL_IP"],
    "spark.ui.enabled": "false",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": "-XX:+UseSerialGC",
    **{f"spark.executorEnv.{name}": os.environ[name] for name in forwarded},
}
for name, value in settings.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
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
    },
)
distributor.run(args.command[1], *args.command[2:])
spark.stop()
