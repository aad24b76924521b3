"""Training on the executors of a Spark cluster, elastic, with the names of Spark's own class.

In place of ``from pyspark.ml.torch.distributor import TorchDistributor``::

    from hvd_elastic.spark import TorchDistributor

    distributor = TorchDistributor(num_processes=4, local_mode=False, use_gpu=True, min_processes=2)
    model = distributor.run(train, 1e-3)
"""

from __future__ import annotations

from hvd_elastic.engines.spark.dataframe import _get_spark_partition_data_loader, rows
from hvd_elastic.engines.spark.distributor import TorchDistributor

__all__ = ["TorchDistributor", "_get_spark_partition_data_loader", "rows"]
