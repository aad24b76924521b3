"""``hvd.evaluate`` on real ranks gives what one process computes, whoever dies meanwhile."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.dist.conftest import EVERY_STYLE, StartJob
from tests.dist.running import RunningJob, Stage

pytestmark = pytest.mark.dist

# Both scripts evaluate after each epoch; rank 0 then computes the same in a plain loop and writes
# down both. Reading waits while a file "slow" is there. 130 examples, and 2: fewer than ranks.
COMMON = """\
import json, math, sys, time
from pathlib import Path

folder = Path(sys.argv[1])


class Watched:
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if (folder / "slow").exists():
            (folder / f"evaluating-{hvd.rank()}").touch()
            time.sleep(0.1)
        return self.inputs[index], self.targets[index]


def evaluate(epoch):
    for name, data in sets.items():
        found = hvd.evaluate(model, data, metrics, batch_size=32)
        if hvd.rank() == 0:
            said = {"set": name, "epoch": epoch, "size": hvd.size(), "evaluated": found}
            said["plain"] = plain(data)
            with (folder / "said").open("a") as file:
                file.write(json.dumps(said) + "\\n")
    return {f"val_{metric}": value for metric, value in found.items()}
"""
TORCH = """
import torch
from torch.utils.data import TensorDataset
import hvd_elastic.torch as hvd

hvd.init()
torch.manual_seed(0)
inputs = torch.randn(210, 6)
targets = (inputs.sum(1) > 0).long()
sets = {"all": Watched(inputs[80:], targets[80:]), "two": Watched(inputs[80:82], targets[80:82])}
model = torch.nn.Sequential(
    torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
loader = hvd.DataLoader(TensorDataset(inputs[:80], targets[:80]), 20, shuffle=True)
losses = torch.nn.CrossEntropyLoss(reduction="none")
metrics = {"loss": losses, "right": lambda outputs, targets: outputs.argmax(1) == targets}


def plain(data):
    model.eval()
    parts = []
    for begin in range(0, len(data), 32):
        outputs = model(data.inputs[begin : begin + 32])
        truth = data.targets[begin : begin + 32]
        values = [of(outputs, truth).detach().double() for of in metrics.values()]
        parts += torch.stack(values, 1).tolist()
    model.train()
    return {name: math.fsum(p[i] for p in parts) / len(parts) for i, name in enumerate(metrics)}


@hvd.run
def train(state):
    for epoch in hvd.epochs(10**6):
        for inputs, targets in loader:
            optimizer.zero_grad()
            losses(model(inputs), targets).mean().backward()
            optimizer.step()
        before = [buffer.clone() for buffer in model.buffers()]
        evaluate(epoch)
        assert all(map(torch.equal, before, model.buffers())) and model[2].training
        enough = torch.tensor([float((folder / "enough").exists())])
        if hvd.allreduce(enough, "enough", average=False) > 0:
            return


train(hvd.State(model=model, optimizer=optimizer))
"""
TENSORFLOW_DATA = """
import keras, numpy as np, tensorflow as tf
import hvd_elastic.FRONTEND as hvd

hvd.init()
keras.utils.set_random_seed(0)
inputs = np.random.default_rng(0).standard_normal((210, 6)).astype(np.float32)
targets = (inputs.sum(1) > 0).astype(np.int32)
sets = {"all": Watched(inputs[80:], targets[80:]), "two": Watched(inputs[80:82], targets[80:82])}
layers = keras.layers
model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(),
                          layers.Dropout(0.5), layers.Dense(2, activation="softmax")])
losses = keras.losses.sparse_categorical_crossentropy
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
dataset = hvd.dataset((inputs[:80], targets[:80]), 20, shuffle=True)
metrics = {"loss": losses, "right": lambda targets, outputs: np.argmax(outputs, 1) == targets}


def plain(data):
    parts = []
    for begin in range(0, len(data), 32):
        outputs = model.predict_on_batch(data.inputs[begin : begin + 32])
        truth = data.targets[begin : begin + 32]
        values = [np.asarray(of(truth, outputs), np.float64) for of in metrics.values()]
        parts += np.stack(values, 1).tolist()
    return {name: math.fsum(p[i] for p in parts) / len(parts) for i, name in enumerate(metrics)}


def is_enough():
    enough = np.array([float((folder / "enough").exists())])
    return hvd.allreduce(enough, "enough", average=False) > 0

"""
LOOP = """
@tf.function(reduce_retracing=True)
def train_step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(losses(targets, model(inputs, training=True)))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


@hvd.run
def train(state):
    for epoch in hvd.epochs(10**6):
        for inputs, targets in dataset:
            train_step(inputs, targets)
        evaluate(epoch)
        if is_enough():
            return


train(hvd.State(model=model, optimizer=optimizer))
"""
FIT = """
def at_end_of_epoch():
    return {**evaluate(0), "enough": float(is_enough()[0])}


class Ending(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        assert {"val_loss", "val_right"} <= logs.keys()
        if logs["enough"]:
            self.model.stop_training = True


model.compile(optimizer, losses)
callbacks = [hvd.ElasticCallback(evaluate=at_end_of_epoch), Ending()]
model.fit(dataset, epochs=10**6, callbacks=callbacks, verbose=0)
"""
SCRIPTS = {
    "torch": COMMON + TORCH,
    "loop": COMMON + TENSORFLOW_DATA.replace("FRONTEND", "tensorflow") + LOOP,
    "fit": COMMON + TENSORFLOW_DATA.replace("FRONTEND", "keras") + FIT,
}


def said(job: RunningJob) -> list[dict[str, Any]]:
    path = job.folder / "said"
    # The last line may be incomplete while rank 0 appends to it.
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


@EVERY_STYLE
def test_evaluation_is_that_of_one_process_though_a_rank_is_killed_in_it(
    stage: Stage, start_job: StartJob, style: str
) -> None:
    first, second, third, _ = stage.hosts
    script = stage.folder / f"evaluating-{style}.py"
    script.write_text(SCRIPTS[style])
    hosts = {first: 1, second: 1, third: 1}
    job = start_job(hosts, script=[sys.executable, str(script), "FOLDER"])
    job.wait_size(3)
    before = len(said(job))
    job.wait_for(lambda: len(said(job)) >= before + 4, "two epochs are evaluated")

    (job.folder / "slow").touch()
    victim = job.wait_for(lambda: (job.folder / "evaluating-1").exists() and job.workers(second),
                          "rank 1 evaluates")  # fmt: skip
    before = len(said(job))
    job.use({first: 1, third: 1})
    victim[0].kill()
    (job.folder / "slow").unlink()
    job.wait_for(lambda: len(said(job)) >= before + 4 and said(job)[-1]["size"] == 2, "two ranks")
    (job.folder / "enough").touch()
    assert job.wait() == 0, job.story()

    every = said(job)
    assert {each["size"] for each in every} >= {2, 3}
    assert {each["set"] for each in every} == {"all", "two"}
    for each in every:
        assert each["evaluated"] == each["plain"], "to the last bit"
    assert every[-2]["evaluated"]["right"] > 0.6, "the model has learned something"
