"""``TorchDistributor`` with the names and parameters of Spark's own class."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_elastic.engines.task import Task
from hvd_elastic.engines.training import Acquire, Sizes, on_this_machine, train
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.ssh import own_address_towards
from hvd_elastic.spark.dataframe import ROWS_FILE, write_rows
from hvd_elastic.spark.executors import Executors, Request, gpus_here, is_remote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ADDRESS_VARIABLE = "HVD_ELASTIC_DRIVER_ADDRESS"
"""Variable with the address of this machine for executors, where the one that is found is not."""
_GPUS_OF_TASK = "spark.task.resource.gpu.amount"


class TorchDistributor:
    """Runs a function or a script on several processes, on this machine or on Spark's executors.

    A function or script that uses ``hvd_elastic`` runs elastically: a lost executor is a lost host,
    and one that comes later joins. Any other one (DDP, Lightning) finds ``RANK``, ``LOCAL_RANK``,
    ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, and starts again if a rank is lost.

    Args:
        num_processes: number of processes to begin with.
        local_mode: whether they run on this machine instead of on executors.
        use_gpu: whether each gets a GPU.
        _ssl_conf: name of a setting of Spark's class, which is not needed: the link between driver
            and executors is always encrypted, and so it works with ``spark.ssl.enabled``.
        min_processes, max_processes: bounds of an elastic run; None: 1, and ``num_processes``.
        run_options: options of an elastic run by their names in ``hvd-elastic run``, such as
            ``{"run_id": "resnet", "checkpoint_folder": "/nfs/resnet", "policy": "goodput"}``.

    Raises:
        UsageError: the numbers do not fit together, or there are no GPUs.
    """

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool = True,
        use_gpu: bool = True,
        _ssl_conf: str = "pytorch.spark.distributor.ignoreSsl",
        min_processes: int | None = None,
        max_processes: int | None = None,
        run_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.num_processes = num_processes
        self.local_mode = local_mode
        self.use_gpu = use_gpu
        self._sizes = Sizes(num_processes, min_processes, max_processes)
        self._options = dict(run_options or {})
        self._spark = None if local_mode else _active_session()
        self._gpus: list[str] = []
        """GPUs of this machine for the processes of local mode."""
        self._slots = self._local_slots() if local_mode else self._slots_of_task()

    def _local_slots(self) -> int:
        """Return the number of processes, each of which has a GPU of this machine if one is asked.

        Raises:
            UsageError: there are fewer GPUs.
        """
        limit = self._sizes.limit
        if self.use_gpu:
            there = gpus_here()
            if len(there) < limit:
                raise UsageError(
                    f"use_gpu=True, and this machine has {count(len(there), 'GPU')} for "
                    f"{count(limit, 'process')}: give use_gpu=False, fewer processes, or "
                    "local_mode=False"
                )
            self._gpus = there[:limit]
        return limit

    def _slots_of_task(self) -> int:
        """Return the number of processes of a Spark task.

        Raises:
            UsageError: GPUs are asked for, and Spark assigns none, or does not fit the processes.
        """
        assert self._spark is not None, "not in local mode"
        gpus = int(self._spark.conf.get(_GPUS_OF_TASK, "0")) if self.use_gpu else 1
        if gpus < 1:
            raise UsageError(
                f"use_gpu=True, and Spark assigns no GPUs to tasks: set {_GPUS_OF_TASK} and "
                "spark.executor.resource.gpu.amount, or give use_gpu=False"
            )
        for name, number in (
            ("num_processes", self.num_processes),
            ("max_processes", self._sizes.limit),
        ):
            if number % gpus:
                raise UsageError(
                    f"{name} is {number}, and a task has {gpus} GPUs ({_GPUS_OF_TASK}), each for "
                    f"one process: give a multiple of {gpus}"
                )
        return gpus

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Train, and return the value of the function at rank 0; None for a script.

        Args:
            train_object: a function, or the path of a Python script.
            args, kwargs: arguments of the function; for a script, words of its command line.

        Raises:
            UsageError: it cannot be sent to the workers.
            RunError: it raised an exception, or there are not enough executors.
        """
        return self._train(Task.of(train_object, args, kwargs))

    def _train_on_dataframe(
        self,
        train_function: Callable[..., Any],
        spark_dataframe: DataFrame,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train on the rows of a DataFrame, and return the value of the function at rank 0.

        In an elastic function ``hvd.DataLoader(hvd_elastic.spark.rows(), batch_size)`` reads each
        row once an epoch. One with fixed ranks uses ``_get_spark_partition_data_loader``.

        Args:
            train_function: the function.
            spark_dataframe: columns of numbers, arrays of numbers, or vectors. All rows pass
                through the driver, and each host gets them as a file.
            args, kwargs: arguments of the function.

        Raises:
            UsageError, RunError: as :meth:`run`; or the DataFrame has a column of another type.
        """
        with tempfile.TemporaryDirectory(prefix="hvd_elastic-") as name:
            file = Path(name, ROWS_FILE)
            write_rows(spark_dataframe, file)
            return self._train(Task.of(train_function, args, kwargs), file)

    def _train(self, task: Task, *files: Path) -> Any:
        acquire, options = self._acquire(task), self._options
        return train(task, self._sizes, self._address(), "spark", acquire, options, files)

    def _address(self) -> str:
        if self._spark is None:
            return "127.0.0.1"
        if named := os.environ.get(ADDRESS_VARIABLE):
            return named
        if is_remote(self._spark):
            return own_address_towards(Host(self._spark.client.host))
        return str(self._spark.conf.get("spark.driver.host"))

    def _acquire(self, task: Task) -> Acquire:
        if self._spark is None:
            return on_this_machine(self._slots, {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus)})
        slots = self._slots
        least = math.ceil(self._sizes.least_for(task) / slots)
        request = Request(self._sizes.limit // slots, least, slots, self.use_gpu)
        return lambda hosts: Executors(self._spark, hosts, request)


def _active_session() -> Any:
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        raise UsageError(
            "local_mode=False needs a Spark session: create one with "
            "SparkSession.builder.getOrCreate(), or give local_mode=True"
        )
    return session
