"""``hvd-elastic predict``: each input once and in order, whoever joins, dies, or interrupts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.dist.running import Stage
from tests.paths import COSTLY, LIMIT_S, LITTLE_WORK, NEEDS_TENSORFLOW, WORKER_PYTHONPATH
from tests.waiting import until

pytestmark = pytest.mark.dist
EXAMPLES = 10_000
FEATURES = 5
STYLES = pytest.mark.parametrize(
    "style",
    ["torch", pytest.param("loop", marks=[NEEDS_TENSORFLOW, COSTLY])],
    indirect=True,
    scope="module",
)

# The outputs name the example, so a missing, doubled or displaced one is seen.
TORCH = """\
import sys, time
from pathlib import Path
import numpy as np, torch
import hvd_elastic.torch as hvd

folder = Path(sys.argv[1])
hvd.init()
torch.manual_seed(1)  # not the weights of the checkpoint
model = torch.nn.Linear(5, 3)


def forward(batch):
    (folder / f"rank-{hvd.rank()}").touch()
    time.sleep(0.2 * (folder / "slow").exists())
    while (folder / "wait").exists():
        time.sleep(0.02)
    time.sleep(0.02)
    inputs, index = batch
    return {"logits": model(inputs), "index": index}


def load(data):
    inputs = torch.from_numpy(np.load(Path(data, "inputs.npy")))
    return torch.utils.data.TensorDataset(inputs, torch.arange(len(inputs)))


hvd.predict(model, load, forward=forward, batch_size=100)
"""
TENSORFLOW = """\
import sys, time
from pathlib import Path
import keras, numpy as np, tensorflow as tf
import hvd_elastic.tensorflow as hvd

folder = Path(sys.argv[1])
hvd.init()
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])


def forward(batch):
    (folder / f"rank-{hvd.rank()}").touch()
    time.sleep(0.2 * (folder / "slow").exists())
    while (folder / "wait").exists():
        time.sleep(0.02)
    inputs, index = batch
    return {"logits": model(inputs), "index": index}


def load(data):
    inputs = np.load(Path(data, "inputs.npy"))
    return inputs, np.arange(len(inputs))


hvd.predict(model, load, forward=forward, batch_size=100)
"""


class Predicting:
    """``hvd-elastic predict`` beside the test."""

    def __init__(self, stage: Stage, folder: Path, script: str) -> None:
        self.stage, self.folder = stage, folder
        self.hostfile, self.out = folder / "hosts", folder / "out"
        self.inputs = np.random.default_rng(0).standard_normal((EXAMPLES, FEATURES), np.float32)
        np.save(folder / "inputs.npy", self.inputs)
        (folder / "predict.py").write_text(script)
        self.started: list[subprocess.Popen[bytes]] = []

    def use(self, *hosts: str) -> None:
        new = self.hostfile.with_suffix(".new")
        new.write_text("".join(f"{host} slots=1\n" for host in hosts))
        new.replace(self.hostfile)

    def start(self, weights: Path, *more: str) -> subprocess.Popen[bytes]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HVD_", "HOROVOD_"))}
        kept |= {"HVD_ELASTIC_HOME": str(self.folder / "home"), "PYTHONPATH": WORKER_PYTHONPATH}
        words = ("predict", "--checkpoint", weights, "--data", self.folder, "--out", self.out)
        where = ("-H", self.hostfile, "-F", self.stage.cluster.ssh_config, *more, "--")
        script = (sys.executable, self.folder / "predict.py", self.folder)
        program = [sys.executable, "-m", "hvd_elastic.cli.app", *words, *where, *script]
        with (self.folder / "output").open("ab") as output:
            process = subprocess.Popen(
                list(map(str, program)),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=kept | LITTLE_WORK,
                cwd=self.folder,
            )
        self.started.append(process)
        return process

    def said(self) -> str:
        return (self.folder / "output").read_text()

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        return until(condition, what, process=self.started[-1], said=self.said)

    def files(self) -> int:
        return len(list(self.folder.glob("home/runs/*/saved/outputs-*")))

    def worker(self, host: str) -> psutil.Process:
        """The worker on a host, which leads its session."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                own = process.environ()
                of_this = str(self.folder) in process.cmdline() and "HVD_ELASTIC_WORKER" in own
                if of_this and own["HVD_ELASTIC_HOST"] == host:
                    if os.getsid(process.pid) == process.pid:
                        return process
        raise AssertionError(f"no worker on {host}: {self.said()}")

    def check(self, weight: np.ndarray, bias: np.ndarray) -> None:
        index = json.loads((self.out / "index.json").read_text())
        assert index["examples"] == EXAMPLES
        names = [each["name"] for each in index["files"]]
        assert names == sorted(path.name for path in self.out.glob("outputs-*"))
        parts = [np.load(self.out / name) for name in names]
        order = np.concatenate([part["index"] for part in parts])
        assert np.array_equal(order, np.arange(EXAMPLES)), "each once, in order"
        logits = np.concatenate([part["logits"] for part in parts])
        np.testing.assert_allclose(logits, self.inputs @ weight + bias, rtol=1e-4, atol=1e-5)


@pytest.fixture
def predicting(stage: Stage, style: str, tmp_path: Path) -> Iterator[Predicting]:
    stage.boot_all()
    folder = stage.folder / f"predicting-{style}-{os.getpid()}"
    folder.mkdir()
    made = Predicting(stage, folder, TORCH if style == "torch" else TENSORFLOW)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.wait()


def write_weights(style: str, folder: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """Weights, and the file that holds them."""
    if style == "torch":
        import torch

        layer = torch.nn.Linear(FEATURES, 3)
        torch.save({"model": layer.state_dict()}, folder / "best.pt")
        weight, bias = (each.detach().numpy() for each in (layer.weight.T, layer.bias))
        return folder / "best.pt", weight, bias
    program = (
        "import sys, keras, numpy as np; keras.utils.set_random_seed(5);"
        "m = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)]);"
        "m.save(sys.argv[1] + '/best.keras'); np.savez(sys.argv[1] + '/w.npz', *m.get_weights())"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, capture_output=True)
    found = np.load(folder / "w.npz")
    return folder / "best.keras", found["arr_0"], found["arr_1"]


@STYLES
def test_prediction_with_a_join_a_kill_and_an_interruption(
    predicting: Predicting, style: str
) -> None:
    first, second, third, _ = predicting.stage.hosts
    folder = predicting.folder
    weights, weight, bias = write_weights(style, folder)

    (folder / "slow").touch()  # else a busy machine interrupts and kills what is done already
    predicting.use(first)
    leader = predicting.start(weights)
    predicting.wait_for(lambda: predicting.files() >= 5, "some outputs")
    leader.send_signal(signal.SIGINT)
    assert leader.wait(LIMIT_S) == 130, predicting.said()
    found = len(list(predicting.out.glob("outputs-*")))
    assert 5 <= found < 90
    assert "give the same command again" in predicting.said()

    predicting.use(first, second)
    leader = predicting.start(weights)
    predicting.wait_for(lambda: predicting.files() >= 5, "more outputs")
    (folder / "wait").touch()
    predicting.use(first, second, third)
    events = max((folder / "home" / "runs").iterdir()) / "events.jsonl"
    predicting.wait_for(lambda: events.read_text().count("worker_standby") >= 3, "a third worker")
    (folder / "wait").unlink()
    predicting.wait_for((folder / "rank-2").exists, "three ranks")
    (folder / "wait").touch()
    predicting.worker(second).kill()
    for held in ("wait", "slow"):
        (folder / held).unlink()
    assert leader.wait(LIMIT_S) == 0, predicting.said()
    told = events.read_text()
    assert "was killed by signal 9" in told
    predicting.check(weight, bias)

    again = predicting.start(weights)
    assert again.wait(LIMIT_S) == 0
    assert f"all {EXAMPLES} outputs are there already" in predicting.said()
