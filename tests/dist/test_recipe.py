"""The recipe for ImageNet, by its shell scripts, on drawn pictures of ten classes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.running import END_S, Stage
from tests.paths import COSTLY, LITTLE_WORK, NEEDS_TENSORFLOW, ROOT, WORKER_PYTHONPATH
from tests.waiting import until

pytestmark = pytest.mark.dist
SMALL = ("--depth", "18", "--width", "16", "--image-size", "32", "--workers", "0")
_ACCURACY = re.compile(r"top-1 accuracy ([\d.]+), top-5 ([\d.]+), loss ([\d.]+) on 80 pictures")


class Recipe:
    """The shell scripts on virtual hosts."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage, self.folder = stage, folder
        self.hostfile = folder / "hosts"
        self.output = folder / "output"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HVD_", "HOROVOD_"))}
        own = {"HVD_ELASTIC_HOME": str(folder / "home"), "PYTHONPATH": WORKER_PYTHONPATH}
        self.environment = {**kept, **LITTLE_WORK, **own, "PYTHON": sys.executable}
        self.environment["HVD_ELASTIC_SSH_CONFIG"] = str(stage.cluster.ssh_config)
        self.pictures = folder / "pictures"

    def use(self, *hosts: str) -> None:
        new = self.hostfile.with_suffix(".new")
        new.write_text("".join(f"{host} slots=1\n" for host in hosts))
        new.replace(self.hostfile)

    def prepare(self, script: str, *words: object) -> None:
        program = [sys.executable, ROOT / "datasets_prep" / script, *words]
        done = subprocess.run(list(map(str, program)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def start(self, script: str, *words: object) -> subprocess.Popen[bytes]:
        with self.output.open("wb") as output:
            return subprocess.Popen(
                [str(ROOT / "scripts" / script), *map(str, words)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self.environment,
            )

    def call(self, script: str, *words: object) -> str:
        status = self.start(script, *words).wait(END_S)
        assert status == 0, self.said()
        return self.said()

    def said(self) -> str:
        return self.output.read_text()

    def events(self, run: str) -> list[dict[str, Any]]:
        path = self.folder / "home" / "runs" / run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for(self, process: Any, condition: Callable[[], Any], what: str) -> None:
        until(condition, what, process=process, said=self.said)


@pytest.fixture
def recipe(stage: Stage) -> Recipe:
    pytest.importorskip("PIL", reason="Pillow draws the pictures")
    stage.boot_all()
    folder = stage.folder / f"recipe-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    made = Recipe(stage, folder)
    made.prepare(
        *("imagenet_layout.py", "--out", made.pictures, "--classes", 10),
        *("--per-class", 40, "--size", 64),
    )
    return made


def test_the_recipe_trains_through_a_join_and_a_kill(recipe: Recipe) -> None:
    first, second, third, _ = recipe.stage.hosts
    recipe.use(first, second)
    process = recipe.start(
        *("train_imagenet.sh", 2, "--run-id", "net", "-H", recipe.hostfile),
        *("--failure-timeout", 600, "--"),
        *("--data", recipe.pictures, *SMALL, "--crop", 0.6, "--epochs", 8, "--batch-size", 32),
        *("--lr", 0.1, "--warmup", 1, "--label-smoothing", 0),
    )

    def reached(epoch: int) -> bool:
        made = [each for each in recipe.events("net") if each["kind"] == "metrics"]
        return bool(made) and made[-1]["epoch"] >= epoch

    def trains_on(size: int) -> bool:
        made = [each for each in recipe.events("net") if each["kind"] == "rescale_finished"]
        return bool(made) and made[-1]["size"] == size

    def stands_by(host: str) -> bool:
        made = [each for each in recipe.events("net") if each["kind"] == "worker_standby"]
        return host in [each["host"] for each in made]

    held: list[int] = []
    try:
        recipe.wait_for(process, lambda: reached(2), "two epochs")
        # They wait for the third one, which may take longer to start than they would train.
        held = [pid for host in (first, second) for pid in _workers(recipe, host)]
        for pid in held:
            os.kill(pid, signal.SIGSTOP)
        recipe.use(first, second, third)
        scale = [sys.executable, "-m", "hvd_elastic.cli.app", "scale", "net", "3"]
        told = lambda: subprocess.run(scale, env=recipe.environment, capture_output=True)  # noqa: E731
        # It is refused until the run has read its hostfile.
        recipe.wait_for(process, lambda: told().returncode == 0, "the new size")
        recipe.wait_for(process, lambda: stands_by(third), "a third one")
        for pid in held:
            os.kill(pid, signal.SIGCONT)
        recipe.wait_for(process, lambda: trains_on(3), "three ranks")
        recipe.wait_for(process, lambda: reached(4), "more epochs")
        (victim,) = _workers(recipe, second)
        os.kill(victim, signal.SIGKILL)
        status, said = process.wait(END_S), recipe.said()
    finally:
        process.kill()
        process.wait()
        for pid in held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert status == 0, said
    assert "was killed by signal 9" in said
    passes = re.findall(r"pass (\d+): loss [\d.]+, top-1 accuracy ([\d.]+)", said)
    assert [int(number) for number, _ in passes] == list(range(8)), said

    # Evaluated by one process from the file of the best model.
    data = ("--", "--data", recipe.pictures, *SMALL, "--batch-size", 32)
    best = recipe.folder / "home" / "runs" / "net" / "saved" / "best.pt"
    of_best = _ACCURACY.search(recipe.call("eval_imagenet.sh", best, *data))
    assert of_best is not None
    assert float(of_best[1]) == max(float(accuracy) for _, accuracy in passes)


@COSTLY
@NEEDS_TENSORFLOW
def test_the_recipe_of_keras_trains_and_evaluates(recipe: Recipe) -> None:
    shards = recipe.folder / "shards"
    recipe.prepare("imagenet.py", "--source", recipe.pictures, "--out", shards, "--processes", 1)
    first, second, *_ = recipe.stage.hosts
    recipe.use(first, second)
    words = ("--framework", "tensorflow", "-H", recipe.hostfile)
    data = ("--", "--data", shards, "--image-size", 32, "--batch-size", 32)
    said = recipe.call(
        *("train_imagenet.sh", 2, "--run-id", "net", *words, *data, "--epochs", 2, "--lr", 0.05)
    )
    passes = re.findall(r"pass \d: loss ([\d.]+), top-1 accuracy ([\d.]+), top-5 ([\d.]+)", said)
    assert len(passes) == 2, said
    assert float(passes[1][0]) < 4
    found = _ACCURACY.search(recipe.call("eval_imagenet.sh", "net", *words, *data))
    assert found is not None
    assert found.groups()[:2] == passes[1][1:]

    # The options for large batches, by one process.
    large = ("--optimizer", "lars", "--lr", 1, "--max-batch-size", 128, "--epochs", 3)
    alone = ("--framework", "tensorflow", "--run-id", "large")
    said = recipe.call("train_imagenet.sh", 1, *alone, *data, *large, "--warmup", 1)
    losses = [float(each) for each in re.findall(r"pass \d: loss ([\d.]+)", said)]
    assert len(losses) >= 2, said
    assert losses[-1] < losses[0]
    batches = [e for e in recipe.events("large") if e["kind"] == "metrics"]
    assert batches[-1]["global_batch_size"] >= 32


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train_imagenet.sh",), "N, the number of workers, comes first"),
        (("train_imagenet.sh", "two"), "N, the number of workers, comes first"),
        (("train_imagenet.sh", "2", "--framework", "jax"), "it is torch or tensorflow"),
        pytest.param(
            *(("train_imagenet.sh", "2", "--", "--data", "none"), "there is no folder train in it"),
            marks=COSTLY,
        ),
        (("eval_imagenet.sh",), "the run, or a file of weights, comes first"),
    ],
)
def test_wrong_usage_of_the_scripts(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    script, *rest = words
    own = {**os.environ, "PYTHON": sys.executable, "HVD_ELASTIC_HOME": str(tmp_path)}
    done = subprocess.run(
        [str(ROOT / "scripts" / script), *rest], capture_output=True, text=True, env=own
    )
    assert done.returncode in (1, 2)
    assert said in done.stdout + done.stderr


def _workers(recipe: Recipe, host: str) -> list[int]:
    """Process ids of the workers on a host, each of which leads its session."""
    found = []
    for pid in recipe.stage.cluster.pids(host):
        try:
            own = Path(f"/proc/{pid}/environ").read_text()
            if "HVD_ELASTIC_WORKER=" in own and os.getsid(pid) == pid:
                if Path(f"/proc/{pid}/comm").read_text().strip() != "hvd-template":
                    found.append(pid)
        except OSError:
            pass
    return found
