"""What is said where Spark's TorchDistributor cannot train; no Spark is needed for that."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_elastic.engines.spark.executors import explain, gpus_here, visible_gpus
from hvd_elastic.errors import ScriptError
from hvd_elastic.spark import TorchDistributor, _get_spark_partition_data_loader, rows

TRACEBACK = """\
Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent failure: \
org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was thrown from the \
Python worker: Traceback (most recent call last):
  File "/opt/pyspark.zip/pyspark/serializers.py", line 483, in loads
    return cloudpickle.loads(obj, encoding=encoding)
{error}
 SQLSTATE: 38000
\tat org.apache.spark.api.python.BasePythonRunner.read(PythonRunner.scala:1097)
"""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("ModuleNotFoundError: No module named 'hvd_elastic'", "no package 'hvd_elastic': install"),
        (
            "hvd_elastic.errors.RunError: host process: no key",
            "cannot run a task: host process: no",
        ),
        (
            (
                "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] "
                "Python in worker has different version: 3.9 than that in driver: 3.11"
            ),
            "the executors have another Python than the driver",
        ),
    ],
)
def test_failure_of_a_task_is_explained(error: str, words: str) -> None:
    assert words in explain(TRACEBACK.format(error=error))


def test_gpus_are_named_as_spark_has_assigned_them(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(["1", "3"]) == "1,3"
    assert visible_gpus([]) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6")
    assert visible_gpus(["0", "2"]) == "4,GPU-6"
    assert gpus_here() == ["4", "5", "GPU-6"]


def test_more_gpus_than_there_are_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        RuntimeError, match=r"this machine \(the driver\) has 0 GPUs for 2 processes"
    ):
        TorchDistributor(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert TorchDistributor(2)._gpus == ["0", "1"]


def test_numbers_of_processes_are_checked_at_once():
    with pytest.raises(ValueError, match="at most 3"):
        TorchDistributor(4, use_gpu=False, max_processes=3)
    with pytest.raises(ValueError, match="is 0; it must be a positive integer"):
        TorchDistributor(0, use_gpu=False)
    with pytest.raises(ValueError, match=r"elastic=False the number .* leave its bounds out"):
        TorchDistributor(2, use_gpu=False, min_processes=1, elastic=False)


def test_attributes_of_sparks_class_exist_without_a_session():
    found = TorchDistributor(np.int64(3), use_gpu=False)
    assert found.input_params == {
        "num_processes": 3,
        "local_mode": True,
        "use_gpu": False,
        "num_tasks": 3,
    }
    assert type(found.num_processes) is int
    assert (found.is_remote, found.is_spark_local_master, found.spark) == (False, False, None)
    assert found.logger.name == "TorchDistributor"
    assert found.ssl_conf == "pytorch.spark.distributor.ignoreSsl"


def test_rows_are_only_there_where_a_dataframe_was_given(monkeypatch) -> None:
    with pytest.raises(ScriptError, match="_train_on_dataframe"):
        rows()
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ScriptError, match=r"hvd\.DataLoader"):
        _get_spark_partition_data_loader(10, 2)
