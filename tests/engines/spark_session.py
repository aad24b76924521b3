"""The Spark session of the test programs, on the cluster that the environment names."""

from __future__ import annotations

import os
from typing import Any

FORWARDED = ("DIST_TEST_LIFE", "OMP_NUM_THREADS", "HOROVOD_CYCLE_TIME", "PYTHONPATH")


def make_session(**more: str) -> Any:
    from pyspark.sql import SparkSession

    address = os.environ["SPARK_LOCAL_IP"]
    variables = {name: os.environ[name] for name in FORWARDED if name in os.environ}
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
