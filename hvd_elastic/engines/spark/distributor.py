"""``TorchDistributor`` with the names and parameters of Spark's own class."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from hvd_elastic.engines.dial_in.task import Task
from hvd_elastic.engines.dial_in.training import Acquire, Sizes, on_this_machine, train
from hvd_elastic.engines.spark.dataframe import ROWS_FILE, write_rows
from hvd_elastic.engines.spark.executors import (
    Executors,
    Request,
    gpus_here,
    has_local_master,
    is_remote,
    is_stopped,
)
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.ssh import own_address_towards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ADDRESS_VARIABLE = "HVD_ELASTIC_DRIVER_ADDRESS"
"""Variable with the address of this machine for executors, where the one that is found is not."""
_GPUS_OF_TASK = "spark.task.resource.gpu.amount"


class TorchDistributor:
    """Runs a function or a script on several processes, on this machine or on Spark's executors.

    They use :mod:`hvd_elastic.torch`, :mod:`hvd_elastic.keras` or :mod:`hvd_elastic.tensorflow`,
    and run elastically: a lost executor is a lost host, and one that comes later joins. With
    ``elastic=False`` any other one (DDP, Lightning) finds ``RANK``, ``LOCAL_RANK``,
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
        elastic: whether processes may come and go; False: ranks are fixed, as with Spark's class.

    Attributes:
        num_processes, local_mode, use_gpu: as given.
        num_tasks: number of Spark tasks; in local mode of processes.
        input_params: these four by name.
        spark: the program's session; None in local mode without one.
        is_remote: whether it is one of Spark Connect.
        is_spark_local_master: whether its executors are in the driver (``local[4]``).
        logger: logger of Spark's class, on which nothing is logged here.
        ssl_conf: as given.

    Raises:
        ArgumentError: the numbers do not fit together.
        RunError: there are no GPUs, or there is no Spark session.
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
        elastic: bool = True,
    ) -> None:
        self._sizes = Sizes(num_processes, min_processes, max_processes, elastic)
        self.num_processes = self._sizes.wanted
        self.local_mode = local_mode
        self.use_gpu = use_gpu
        self._options = dict(run_options or {})
        self.spark = _session(needed=not local_mode)
        self.is_remote = self.spark is not None and is_remote(self.spark)
        self.is_spark_local_master = self.spark is not None and has_local_master(self.spark)
        self.logger = logging.getLogger(type(self).__name__)
        self.ssl_conf = _ssl_conf
        self._gpus: list[str] = []
        """GPUs of this machine for the processes of local mode."""
        self._slots = self._local_slots() if local_mode else self._slots_of_task()
        self.num_tasks = self.num_processes // (1 if local_mode else self._slots)
        names = ("num_processes", "local_mode", "use_gpu", "num_tasks")
        self.input_params = {name: getattr(self, name) for name in names}

    def _local_slots(self) -> int:
        """Return the number of processes, each of which has a GPU of this machine if one is asked.

        Raises:
            RunError: there are fewer GPUs.
        """
        limit = self._sizes.limit
        if self.use_gpu:
            there = gpus_here()
            if len(there) < limit:
                raise RunError(
                    f"use_gpu=True, and this machine (the driver) has {count(len(there), 'GPU')} "
                    f"for {count(limit, 'process')}: give use_gpu=False, fewer processes, or "
                    "local_mode=False"
                )
            self._gpus = there[:limit]
        return limit

    def _slots_of_task(self) -> int:
        """Return the number of processes of a Spark task.

        Raises:
            RunError: GPUs are asked for, and Spark assigns none, or does not fit the processes.
        """
        assert self.spark is not None, "not in local mode"
        if not self.use_gpu:
            return 1
        amount = self.spark.conf.get(_GPUS_OF_TASK, None)
        gpus = int(float(amount or 0))
        if gpus < 1:
            is_set = "unset" if amount is None else amount
            raise RunError(
                f"use_gpu=True, and Spark assigns no GPUs to tasks ({_GPUS_OF_TASK} is {is_set}): "
                "set it and spark.executor.resource.gpu.amount to 1 or more, or give use_gpu=False"
            )
        for name, number in (
            ("num_processes", self.num_processes),
            ("max_processes", self._sizes.limit),
        ):
            if number % gpus:
                raise RunError(
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
            ArgumentError: it cannot be sent to the workers.
            RunError: it raised an exception, there are not enough executors, or Spark's jobs were
                cancelled.
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
            spark_dataframe: columns of numbers, arrays of numbers, or vectors. All rows pass
                through the driver, and each host gets them as a file.
            args, kwargs: arguments of the function.

        Raises:
            ArgumentError, RunError: as :meth:`run`; or the DataFrame has a column of another type,
                nulls, or several columns of one name.
        """
        with tempfile.TemporaryFile() as file:  # without a name, so that no end leaves it behind
            write_rows(spark_dataframe, file)
            return self._train(Task.of(train_function, args, kwargs), {ROWS_FILE: file})

    def _train(self, task: Task, files: Mapping[str, BinaryIO] | None = None) -> Any:
        if not self.local_mode and is_stopped(self.spark):
            raise RunError("the Spark session was stopped: make a distributor with the new one")
        address, acquire = self._address(), self._acquire()
        return train(task, self._sizes, address, "spark", acquire, self._options, files)

    def _address(self) -> str:
        if self.local_mode:
            return "127.0.0.1"
        if named := os.environ.get(ADDRESS_VARIABLE):
            return named
        if self.is_remote:
            return own_address_towards(Host(self.spark.client.host))
        return str(self.spark.conf.get("spark.driver.host"))

    def _acquire(self) -> Acquire:
        if self.local_mode:
            return on_this_machine(self._slots, {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus)})
        slots = self._slots
        least = math.ceil(self._sizes.fewest / slots)
        request = Request(self._sizes.limit // slots, least, slots, self.use_gpu)
        return lambda hosts: Executors(self.spark, hosts, request)


def _session(needed: bool) -> Any:
    """Return this thread's Spark session, or else the program's; None if there is none.

    Raises:
        RunError: there is none, and one is needed.
    """
    if needed or "pyspark.sql" in sys.modules:
        from pyspark.sql import SparkSession

        with contextlib.suppress(RuntimeError):  # there is none
            return SparkSession.active()
    if needed:
        raise RunError(
            "local_mode=False needs a Spark session: create one with "
            "SparkSession.builder.getOrCreate(), or give local_mode=True"
        )
    return None
