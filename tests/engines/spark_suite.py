"""Runs the tests of Spark's own distributor on ours: ``python -m tests.engines.spark_suite SPARK``.

SPARK is a checkout of apache/spark, of the version of the pyspark that is installed. Its tests
import the class from ``pyspark.ml.torch.distributor``, where ours is put in its place. The last
line that it prints is a JSON object with the end of each test by its name; empty: it has passed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import unittest
from pathlib import Path
from typing import Any

import cloudpickle
from pyspark.ml.torch import distributor

from hvd_elastic import spark

MODULES = ("test_distributor", "test_data_loader")


class Fixed(spark.TorchDistributor):
    """Ours with fixed ranks, as Spark's own tests need them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "elastic": False})


class Endings(unittest.TextTestResult):
    """Remembers how each test has ended; subtests count as their test."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.endings: dict[str, str] = {}

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self.endings[_name(test)] = ""

    def stopTestRun(self) -> None:  # noqa: N802
        for test, trace in [*self.failures, *self.errors]:
            owner = getattr(test, "test_case", test)  # of a subtest
            self.endings[_name(owner)] = trace.strip().splitlines()[-1]
        for test, reason in self.skipped:
            self.endings[_name(test)] = f"skipped: {reason}"


def _name(test: object) -> str:
    return str(getattr(test, "_testMethodName", test))


def main(checkout: Path) -> None:
    """Run the tests of a checkout."""
    distributor.TorchDistributor = Fixed
    distributor._get_spark_partition_data_loader = spark._get_spark_partition_data_loader
    suite = unittest.TestSuite()
    for name in MODULES:
        path = checkout / "python" / "pyspark" / "ml" / "torch" / "tests" / f"{name}.py"
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None, path
        assert found.loader is not None, path
        module = sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        cloudpickle.register_pickle_by_value(module)  # the executors have no tests
        suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
    os.chdir(checkout)  # their paths of scripts are relative to it
    result = unittest.TextTestRunner(resultclass=Endings, verbosity=2).run(suite)
    assert isinstance(result, Endings)
    print(json.dumps(result.endings))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
