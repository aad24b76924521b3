"""The Spark session of a program on a virtual cluster, for tests and benchmarks."""

from __future__ import annotations

import os
from typing import Any

_FORWARDED = (
    *("DIST_TEST_LIFE", "GLOO_SOCKET_IFNAME", "HOROVOD_CYCLE_TIME", "HVD_ELASTIC_BENCH_MARKS"),
    *("OMP_NUM_THREADS", "PYTHONPATH"),
)
"""Variables of the program that executors get too, where they are set."""


def make_session(**more: str) -> Any:
    """Return a session on the cluster that the environment names; ``more``: further settings."""
    from pyspark.sql import SparkSession

    address = os.environ["SPARK_LOCAL_IP"]
    variables = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    settings = {
        "spark.driver.host": address,
        "spark.driver.bindAddress": address,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": "-XX:+UseSerialGC",
        **{f"spark.executorEnv.{name}": value for name, value in variables.items()},
        **more,
    }
    builder = SparkSession.builder.master(os.environ["SPARK_URL"])
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
