"""Scripts in the styles that users write end with the same state, whatever happens to their ranks.

``styles/elastic`` has a script in each style, and ``styles/plain`` those of PyTorch as they are for
one process without our library. A style is run alone, and then on two ranks, one of which is
killed, while a third one joins. The last checkpoints of both runs hold the whole state: models,
optimizers, schedulers, EMA, counters.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_elastic.checkpoint.header import TensorInfo, decode_values
from hvd_elastic.checkpoint.manifests import newest_valid
from hvd_elastic.checkpoint.reader import load_file, open_checkpoint
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import read_records
from tests.dist.jobs import Job, environment
from tests.paths import ALL, COSTLY, LIMIT_S, NEEDS_TENSORFLOW, ROOT

pytestmark = pytest.mark.dist

STYLES = ROOT / "tests/dist/styles/elastic"
DISTURBED = ROOT / "tests/dist/scripts/disturbed.py"
SEED = int(os.environ.get("HVD_ELASTIC_TEST_KILL_SEED", "0"))
ALWAYS = ("accumulation", "gan", "keras_fit")
TENSORFLOW = (
    *("keras_adaptive", "keras_fit", "keras_rates"),
    *("tensorflow_adaptive", "tensorflow_loop", "tensorflow_rates"),
)
WITHIN_EPOCH = ("n_steps",)
"""Styles whose training ends within a pass over the data."""
TOLERANCE = 1e-8
SIZES = (2, 3)


EVERY = [
    pytest.param(
        path.stem,
        marks=[
            *([] if path.stem in ALWAYS else [COSTLY]),
            *([NEEDS_TENSORFLOW] if path.stem in TENSORFLOW else []),
        ],
    )
    for path in sorted(STYLES.glob("*.py"))
]


def plan_of(name: str, folder: Path, **more: Any) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps({"folder": str(folder), **more}), encoding="utf-8")
    return path


def variables(name: str) -> dict[str, str]:
    # A compiled model needs the compiler that the workers of tests start without.
    return {"PYTHONPATH": str(ROOT)} if name == "compiled" else {}


def alone(name: str, script: Path, folder: Path) -> dict[str, Any]:
    """Train in one process, and return the state at the end."""
    folder.mkdir()
    own = {"HVD_ELASTIC_RUN_FOLDER": str(folder / "run"), **variables(name)}
    done = subprocess.run(
        [sys.executable, DISTURBED, plan_of(name, folder), script],
        env=environment(folder, HVD_ELASTIC_CHECKPOINT_EVERY="1000", **own),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return final_state(folder / "run")


def together(name: str, script: Path, folder: Path, **disturbance: Any) -> dict[str, Any]:
    """Train on two ranks and return the state at the end; check examples, ranks and the plan."""
    folder.mkdir()
    hosts = folder / "hosts"
    hosts.write_text(f"localhost slots={SIZES[0]}\n", encoding="utf-8")
    joining = {"hostfile": str(hosts), "hosts": f"localhost slots={SIZES[1]}\n", "size": SIZES[1]}
    plan = plan_of(name, folder, **(joining | disturbance if disturbance else {}))
    with Job(
        *("--hostfile", hosts, "--min-np", "1", "--audit"),
        *("--", sys.executable, DISTURBED, plan, script),
        home=folder,
        env=variables(name),
    ) as job:
        assert job.wait() == 0, f"{disturbance}\n{job.text}"
    died = folder / "died"
    where = died.read_text() if died.exists() else "nobody died"
    assert died.exists() == ("die" in disturbance), f"{disturbance}: {where}"
    records = read_records(job.folder / "audit.jsonl")
    audit = check_audit(records, finished=name not in WITHIN_EPOCH)
    assert audit.ok, f"{where}: {audit.problems()}"
    ends = [json.loads(line) for line in (folder / "ends.jsonl").read_text().splitlines()]
    assert len({end["digest"] for end in ends}) == 1, f"{where}: ranks differ: {ends}"
    if disturbance:
        slots = {event["local_rank"] for event in job.events("worker_joined")}
        assert slots == set(range(SIZES[1])), f"{where}: no third worker joined: {slots}"
    return {**final_state(job.folder), "where": where}


def final_state(run: Path) -> dict[str, Any]:
    newest = newest_valid(run / "checkpoints")
    assert newest is not None
    saved = {
        path.name: torch.load(path, weights_only=True) for path in (run / "saved").glob("*.pt")
    }
    saved |= {path.name: load_file(path, empty_tensor) for path in (run / "saved").glob("epoch-*")}
    return {**load_tensors(newest.path), "saved": saved}


def empty_tensor(info: TensorInfo) -> tuple[torch.Tensor, np.ndarray]:
    array = np.empty(info.shape, info.array_dtype)
    return torch.from_numpy(array), array.reshape(-1).view(np.uint8)


def load_tensors(path: Path) -> dict[str, Any]:
    """The content of a checkpoint of any framework, with tensors of PyTorch."""
    with open_checkpoint(path) as reader:
        header = reader.read_header()
        if header.frontend == "torch":
            from hvd_elastic.torch.checkpoint import load_checkpoint

            return load_checkpoint(path)
        tensors: dict[str, Any] = {}

        def place(info: TensorInfo) -> Any:
            tensors[info.name], memory = empty_tensor(info)
            return memory

        reader.read_tensors(header, place)
    return {**decode_values(header.values, tensors, ()), "progress": header.progress}


def differences(here: Any, there: Any, exact: bool, place: str = "") -> Iterator[str]:
    """Describe where two states differ; real numbers count only if all shall be ``exact``."""
    if isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor):
        if here.shape != there.shape or here.dtype != there.dtype:
            yield f"{place}: {here.dtype} {here.shape} and {there.dtype} {there.shape}"
        elif exact or not here.is_floating_point():
            far = (here.double() - there.double()).abs().max().item() if here.numel() else 0.0
            if not far <= TOLERANCE:
                yield f"{place}: differs by {far:.1e}"
    elif isinstance(here, dict) and isinstance(there, dict) and here.keys() == there.keys():
        for key in here:
            yield from differences(here[key], there[key], exact, f"{place}.{key}")
    elif isinstance(here, list | tuple) and isinstance(there, type(here)):
        if len(here) != len(there):
            yield f"{place}: {len(here)} and {len(there)} values"
        for number, pair in enumerate(zip(here, there, strict=False)):
            yield from differences(*pair, exact, f"{place}[{number}]")
    elif isinstance(here, float) and isinstance(there, float):
        if abs(here - there) > TOLERANCE:
            yield f"{place}: {here} and {there}"
    elif here != there:
        yield f"{place}: {here!r} and {there!r}"


def check_same(state: dict[str, Any], reference: dict[str, Any], exact: bool = True) -> None:
    """Compare all but the library's own objects, whose sums lose what a dead rank had added, and
    the description of the data set, which has examples only of runs with a leader.
    """
    parts = []
    for each in (state, reference):
        objects = {key: v for key, v in each["objects"].items() if not key.startswith("_")}
        progress = {**each["progress"], "data": ""}
        parts.append({**each, "objects": objects, "progress": progress, "where": None})
    found = [*differences(parts[0], parts[1], exact)]
    assert not found, f"{state.get('where')}:\n" + "\n".join(found[:20])


def disturbance(name: str) -> dict[str, Any]:
    """A step after which a worker joins, and the place from which on another one may die."""
    dice = random.Random(f"{name} {SEED}")
    die = {"rank": dice.randrange(2), "step": dice.randrange(1, 10), "seed": dice.random()}
    return {"join": dice.randrange(2, 9), "die": {**die, "everywhere": dice.random() < 0.5}}


@pytest.mark.parametrize("name", EVERY)
def test_a_join_and_a_kill_change_nothing(name: str, tmp_path: Path) -> None:
    script = STYLES / f"{name}.py"
    reference = alone(name, script, tmp_path / "alone")
    check_same(together(name, script, tmp_path / "disturbed", **disturbance(name)), reference)
    if ALL:
        check_same(together(name, script, tmp_path / "two"), reference)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("keras_rates", marks=NEEDS_TENSORFLOW),
        pytest.param("plateau", marks=COSTLY),
        pytest.param("tensorflow_rates", marks=[COSTLY, NEEDS_TENSORFLOW]),
    ],
)
def test_what_comes_between_epochs_counts_once_if_a_rank_dies(name: str, tmp_path: Path) -> None:
    """The survivor has changed the rate already when a worker joins that has not."""
    script = STYLES / f"{name}.py"
    reference = alone(name, script, tmp_path / "alone")
    dying = {"die": {"rank": 1, "epoch": 2}}
    check_same(together(name, script, tmp_path / "disturbed", **dying), reference)


@COSTLY
@NEEDS_TENSORFLOW
def test_what_rank_0_has_not_saved_when_it_dies_is_saved_by_the_next(tmp_path: Path) -> None:
    """The callbacks of the survivor have ended the epoch already."""
    script = STYLES / "keras_rates.py"
    reference = alone("keras_rates", script, tmp_path / "alone")
    assert sorted(reference["saved"]) == [f"epoch-{epoch}" for epoch in range(5)]
    dying = {"join": 1, "die": {"rank": 0, "save": "epoch-2"}}
    check_same(together("keras_rates", script, tmp_path / "disturbed", **dying), reference)


@COSTLY
def test_examples_and_rates_are_the_same_in_low_precision(tmp_path: Path) -> None:
    text = (STYLES / "transformer.py").read_text()
    script = tmp_path / "transformer.py"
    script.write_text(text.replace("dtype(torch.float64)", "dtype(torch.float32)"))
    assert script.read_text() != text
    reference = alone("transformer", script, tmp_path / "alone")
    found = together("transformer", script, tmp_path / "disturbed", **disturbance("low precision"))
    check_same(found, reference, exact=False)
