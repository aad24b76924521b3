"""What a script of Hugging Face's Trainer cannot use is one clear error before training."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import utils

pytest.importorskip("transformers", reason="transformers is not installed: make test-trainers")

import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from hvd_elastic.errors import ScriptError
from hvd_elastic.model.lr_rules import Adjustment
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.transformers import Trainer, elastic, library
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode

pytestmark = pytest.mark.filterwarnings("ignore")

DATA = [{"input_ids": torch.arange(4), "labels": torch.arange(4)} for _ in range(12)]


class Stream(utils.data.IterableDataset[Any]):
    def __iter__(self):
        return iter(DATA)


class Loop(transformers.Trainer):
    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        return None


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return utils.data.DataLoader(self.train_dataset, batch_size=4)


class OwnBatches(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return utils.data.BatchSampler(utils.data.SequentialSampler(DATA), 4, drop_last=False)


class Skipping(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_epoch_stop = True


def model(**attributes: Any) -> Any:
    made = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    vars(made).update(attributes)
    return made


def train(
    kind: Any = Trainer, checkpoint: Any = None, given: dict[str, Any] | None = None, **options: Any
) -> Any:
    arguments = {"output_dir": "out", "use_cpu": True, "report_to": [], "save_strategy": "no"}
    args = TrainingArguments(**(arguments | {"num_train_epochs": 1} | options))
    trainer = kind(**({"model": model(), "args": args, "train_dataset": DATA} | (given or {})))
    trainer.train(checkpoint)
    return trainer


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Context:
    made = Context(Mode.ALONE, TorchFrontend())
    monkeypatch.setattr(context, "_context", made)
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "FSDP_CPU_RAM_EFFICIENT_LOADING"):  # set meanwhile
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return made


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "fsdp": (lambda: {"fsdp": "full_shard"}, r"fsdp=.*each rank has the whole model"),
    "batch finder": (
        lambda: {"auto_find_batch_size": True},
        r"auto_find_batch_size=True\): .*max_batch_size=1024",
    ),
    "hub": (
        lambda: {"push_to_hub": True, "hub_model_id": "a/b"},
        r"push_to_hub=True\): .*after trainer\.train\(\)",
    ),
    "jit": (lambda: {"enable_jit_checkpoint": True}, r"enable_jit_checkpoint=True\): a host"),
    "stream": (
        lambda: {"given": {"train_dataset": Stream(), "max_batch_size": 16}, "max_steps": 2},
        "a Stream, a stream, and max_batch_size is given",
    ),
    "devices": (
        lambda: {"given": {"model": model(hf_device_map={"a": 0, "b": "cpu"})}},
        r'several devices \(0, cpu\), as device_map="auto" puts it',
    ),
    "foreign folder": (
        lambda: {"checkpoint": "elsewhere/checkpoint-5"},
        r"resume_from_checkpoint='elsewhere/checkpoint-5'\): .*run --resume",
    ),
    "adaptive": (
        lambda: {"given": {"max_batch_size": 16}, "gradient_accumulation_steps": 2},
        "the batch adapts, and the number of passes of a step with it",
    ),
    "sampler": (
        lambda: {"kind": OwnBatches},
        r"is a BatchSampler, .* random, sequential or group_by_length",
    ),
    "as_on": (lambda: {"given": {"as_on": 0}}, r"Trainer\(as_on=0\): it must be"),
    "loader": (
        lambda: {"kind": OwnLoader},
        r"OwnLoader\.get_train_dataloader is a loader of its own, .*_get_train_sampler\(\)",
    ),
    "rest of the epoch": (
        lambda: {"given": {"callbacks": [Skipping]}},
        "has set control.should_epoch_stop",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_explained(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(ScriptError, match=message):
        train(**make())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Loop, r"elastic\(Loop\): Loop\._inner_training_loop is a training loop of its own"),
        (dict, r"elastic\(dict\): give a subclass of transformers\.Trainer"),
    ],
)
def test_classes_that_cannot_be_elastic_are_explained(kind: Any, message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        elastic(kind)


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "Distillation"])
def test_trainers_that_generate_are_explained(name: str) -> None:
    trl = pytest.importorskip("trl")
    kind = getattr(trl, f"{name}Trainer", None) or pytest.skip("this TRL has none")
    with pytest.raises(ScriptError, match=rf"elastic\({name}Trainer\): it generates the exam"):
        elastic(kind)


def test_an_unreachable_hub_is_explained_at_the_first_try(caplog: pytest.LogCaptureFixture) -> None:
    http = importlib.import_module("huggingface_hub.utils._http")
    caplog.set_level("WARNING", http.logger.name)
    with pytest.raises(Exception, match=r"[Cc]onnect"):
        http.http_backoff("HEAD", "http://127.0.0.1:9/a", max_retries=2, base_wait_time=0)
    assert caplog.text.count("set HF_HUB_OFFLINE=1") == 1


def test_a_second_training_is_explained() -> None:
    trainer = train()
    with pytest.raises(ScriptError, match=r"trainer\.train\(\) is called a second time"):
        trainer.train()
    with pytest.raises(ScriptError, match="Start a run for each choice"):
        trainer.hyperparameter_search()


class Scaled(transformers.Trainer):
    """With the scaler that fp16=True makes on a GPU."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu")


def test_a_step_with_a_scaler_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its learning rate follows the rule: here it is 0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = model()
    before = {name: each.clone() for name, each in made.state_dict().items()}
    adaptive = {"model": made, "max_batch_size": 16, "lr_rule": lambda _: Adjustment(0.0)}
    trainer = train(elastic(Scaled), given=adaptive, max_grad_norm=0.0)
    assert trainer.state.global_step == 2
    torch.testing.assert_close(made.state_dict(), before, rtol=0.0, atol=0.0)
    assert trainer.optimizer._optimizer_original_step_method == trainer.inner_optimizer.step


def test_a_checkpoint_of_the_script_is_said_not_to_be_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert train(checkpoint="out/checkpoint-1").state.global_step == 2
    assert "resume_from_checkpoint='out/checkpoint-1') is not used" in caplog.text


def test_another_release_is_refused_with_those_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "version_of", lambda _: "5.3.0")
    with pytest.raises(
        ScriptError, match=r"transformers 5\.3\.0 is installed, .*transformers>=5\.4,<6"
    ):
        library.check_versions()


@pytest.mark.parametrize(("visible", "own"), [(None, "2"), ("7,5,GPU-3", "GPU-3"), ("6,4", "6,4")])
def test_a_worker_sees_the_gpu_of_its_slot_alone(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, own: str
) -> None:
    """In a worker that is forked too, since the script's import line does it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("HVD_ELASTIC_LOCAL_RANK", "2")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert importlib.import_module("hvd_elastic.transformers").Trainer is Trainer
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ScriptError, match="import it at the beginning of the script"):
        library.see_own_gpu()
