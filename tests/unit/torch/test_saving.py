"""hvd.save without a leader, and load_model from everything that holds weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import hvd_elastic.torch as hvd
from hvd_elastic.checkpoint.saved import find_spooled
from hvd_elastic.config import runs_folder
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.torch.checkpoint import TorchContent, load_object
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.debugging.profiling import StepProfile
from hvd_elastic.worker.message_sink import FileSink
from hvd_elastic.worker.progress import Progress
from tests.paths import WORKER_PYTHONPATH
from tests.small_disk import mounted
from tests.unit.checkpoint.written import write_alone
from tests.unit.torch.test_checkpoint import tensors_of


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


class Net(torch.nn.Module):
    """Parameters, a buffer, and tied weights."""

    def __init__(self, width: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(3, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.last = torch.nn.Linear(3, width)
        self.last.weight = self.first.weight


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


def write_checkpoint(folder: Path, step: int = 5, **objects: torch.nn.Module) -> Path:
    """Manifest of a checkpoint with these modules and an optimizer."""
    parameters = [p for module in objects.values() for p in module.parameters()]
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {name: module.state_dict() for name, module in objects.items()}
    nested = {"objects": {**state, "optimizer": optimizer.state_dict()}, "plain": {"steps": step}}
    content = TorchContent(nested, tensors_of(nested))
    content.weights = lambda name: name.startswith(tuple(objects))
    return write_alone(folder, content, Progress(step=step)).path


# ---- save


def test_without_a_leader_files_go_to_the_folder_saved(alone: Context, tmp_path: Path) -> None:
    hvd.save("final.pt", {"a": torch.arange(3)})
    hvd.save("final.pt", {"a": torch.arange(4)})
    assert torch.load(tmp_path / "saved" / "final.pt")["a"].tolist() == [0, 1, 2, 3]
    assert names(tmp_path / "saved") == [".final.pt.json", "final.pt"]


def test_with_a_run_folder_they_go_there_and_are_recorded(alone: Context, tmp_path: Path) -> None:
    alone.worker.sink = FileSink(tmp_path / "run")
    alone.worker.progress.step = 7
    hvd.save("best.pt", Net().state_dict())
    (line,) = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    file = tmp_path / "run" / "saved" / "best.pt"
    assert (event["kind"], event["name"], event["path"]) == ("saved", "best.pt", str(file))
    assert (event["step"], event["bytes"]) == (7, file.stat().st_size)
    assert equal(hvd.load_model(file, Net(seed=1)), Net())


def test_the_spool_keeps_an_earlier_file_until_the_next_one_is_whole(
    alone: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_SPOOL", str(tmp_path))
    monkeypatch.setattr(alone.worker, "link", object())
    monkeypatch.setattr(alone.worker.sink, "send", lambda _: None)

    def spooled() -> list[tuple[str, int]]:
        return sorted((each.name, each.step) for each in find_spooled(tmp_path / "saved"))

    hvd.save("best.pt", {"accuracy": 0.1})
    hvd.save("other.pt", {"accuracy": 0.2})
    alone.worker.progress.step = 7
    with pytest.raises(ScriptError):
        hvd.save("best.pt", {"accuracy": lambda: 0.3})
    assert spooled() == [("best.pt", 0), ("other.pt", 0)]
    hvd.save("best.pt", {"accuracy": 0.3})
    assert spooled() == [("best.pt", 7), ("other.pt", 0)]


def test_other_ranks_write_nothing_and_need_no_object(
    alone: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(type(alone.worker.communicator), "rank", 1)
    hvd.save("best.pt", None)
    assert not (tmp_path / "saved").exists()


def test_the_script_loads_what_it_saved_by_its_name(
    alone: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.save(Net(seed=2).state_dict(), tmp_path / "best.pt")  # of something else
    hvd.save("best.pt", Net(seed=1).state_dict())
    for share in (False, True):
        assert equal(hvd.load_model("best.pt", Net(), share=share), Net(seed=1))
    monkeypatch.setattr(type(alone.worker.communicator), "rank", 1)
    with pytest.raises(ScriptError, match=r"on rank 1: rank 0 has.* share=True"):
        hvd.load_model("best.pt", Net())


def test_a_script_that_opens_what_it_saved_is_told_how_to_load_it(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(alone.worker.sink, "send", told.append)
    alone.worker.saves.names.add("best.pt")
    for name in ("best.pt", "data.pt"):
        alone.worker.script_failed(
            f"FileNotFoundError: [Errno 2] No such file or directory: '{name}'\n"
        )
    hinted = ["hvd.load_model('best.pt', model, share=True)" in each.traceback for each in told]
    assert hinted == [True, False]


@pytest.mark.parametrize(("steps", "kept"), [(7, False), (22, True)])
def test_a_profile_is_kept_or_its_lack_is_told(
    alone: Context, caplog: pytest.LogCaptureFixture, tmp_path: Path, steps: int, kept: bool
) -> None:
    alone.worker.options.profile = 0
    profile = StepProfile(alone.worker)
    for alone.worker.progress.step in range(1, steps + 1):
        profile.step_counted()
    profile.training_ends()
    assert [path.name for path in tmp_path.glob("saved/profile*")] == (
        ["profile-rank0-step22.json.gz"] if kept else []
    )
    assert ["after 7 steps of this rank" in message for message in caplog.messages] == (
        [] if kept else [True]
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["", "../best.pt", "a/b.pt", "x" * 101])
def test_bad_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="not a valid name of a file"):
        hvd.save(name, {})
    assert not (tmp_path / "saved").exists()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("value", [lambda: 1, {"file": sys.stderr}, type("Local", (), {})()])
def test_what_cannot_be_pickled_is_refused_and_the_earlier_file_stays(
    value: Any, tmp_path: Path
) -> None:
    hvd.save("best.pt", {"a": 1})
    with pytest.raises(ScriptError, match=r"hvd.save\('best.pt'\): the .* cannot be saved: .*ckle"):
        hvd.save("best.pt", value)
    assert torch.load(tmp_path / "saved" / "best.pt") == {"a": 1}
    assert names(tmp_path / "saved") == [".best.pt.json", "best.pt"]


@pytest.mark.root
def test_a_full_disk_is_an_error_that_a_script_can_catch(alone: Context, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "64k", lazy=True) as disk:
        alone.worker.sink = FileSink(disk)
        hvd.save("best.pt", {"a": torch.zeros(10)})
        with pytest.raises(CheckpointError, match=r"hvd.save\('best.pt'\) has not .* is full"):
            hvd.save("best.pt", {"a": torch.zeros(100_000)})
        assert torch.load(disk / "saved" / "best.pt")["a"].shape == (10,)
        assert names(disk / "saved") == [".best.pt.json", "best.pt"]


# ---- load_model


@pytest.fixture
def trained() -> Net:
    return Net(seed=3)


@pytest.fixture
def run(trained: Net) -> RunFolder:
    """A run with two checkpoints."""
    folder = RunFolder.create("digits-1")
    write_checkpoint(folder.checkpoints, 5, model=Net(seed=9))
    write_checkpoint(folder.checkpoints, 8, model=trained)
    return folder


def test_weights_come_from_every_kind_of_source(
    run: RunFolder, trained: Net, tmp_path: Path
) -> None:
    newest = run.checkpoints / "step-000000000008.json"
    torch.save(trained.state_dict(), tmp_path / "plain.pt")
    torch.save({"model": trained.state_dict(), "accuracy": 0.9}, tmp_path / "dict.pt")
    torch.save({"epoch": 3, "ema": trained.state_dict()}, tmp_path / "other.pt")
    for source in (
        "digits-1",
        run.path,
        run.checkpoints,
        newest,
        str(newest),
        "plain.pt",
        "dict.pt",
    ):
        model = Net(seed=1)
        assert hvd.load_model(source, model) is model
        assert equal(model, trained), source
        assert not model.training
    assert equal(hvd.load_model("other.pt", Net(seed=1), name="ema"), trained)


def test_a_damaged_newest_checkpoint_is_skipped(run: RunFolder) -> None:
    (shard,) = run.checkpoints.glob("*8-0-of-1-*.shard")
    os.truncate(shard, 100)
    assert equal(hvd.load_model("digits-1", Net(seed=1)), Net(seed=9))


def test_a_newest_checkpoint_that_is_not_finite_is_skipped(
    run: RunFolder, trained: Net, caplog: pytest.LogCaptureFixture
) -> None:
    spoilt = Net(seed=5)
    spoilt.first.bias.data[1] = torch.nan
    write_checkpoint(run.checkpoints, 9, model=spoilt)
    assert equal(hvd.load_model("digits-1", Net(seed=1)), trained)
    assert "model.first.bias holds NaN or infinity" in caplog.text


def test_a_run_with_checkpoints_elsewhere_is_found_there(trained: Net, tmp_path: Path) -> None:
    folder = RunFolder.create("far", {"checkpoint_folder": str(tmp_path / "elsewhere")})
    write_checkpoint(tmp_path / "elsewhere", model=trained)
    assert equal(hvd.load_model("far", Net(seed=1)), trained)
    folder.write_run({"checkpoint_folder": "s3://bucket/far"})
    write_checkpoint(folder.checkpoints, model=Net(seed=7))
    assert equal(hvd.load_model("far", Net(seed=1)), Net(seed=7))


def test_one_object_is_read_without_the_others(tmp_path: Path) -> None:
    a, b = Net(seed=1), Net(seed=2)
    manifest = write_checkpoint(tmp_path, generator=a, critic=b)
    found = load_object(manifest, "critic")
    assert {key: value.tolist() for key, value in found.items()} == {
        key: value.tolist() for key, value in b.state_dict().items()
    }
    assert equal(hvd.load_model(tmp_path, Net(), name="generator"), a)
    with pytest.raises(CheckpointError, match="holds no 'model'; it holds generator, critic, opt"):
        hvd.load_model(tmp_path, Net())


def test_weights_of_a_compiled_model_fit_the_plain_one_and_the_other_way(trained: Net) -> None:
    compiled: Any = torch.compile(trained)
    torch.save(compiled.state_dict(), "compiled.pt")
    torch.save(trained.state_dict(), "plain.pt")
    assert equal(hvd.load_model("compiled.pt", Net(seed=1)), trained)
    other = Net(seed=1)
    compiled = torch.compile(other)
    hvd.load_model("plain.pt", compiled)
    assert equal(other, trained)


@pytest.mark.parametrize("inside", ["state_dict", "model_state_dict", "module."])
def test_weights_as_other_programs_save_them_are_loaded(inside: str, trained: Net) -> None:
    state = trained.state_dict()
    if inside == "module.":  # DistributedDataParallel
        torch.save({"module." + key: value for key, value in state.items()}, "other.pt")
        parallel = torch.nn.DataParallel(Net(seed=1))
        assert equal(hvd.load_model("other.pt", parallel).module, trained)
    else:
        torch.save({inside: state, "epoch": 3}, "other.pt")
    assert equal(hvd.load_model("other.pt", Net(seed=1)), trained)


def test_a_file_of_several_models_names_them(trained: Net) -> None:
    torch.save({"epoch": 3, "generator": trained.state_dict(), "critic": {}}, "gan.pt")
    words = r"gan.pt holds no 'model'; it holds generator, critic: .*name='generator'\)"
    with pytest.raises(CheckpointError, match=words):
        hvd.load_model("gan.pt", Net())
    torch.save({"model": trained.state_dict()}, "plain.pt")
    with pytest.raises(CheckpointError, match=r"plain.pt holds no 'ema'; it holds model: choose"):
        hvd.load_model("plain.pt", Net(), name="ema")


class Renamed(Net):
    """A later version of Net that still loads what the earlier one saved."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.head = self.last
        del self.last
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(_module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in list(state):
            if key.startswith(f"{prefix}last."):
                state[key.replace("last.", "head.")] = state.pop(key)


def test_a_model_may_rename_the_keys_that_it_loads(trained: Net) -> None:
    torch.save(trained.state_dict(), "earlier.pt")
    model = hvd.load_model("earlier.pt", Renamed(seed=1))
    assert torch.equal(model.head.bias, trained.last.bias)
    assert torch.equal(model.first.weight, trained.first.weight)
    torch.save({"a.weight": torch.zeros(3), **trained.first.state_dict()}, "strange.pt")
    with pytest.raises(CheckpointError, match=r"is of another model: missing keys: .*head\.bias"):
        hvd.load_model("strange.pt", model)
    assert torch.equal(model.first.weight, trained.first.weight)


def test_a_part_of_a_model_is_refused_and_changes_nothing(trained: Net) -> None:
    """PyTorch itself loads the keys that fit before it complains of the others."""
    part = {k: v for k, v in trained.state_dict().items() if k.startswith("first.")}
    torch.save(part, "part.pt")
    model = Net(seed=1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"is of another model: missing keys: "):
        hvd.load_model("part.pt", model)
    assert not torch.equal(before["first.weight"], part["first.weight"])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_model_without_memory_is_explained(trained: Net) -> None:
    torch.save(trained.state_dict(), "plain.pt")
    with torch.device("meta"):
        model = Net()
    with pytest.raises(CheckpointError, match=r"first.weight of the model is on the meta.*to_empt"):
        hvd.load_model("plain.pt", model)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            torch.nn.Linear(3, 4),
            r"missing keys: bias, weight; unexpected keys: first.bias, .* and \d more",
        ),
        (Net(width=5), r"first.weight has shape \(4, 3\) there, \(5, 3\) in the model"),
    ],
)
def test_another_model_is_refused_and_left_as_it_is(
    run: RunFolder, model: torch.nn.Module, words: str
) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"8.json is of another model: .*{words}"):
        hvd.load_model(run.path, model)
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert model.training


def test_sources_that_hold_no_weights_are_explained(tmp_path: Path) -> None:
    RunFolder.create("empty")
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.pt").write_text("not a model")
    (tmp_path / "junk.pt").write_bytes(b"e" * 100)
    (tmp_path / "other.json").write_text("{}")
    torch.save([1, 2], tmp_path / "list.pt")
    cases = {
        "nothing": "nothing is neither a file or folder nor the id of a run in",
        "../x": f"neither a file or folder nor the id of a run in {runs_folder()}\\. ",
        "saved/best.pt": f"nor the id of a run in {runs_folder()}\\. ",
        "empty": "run empty has no checkpoint in .*checkpoints$",
        "folder": "folder is not the folder of a run, and holds no whole checkpoint",
        "text.pt": "text.pt cannot be loaded: it is not a file of torch.save",
        "junk.pt": "junk.pt cannot be loaded, it is damaged or not a file of torch.save$",
        "other.json": r"other.json is no checkpoint: the manifest of one is named step",
        "list.pt": "list.pt holds a list; load_model reads a state_dict",
    }
    for source, words in cases.items():
        with pytest.raises(CheckpointError, match=words):
            hvd.load_model(source, Net())
    (runs_folder() / "empty" / "saved").mkdir()
    (runs_folder() / "empty" / "saved" / "best.pt").touch()
    with pytest.raises(CheckpointError, match=r"It has saved best\.pt in .*saved: load one"):
        hvd.load_model("empty", Net())


class Bomb:
    def __init__(self, call: Any, argument: Any) -> None:
        self._way = (call, (argument,))

    def __reduce__(self) -> Any:
        return self._way


@pytest.mark.parametrize(
    ("bomb", "name"),
    [
        (Bomb(Path.touch, Path("bang")), r"[\w.]+"),
        # PyTorch has other words for modules that it never trusts.
        (Bomb(os.system, "touch bang"), "posix.system"),
        (Bomb(eval, "open('bang', 'w')"), "eval"),
    ],
)
def test_code_in_a_file_is_not_run(tmp_path: Path, bomb: Bomb, name: str) -> None:
    torch.save({"model": bomb}, "bomb.pt")
    with pytest.raises(CheckpointError, match=f"holds a {name}, whose loading would run code"):
        hvd.load_model("bomb.pt", Net())
    assert not Path("bang").exists()


def test_a_whole_module_is_explained_in_one_line() -> None:
    torch.save({"model": torch.nn.Linear(2, 1)}, "whole.pt")
    with pytest.raises(CheckpointError) as refused:
        hvd.load_model("whole.pt", torch.nn.Linear(2, 1))
    said = str(refused.value)
    assert "it holds a torch.nn.modules.linear.Linear, whose loading would run code" in said
    assert said.isprintable()
    assert len(said) < 350


def test_a_cut_file_is_explained(trained: Net) -> None:
    torch.save(trained.state_dict(), "cut.pt")
    os.truncate("cut.pt", 700)
    with pytest.raises(CheckpointError, match=r"cut.pt cannot be loaded"):
        hvd.load_model("cut.pt", Net())


def test_a_process_without_init_loads(run: RunFolder, tmp_path: Path) -> None:
    """Horovod is not imported, and no context is made."""
    code = """
        import sys, torch, hvd_elastic.torch as hvd
        from hvd_elastic.worker import context
        hvd.load_model("digits-1", torch.nn.Linear(2, 1))
        assert not context.is_initialized() and "horovod" not in sys.modules
    """
    shutil.rmtree(run.checkpoints)
    write_checkpoint(run.checkpoints, model=torch.nn.Linear(2, 1))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": WORKER_PYTHONPATH},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
