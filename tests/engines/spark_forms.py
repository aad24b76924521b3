"""What users of Spark's TorchDistributor write, with only the import changed; writes results."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
from pyspark.ml.linalg import Vectors

from benchmarks.testbed.spark_session import make_session
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.spark import TorchDistributor, _get_spark_partition_data_loader, rows

Fixed = partial(TorchDistributor, use_gpu=False, elastic=False)
GIVEN_S = 1700.0  # less than the test has, so that what hangs is shown
kept: list[Any] = []
"""Modules that outlive the function that made them."""
LOOKS = ("interval", "maxFailures")
SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
print("rate", parser.parse_args().lr, "at rank", os.environ["RANK"])
"""


def with_argument(rate: float, *, more: str) -> tuple[str, float, str]:
    return os.environ["RANK"], rate, more


def data_parallel(steps: int) -> tuple[int, float]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    # Kept: the end of a gloo group joins its threads with Python's lock held, for which they may
    # wait while they free the last tensors (torch 2.13).
    kept.append(model := DistributedDataParallel(torch.nn.Linear(2, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().mean().backward()
        optimizer.step()
    held = [torch.zeros(1, 2) for _ in range(dist.get_world_size())]
    dist.all_gather(held, model.module.weight.detach())
    dist.destroy_process_group()
    return len(held), max(float((one - held[0]).abs().max()) for one in held)


def with_lightning() -> tuple[int, int]:
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.TensorDataset(torch.randn(24, 2))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=4))
    return trainer.world_size, trainer.global_step


def with_keras() -> tuple[int, int]:
    import keras
    import numpy as np

    import hvd_elastic.keras as hvd

    hvd.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    data = hvd.dataset((np.ones((24, 2), "float32"), np.ones((24, 1), "float32")), batch_size=6)
    model.fit(data, epochs=2, verbose=0, callbacks=[hvd.ElasticCallback()])
    return hvd.size(), int(model.optimizer.iterations.numpy())


def rows_of_rank(count: int) -> list[int]:
    return [int(i) for ids, _, _ in _get_spark_partition_data_loader(count, 4, 0) for i in ids]


def rows_of_all() -> tuple[int, list[int]]:
    import torch

    import hvd_elastic.torch as hvd

    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    loader: Any = hvd.DataLoader(rows(), batch_size=8, shuffle=True)
    read: list[int] = []

    @hvd.run
    def train(state: Any) -> list[int]:
        for _ in hvd.epochs(1):
            for ids, pairs, _ in loader:
                read.extend(ids.tolist())
                optimizer.zero_grad()
                model(pairs.float()).square().mean().backward()
                optimizer.step()
                state.commit()
        found: list[int] = hvd.allgather(torch.tensor(read), "read").tolist()
        return found

    every = train(hvd.State(model=model, optimizer=optimizer))
    return hvd.size(), sorted(every)


def waits() -> None:
    import time

    print("it waits", flush=True)
    time.sleep(3600)


class Heard(io.StringIO):
    """Standard output that tells when the function prints."""

    def __init__(self) -> None:
        super().__init__()
        self.is_running = threading.Event()

    def write(self, text: str) -> int:
        if "it waits" in text:
            self.is_running.set()
        return super().write(text)


def what_ends_it(end: Callable[[], object]) -> str:
    """Return what is raised where ``end`` is called while a function runs on an executor."""
    heard = Heard()

    def end_it() -> None:
        heard.is_running.wait()
        end()

    with contextlib.redirect_stdout(heard):
        threading.Thread(target=end_it, daemon=True).start()
        return refusal(lambda: Fixed(1, False).run(waits))


def refusal(do: Callable[[], object]) -> str:
    """Return the error that is raised."""
    try:
        do()
    except HvdElasticError as error:
        return str(error)
    return "nothing was raised"


def main() -> None:
    faulthandler.dump_traceback_later(GIVEN_S, exit=True)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    # Spark's own class refuses clusters with TLS.
    patience = {f"spark.scheduler.barrier.maxConcurrentTasksCheck.{name}": "5" for name in LOOKS}
    spark = make_session(**{"spark.ssl.enabled": "true", **patience})
    folder = Path(sys.argv[1])
    here, there = Fixed(num_processes=2), Fixed(num_processes=3, local_mode=False)
    elastic = TorchDistributor(num_processes=3, local_mode=False, use_gpu=False)
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    frame = spark.createDataFrame(
        [(i, [float(i), 1.0], i % 2 == 0) for i in range(50)], ["i", "p", "b"]
    )
    found: dict[str, Any] = {
        "function here": here.run(with_argument, 1e-3, more="yes"),
        "function there": there.run(with_argument, 1e-3, more="yes"),
        "script": there.run(str(script), "--lr=0.01"),
        "data parallel": there.run(data_parallel, 5),
        "values": [there.run(with_argument, i, more="")[1] for i in range(int(sys.argv[2]))],
        "rows of rank 0": there._train_on_dataframe(rows_of_rank, frame, 17),
        "rows": elastic._train_on_dataframe(rows_of_all, frame),
    }
    if "keras" in sys.argv:
        found["keras"] = elastic.run(with_keras)
    if "lightning" in sys.argv:
        found["lightning"] = there.run(with_lightning)
    with ThreadPoolExecutor(1) as pool:  # in which no session is the active one
        found["thread"] = pool.submit(lambda: TorchDistributor(1, False, False).num_tasks).result()
    vectors = [(Vectors.dense([1.0]), 1), (None, 2)]
    for name, refused in (
        ("null", spark.sql("select 1 a union all select null a")),
        ("null in an array", spark.sql("select array(1, null, 3) a")),
        ("null vector", spark.createDataFrame(vectors, ["a", "b"])),
        ("two columns", spark.sql("select 1 a, 2 a")),
    ):
        train = partial(here._train_on_dataframe, rows_of_rank, refused, 1)
        found[name] = refusal(train)
    many = Fixed(num_processes=9, local_mode=False)
    found["too many"] = refusal(lambda: many.run(with_argument, 1, more=""))
    found["no GPU"] = refusal(lambda: TorchDistributor(1, local_mode=False, use_gpu=True))
    # The executors of this session start another Python, or are told of another one.
    base = getattr(sys, "_base_executable", sys.executable)
    context = spark.sparkContext
    for name, setting, value in (
        ("another Python", "pythonVer", "3.7"),
        ("no package", "pythonExec", base),
    ):
        kept = getattr(context, setting)
        setattr(context, setting, value)
        run = Fixed(1, False).run
        found[name] = refusal(partial(run, with_argument, 1, more=""))
        setattr(context, setting, kept)
    context.setJobGroup("mine", "a group of the user")
    found["group cancelled"] = what_ends_it(lambda: context.cancelJobGroup("mine"))
    found["stopped"] = what_ends_it(spark.stop)
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
