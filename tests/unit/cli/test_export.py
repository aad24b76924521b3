"""``hvd-elastic export``: its files are read without this package, and hold the run's weights."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.config import runs_folder
from hvd_elastic.records.run_folder import RunFolder
from tests.paths import COSTLY, NEEDS_TENSORFLOW, WORKER_PYTHONPATH
from tests.unit.cli.test_runs import Call, _home, call

pytest.importorskip("torch")
import os

import torch

__all__ = ["_home", "call"]

TORCH = """\
import torch
import hvd_elastic.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
model[2].bfloat16()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@hvd.run
def train(state):
    hvd.save("best.pt", {"model": model.state_dict()})


train(hvd.State(model=model, optimizer=optimizer))
torch.save(model.state_dict(), "live.pt")
"""
KERAS = """\
import keras


def make_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
"""
TENSORFLOW = """\
import keras, numpy as np
import hvd_elastic.tensorflow as hvd
from network import make_model

hvd.init()
keras.utils.set_random_seed(0)
model = make_model()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


@hvd.run
def train(state):
    pass


train(hvd.State(model=model, optimizer=optimizer))
np.savez("live.npz", *model.get_weights())
"""


def train(script: str, folder: Path) -> None:
    """Run a script alone that keeps its checkpoint as run ``net-1``."""
    run = RunFolder.create("net-1")
    own = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    own |= {"HVD_ELASTIC_RUN_FOLDER": str(run.path), "HVD_ELASTIC_CHECKPOINT_EVERY": "3600"}
    own["PYTHONPATH"] = f"{folder}:{WORKER_PYTHONPATH}"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def trained_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which run net-1 of PyTorch was trained, with our home."""
    folder = tmp_path_factory.mktemp("net-1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_ELASTIC_HOME", str(folder / "home"))
        train(TORCH, folder)
    return folder


@pytest.fixture
def trained(
    trained_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """Have run net-1; what its model held in the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(trained_in / "home"))
    live: dict[str, torch.Tensor] = torch.load(trained_in / "live.pt", weights_only=True)
    return live


def check_torch(call: Call, live: dict[str, torch.Tensor], source: str) -> None:
    done = call("export", source, "--to", "torch", "--out", "w.pt")
    assert done.status == 0, done.err
    found = torch.load("w.pt", weights_only=True)
    assert list(found) == list(live)
    assert all(torch.equal(found[key], live[key]) for key in live)

    assert call("export", source, "--to", "safetensors", "--out", "w.safetensors").status == 0
    data = Path("w.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for key, tensor in live.items():
        begin, end = (8 + length + at for at in header[key]["data_offsets"])
        own = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[begin:end] == own, key
        assert header[key]["shape"] == list(tensor.shape)
    assert header["2.weight"]["dtype"] == "BF16"
    if importlib.util.find_spec("safetensors") is not None:
        read = importlib.import_module("safetensors.torch").load_file("w.safetensors")
        assert all(torch.equal(read[key], live[key]) for key in live)


def test_weights_of_a_run_and_of_a_saved_file(call: Call, trained: dict[str, torch.Tensor]) -> None:
    check_torch(call, trained, "net-1")
    check_torch(call, trained, str(runs_folder() / "net-1" / "saved" / "best.pt"))
    done = call("export", "net-1", "--to", "safetensors", "--json")
    told = json.loads(done.out)
    assert (told["path"], told["tensors"]) == ("net-1.safetensors", len(trained))


def test_targets_that_cannot_hold_the_model_are_refused(
    call: Call, trained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    Path("network.py").write_text(KERAS)
    for words, status, said in (
        (("--to", "onnx"), 2, "--to onnx: it is one of safetensors, torch, keras"),
        (("--to", "keras"), 2, "say which function makes it"),
        (("--to", "torch", "--model", "a:b"), 2, "--model is of --to keras"),
        (("--to", "keras", "--model", "network:make_model"), 1, "use --to torch"),
        (("--to", "torch", "--name", "ema"), 1, "holds no 'ema'; it holds model, optimizer"),
        (("--to", "torch", "--out", str(tmp_path)), 2, "is a folder"),
        (("--to", "torch", "--out", "none/w.pt"), 1, "cannot be written"),
    ):
        done = call("export", "net-1", *words)
        assert (done.status, said in done.err) == (status, True), done.err
    assert sorted(p.name for p in tmp_path.glob("*.[pks]*")) == ["network.py"]


@NEEDS_TENSORFLOW
@COSTLY
def test_a_model_of_keras(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("network.py").write_text(KERAS)
    train(TENSORFLOW, tmp_path)
    assert "use --to keras" in call("export", "net-1", "--to", "torch").err
    assert call("export", "net-1", "--to", "safetensors").status == 0
    command = [sys.executable, "-m", "hvd_elastic.cli.app", "export", "net-1", "--to", "keras"]
    own = {**os.environ, "PYTHONPATH": WORKER_PYTHONPATH}
    subprocess.run([*command, "--model", "network:make_model"], check=True, env=own)
    program = (
        "import keras, numpy as np; m = keras.saving.load_model('net-1.keras');"
        "live = np.load('live.npz'); found = m.get_weights();"
        "assert all((a == live[f'arr_{i}']).all() for i, a in enumerate(found)) and len(found) == 4"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
