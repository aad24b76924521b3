"""Hugging Face's own scripts, elastic by one line, end as they do unchanged on one rank.

``run_clm.py`` and ``run_glue.py`` are of a checkout of huggingface/transformers, which the variable
TRANSFORMERS_CHECKOUT names; ``sft.py`` is a part of TRL.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.conftest import StartJob
from tests.dist.running import Stage
from tests.paths import COSTLY
from tests.trainers.outcomes import SCRIPTS, WAIT_S, differences

pytest.importorskip("transformers", reason="transformers is not installed: make test-trainers")
pytestmark = pytest.mark.dist

CHECKOUT = os.environ.get("TRANSFORMERS_CHECKOUT", "")
IMPORT = "from hvd_elastic.transformers import "
METRIC = """
import datasets
import evaluate
import numpy

class Accuracy(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int32")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": float((numpy.array(predictions) == numpy.array(references)).mean())}
"""
"""As accuracy is on the hub, which no test asks."""
OPTIONS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 3,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_strategy": "epoch",
    "train_sampling_strategy": "sequential",
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
}


def run_clm(folder: Path, model: Path) -> tuple[Path, str, list[str]]:
    data = []
    for name, number in (("train", 160), ("validation", 30)):
        path = folder / f"{name}.txt"
        path.write_text("\n".join(texts(number, number)))
        data += [f"--{name}_file", str(path)]
    script = Path(CHECKOUT, "examples/pytorch/language-modeling/run_clm.py")
    changed = script.read_text().replace("    Trainer,\n", "", 1)
    changed = changed.replace("import transformers\n", f"import transformers\n{IMPORT}Trainer\n", 1)
    more = ["--block_size", "16", "--do_train", "--do_eval", "--model_name_or_path", str(model)]
    return script, changed, [*data, *more]


def run_glue(folder: Path, model: Path) -> tuple[Path, str, list[str]]:
    data = []
    for name, number in (("train", 100), ("validation", 37), ("test", 11)):
        path = folder / f"{name}.csv"
        rows = [f"{text},{len(text) % 3}" for text in texts(number, number)]
        path.write_text("\n".join(["sentence,label", *rows]))
        data += [f"--{name}_file", str(path)]
    script = Path(CHECKOUT, "examples/pytorch/text-classification/run_glue.py")
    changed = script.read_text().replace("    Trainer,\n", "", 1)
    changed = changed.replace("import transformers\n", f"import transformers\n{IMPORT}Trainer\n", 1)
    more = ["--do_train", "--do_eval", "--do_predict", "--pad_to_max_length", "false"]
    # Theirs adds up the losses of BERT's passes, and does not take their mean.
    more += ["--gradient_accumulation_steps", "1"]
    return script, changed, [*data, *more, "--model_name_or_path", str(model)]


def sft(folder: Path, model: Path) -> tuple[Path, str, list[str]]:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("TRL is not installed: make test-trainers")
    data = folder / "data"
    data.mkdir()
    for name, number in (("train", 100), ("test", 23)):
        lines = [json.dumps({"text": text}) for text in texts(number, number)]
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    script = Path(found.origin).parent / "scripts" / "sft.py"
    changed = script.read_text().replace("= SFTTrainer(", "= elastic(SFTTrainer)(", 1)
    changed = changed.replace("import argparse\n", f"import argparse\n{IMPORT}elastic\n", 1)
    more = ["--dataset_name", str(data), "--max_length", "16", "--gradient_checkpointing", "false"]
    return script, changed, [*more, "--bf16", "false", "--model_name_or_path", str(model)]


def texts(number: int, seed: int) -> list[str]:
    rng, words = random.Random(seed), [f"w{number}" for number in range(57)]
    return [" ".join(rng.choices(words, k=rng.randint(3, 11))) for _ in range(number)]


def outcome(folder: Path) -> dict[str, Any]:
    """The weights, the logs, and what the script has written of its results."""
    from safetensors.numpy import load_file

    times = ("_runtime", "_per_second", "_time", "total_flos")
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    logged = json.loads((last / "trainer_state.json").read_text())["log_history"]
    results = {
        path.name: json.loads(path.read_text())
        for path in folder.glob("*_results.json")
        if path.name != "all_results.json"
    }
    of_passes = ("mean_token_accuracy", "entropy")  # see docs/transformers.md
    kept = [
        {k: v for k, v in each.items() if not k.endswith((*times, *of_passes))}
        for each in [*logged, *results.values()]
    ]
    predicted = [path.read_text() for path in folder.glob("predict_results_*.txt")]
    weights = {k: v.tolist() for k, v in load_file(folder / "model.safetensors").items()}
    return {"weights": weights, "logged": kept, "predicted": predicted}


@pytest.mark.parametrize("make", [run_clm, run_glue, pytest.param(sft, marks=COSTLY)])
def test_a_script_of_theirs_with_one_line_changed(
    stage: Stage,
    start_job: StartJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Any,
) -> None:
    if make is not sft:
        if not CHECKOUT:
            pytest.skip("TRANSFORMERS_CHECKOUT names no checkout of huggingface/transformers")
        if importlib.util.find_spec("evaluate") is None:
            pytest.skip("evaluate, which the script needs, is not installed")
    folder = stage.folder / f"{make.__name__}-{os.getpid()}"
    (folder / "accuracy").mkdir(parents=True)
    (folder / "accuracy" / "accuracy.py").write_text(METRIC)
    model = folder / "model"
    small = [sys.executable, str(SCRIPTS / "small_model.py"), str(model), make.__name__]
    subprocess.run(small, check=True)
    script, changed, words = make(folder, model)
    lines = script.read_text().splitlines()
    assert len(set(changed.splitlines()) - set(lines)) <= 2, "more than an import is changed"
    (folder / "script.py").write_text(changed)
    words = [*(f"--{name}={value}" for name, value in OPTIONS.items()), *words]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    kills = [["after the step", 0, 1], ["evaluation", 1, 0]]
    monkeypatch.setenv("KILLS", json.dumps(kills))
    a, b, *_ = stage.hosts
    command = [sys.executable, str(SCRIPTS / "with_faults.py"), "FOLDER"]
    command += [str(folder / "script.py"), *words, "--output_dir", str(folder / "ours")]
    job = start_job({a: 1, b: 1}, "--np", "2", script=command)
    assert job.wait(WAIT_S) == 0, job.story()
    assert len([*job.folder.glob("killed-*")]) == len(kills), job.story()
    assert job.check_audit(finished=True).complete_epochs == 3
    theirs = [sys.executable, str(script), *words, "--output_dir", str(folder / "theirs")]
    subprocess.run(theirs, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    assert differences(outcome(folder / "ours"), outcome(folder / "theirs"), within=3e-5) == []
