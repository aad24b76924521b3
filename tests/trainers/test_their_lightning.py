"""Lightning's own examples, elastic by an argument, end as they do on one rank without it.

They are of a checkout of Lightning-AI/pytorch-lightning, which the variable LIGHTNING_CHECKOUT
names, and need torchvision and jsonargparse. The pictures are random ones in place of MNIST.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.conftest import StartJob
from tests.dist.running import Stage
from tests.trainers.outcomes import SCRIPTS, WAIT_S, differences

pytest.importorskip("lightning", reason="Lightning is not installed: make test-trainers")
pytestmark = pytest.mark.dist

CHECKOUT = os.environ.get("LIGHTNING_CHECKOUT", "")
OPTIONS = {
    "trainer.max_epochs": 2,
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
    "data.batch_size": 1000,
}
STRATEGY = "--trainer.strategy.class_path=hvd_elastic.lightning.ElasticStrategy"


def write_pictures(folder: Path) -> None:
    import torch

    random = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True)
    for name, number in (("training", 60_000), ("test", 500)):
        pictures = torch.randint(0, 16, (number, 28, 28), dtype=torch.uint8, generator=random)
        labels = torch.randint(0, 10, (number,), generator=random)
        torch.save((pictures, labels), folder / f"{name}.pt")


def outcome(folder: Path) -> dict[str, Any]:
    import torch

    (path,) = folder.glob("lightning_logs/version_*/checkpoints/*.ckpt")
    saved = torch.load(path, weights_only=False)
    weights = {name: each.tolist() for name, each in saved["state_dict"].items()}
    assert len([*folder.glob("lightning_logs/version_*/config.yaml")]) == 1, "of rank 0 alone"
    return {"weights": weights, "step": saved["global_step"], "epoch": saved["epoch"]}


@pytest.mark.parametrize("name", ["backbone_image_classifier", "autoencoder"])
def test_an_example_of_theirs_with_one_more_argument(
    stage: Stage, start_job: StartJob, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if not CHECKOUT:
        pytest.skip("LIGHTNING_CHECKOUT names no checkout of Lightning-AI/pytorch-lightning")
    for needed in ("jsonargparse", "torchvision"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    folder = stage.folder / f"{name}-{os.getpid()}"
    script = folder / "examples" / "pytorch" / "basics" / f"{name}.py"
    script.parent.mkdir(parents=True)
    shutil.copy(Path(CHECKOUT, *script.relative_to(folder).parts), script)
    write_pictures(folder / "examples" / "Datasets" / "MNIST" / "complete")
    kills = [["after the step", 0, 1], ["validation", 1, 0]]
    monkeypatch.setenv("KILLS", json.dumps(kills))
    monkeypatch.setenv("PL_USE_MOCKED_MNIST", "1")
    words = [f"--{key}={value}" for key, value in OPTIONS.items()]
    for each in ("ours", "theirs"):
        (folder / each).mkdir()
    root = f"--trainer.default_root_dir={folder / 'ours'}"
    command = [sys.executable, str(SCRIPTS / "lightning_faults.py"), "FOLDER", str(script)]
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, "--np", "2", script=[*command, *words, root, STRATEGY])
    assert job.wait(WAIT_S) == 0, job.story()
    assert len([*job.folder.glob("killed-*")]) == len(kills), job.story()
    assert job.check_audit(finished=True).complete_epochs == 2
    theirs = [sys.executable, str(script), *words]
    kept = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(theirs, cwd=folder / "theirs", env=kept, check=True)
    found, expected = outcome(folder / "ours"), outcome(folder / "theirs")
    assert differences(found, expected, within=1e-4) == []
