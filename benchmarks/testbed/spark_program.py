"""A user's Spark program, with our ``TorchDistributor`` or Spark's: what the benchmark measures.

``python -m benchmarks.testbed.spark_program ours|theirs FOLDER RANKS MOST SCRIPT [ARG]...``. It
creates its session, waits for as many executors as ranks, writes the time to ``FOLDER/asked``, and
has the script run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.testbed.marking import tell_time
from benchmarks.testbed.spark_session import make_session

_SETTINGS = {
    # Executors that are lost are replaced, and their tasks tried again, without end.
    "spark.task.maxFailures": "100",
    "spark.stage.maxConsecutiveAttempts": "100",
}


def main() -> None:
    """Run the program."""
    whose, folder, ranks, most, script, *arguments = sys.argv[1:]
    spark = make_session(**_SETTINGS)
    context = spark.sparkContext._jsc.sc()
    while context.getExecutorMemoryStatus().size() <= int(ranks):  # the driver is one of them
        time.sleep(0.1)
    distributor: Any
    if whose == "ours":
        from hvd_elastic.spark import TorchDistributor as Ours

        options = {"run_id": "bench"}
        distributor = Ours(
            int(ranks), False, False, min_processes=1, max_processes=int(most), run_options=options
        )
    else:
        from pyspark.ml.torch.distributor import TorchDistributor as Theirs

        distributor = Theirs(int(ranks), local_mode=False, use_gpu=False)
    tell_time(Path(folder, "asked"))
    distributor.run(script, *arguments)


if __name__ == "__main__":
    main()
