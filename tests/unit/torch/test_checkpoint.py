"""Training state goes into a file and comes back, in the background and from damaged folders."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hvd_elastic.torch as hvd
from hvd_elastic import __version__
from hvd_elastic.checkpoint import stream
from hvd_elastic.checkpoint.manifests import (
    CheckpointInfo,
    complete_checkpoint,
    newest_valid,
)
from hvd_elastic.checkpoint.reader import load_arrays, read_header
from hvd_elastic.checkpoint.shards import (
    complete_sets,
    describe_shard,
    find_shards,
)
from hvd_elastic.checkpoint.stream import new_shard
from hvd_elastic.checkpoint.writer import CheckpointWriter
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.torch import checkpoint
from hvd_elastic.torch.checkpoint import TorchContent, load_checkpoint
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.progress import Progress
from tests.paths import ALL, LIMIT_S, WORKER_PYTHONPATH
from tests.small_disk import mounted
from tests.unit.checkpoint.written import Told


def tensors_of(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.data_ptr()}
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        return set().union(*map(tensors_of, items))
    return set()


def write_checkpoint(
    folder: Path, value: Any, step: int, size: int = 1, keep: int = 9, shared: bool = True
) -> CheckpointInfo:
    """As ``size`` ranks would write it."""
    told = Told()
    nested = {"value": value}
    for rank in range(size):
        content = TorchContent(nested, tensors_of(value) if shared else set(), copy_own=rank == 0)
        progress = Progress(step=step, epoch=1, examples=5 * step)
        told.write(folder, content, progress, rank=rank, size=size)
    return complete_checkpoint(folder, told.done, keep)


def value_of(info: CheckpointInfo) -> Any:
    return load_checkpoint(info.path)["value"]


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) and type(left) is type(right)


@pytest.mark.parametrize("size", [1, 3])
def test_model_optimizer_and_scheduler_come_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 64)
    parts = trained()
    payload = {str(i): part.state_dict() for i, part in enumerate(parts)}
    info = write_checkpoint(tmp_path, payload, 3, size)
    assert len(info.shards) == size
    loaded = load_checkpoint(info.path)
    assert same(loaded["value"], payload)
    assert loaded["progress"] == Progress(step=3, epoch=1, examples=15).as_state()
    for i, part in enumerate(parts):
        part.load_state_dict(loaded["value"][str(i)])
    assert (info.epoch, info.examples) == (1, 15)
    assert info.bytes == sum(shard.path.stat().st_size for shard in info.shards)


TENSORS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
        st.booleans(),
    ),
    max_size=8,
)


@given(described=TENSORS, size=st.integers(1, 9), shared=st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_any_number_of_ranks_wrote_comes_back_whole(
    tmp_path_factory: pytest.TempPathFactory, described: Any, size: int, shared: bool
) -> None:
    """Whatever the shapes, types and strides: cuts go through tensors anywhere."""
    generator = torch.Generator().manual_seed(1)
    value = []
    for shape, dtype, transposed in described:
        tensor = torch.randn(shape, generator=generator).to(dtype)
        value.append(tensor.mT if transposed and tensor.dim() >= 2 else tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "SHARD_BYTES", 1)
        info = write_checkpoint(tmp_path_factory.mktemp("any"), value, 1, size, shared=shared)
    assert same(value_of(info), value)
    arrays = load_arrays(info.path)
    for name, tensor in zip(map(str, range(len(value))), value, strict=True):
        whole = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert (arrays[name].tobytes(), arrays[name].shape) == (whole, tensor.shape)
    total = info.shards[0].total
    assert len(info.shards) == max(1, min(size, total))


def test_small_models_are_one_shard() -> None:
    content = TorchContent({"w": (w := torch.zeros(4 << 20))}, {w.data_ptr()})
    assert [new_shard(content, Progress(), r, 2) is None for r in range(2)] == [False, True]
    content = TorchContent({"w": (w := torch.zeros(8 << 20))}, {w.data_ptr()})
    assert [new_shard(content, Progress(), r, 2) is None for r in range(2)] == [False, False]


def test_what_ranks_may_differ_in_is_as_rank_0_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 8)
    told = Told()
    shared = torch.arange(100.0)
    for rank in range(2):
        nested = {"own": torch.full((50,), float(rank)), "n": rank, "shared": shared}
        content = TorchContent(nested, {shared.data_ptr()}, copy_own=rank == 0)
        shard = new_shard(content, Progress(step=1), rank, 2)
        assert shard is not None
        writer = told.writer(tmp_path)
        writer.start_shard(content, Progress(step=1), shard, set(), 0.0)
        assert writer.flush(LIMIT_S)
    loaded = load_checkpoint(complete_checkpoint(tmp_path, told.done, 1).path)
    assert loaded["own"].tolist() == [0.0] * 50
    assert loaded["n"] == 0
    assert torch.equal(loaded["shared"], shared)


def test_ranks_with_other_tensors_do_not_make_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 8)
    told = Told()
    for rank, shape in enumerate([(10, 10), (4, 25)]):
        content = TorchContent({"w": (w := torch.zeros(shape))}, {w.data_ptr()})
        shard = new_shard(content, Progress(step=1), rank, 2)
        assert shard is not None
        writer = told.writer(tmp_path)
        writer.start_shard(content, Progress(step=1), shard, set(), 0.0)
        assert writer.flush(LIMIT_S)
    assert len(find_shards(tmp_path)) == 2
    assert complete_sets(find_shards(tmp_path)) == []


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(30, 30, bias=False) for _ in range(2)])
    model[1].weight = model[0].weight
    state = model.state_dict()
    content = TorchContent({"m": state}, tensors_of(state))
    assert content.total == 30 * 30 * 4
    assert content.names == ["0.weight"]
    loaded = value_of(write_checkpoint(tmp_path, state, 1))
    assert loaded["0.weight"] is loaded["1.weight"]
    assert loaded._metadata == vars(state)["_metadata"]
    view = torch.arange(6).reshape(2, 3)
    several = [view, view.t(), view[1], torch.empty(0), torch.empty(0)]
    for shared in (True, False):
        assert same(value_of(write_checkpoint(tmp_path, several, 1, shared=shared)), several)


def test_a_view_does_not_bring_its_whole_storage_along(tmp_path: Path) -> None:
    info = write_checkpoint(tmp_path, [torch.zeros(1_000_000)[:3]], 1, shared=False)
    assert info.bytes < 10_000


class Named(tuple[int, ...]):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "comes_back"),
    [
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (defaultdict(int, a=1), {"a": 1}),
        (Named((1, 2)), (1, 2)),
        (Counter("aab"), Counter("aab")),
        (OrderedDict(b=1, a=2), OrderedDict(b=1, a=2)),
        ({1, 2}, {1, 2}),
        ({1: None, (2, "x"): [b"y", 2**80, float("inf"), 1j]}, None),
        ([torch.float16, torch.Size([2]), torch.device("cpu"), bytearray(b"z")], None),
    ],
)
def test_plain_values_come_back(tmp_path: Path, value: Any, comes_back: Any) -> None:
    loaded = value_of(write_checkpoint(tmp_path, value, 1))
    assert same(loaded, value if comes_back is None else comes_back)


class Color(int):
    pass


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, np.zeros(2)]}, r"\['a'\]\[1\] is a numpy.ndarray .*tensors of the framework"),
        ({"a": {"b": object()}}, r"\['a'\]\['b'\] is a builtins.object"),
        ({"f": print}, r"\['f'\] is a builtins.builtin_function"),
        ([Color(1)], r"\[0\] is a .*Color"),
        ({"x": {range(3): 1}}, r"in a key of \['x'\]: the value is a builtins.range"),
        (frozenset([1]), "the value is a builtins.frozenset"),
    ],
)
def test_what_could_not_be_read_back_is_refused_with_its_place(value: Any, where: str) -> None:
    with pytest.raises(ScriptError, match=where):
        TorchContent(value, set())


# -- damaged or hostile files


def test_a_damaged_newest_gives_way_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 64)
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, {"step": step, "w": torch.ones(1000)}, step, size=2)
    *_, middle, newest = sorted(tmp_path.glob("step-*-1-of-2-*.shard"))
    os.truncate(newest, 50)
    data = bytearray(middle.read_bytes())
    data[len(data) // 2] ^= 1
    middle.write_bytes(data)
    skipped: list[str] = []
    found = newest_valid(tmp_path, lambda path, why: skipped.append(f"{path.name}: {why}"))
    assert found is not None
    assert value_of(found)["step"] == 1
    assert skipped[0].startswith(f"{newest.name}: it is truncated: 50 of")
    assert skipped[1].startswith(f"{middle.name}: it is corrupted")


def test_loading_what_is_no_checkpoint_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 64)
    info = write_checkpoint(tmp_path, {"w": torch.ones(1000)}, 1, size=2)
    rng = random.Random(0)
    for path in info.files:
        whole = path.read_bytes()
        contents = [b"", b"hello", whole[:100], whole[:-10], whole[10:]]
        contents += [whole[: rng.randrange(len(whole) - 2)] for _ in range(20)]
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(CheckpointError, match="cannot be loaded, it is damaged"):
                load_checkpoint(info.path)
        path.write_bytes(whole)
    assert torch.equal(value_of(info)["w"], torch.ones(1000))
    info.shards[1].path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read: .*-1-of-2-.*: No such file"):
        load_checkpoint(info.path)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*none: No such file"):
        load_checkpoint(tmp_path / "none")


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_a_file_from_somewhere_else_cannot_run_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one whose manifest has the right SHA-256."""
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(TorchContent, "encode_opaque", lambda _: _saved([RunsCode()]))
        info = write_checkpoint(tmp_path, {}, 1)
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            load_checkpoint(info.path)
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("tampered", "why"),
    [
        ({"shape": [10**12]}, "tensor 'w' has 4000 bytes for the shape"),
        ({"shape": [-1000]}, "tensor 'w' has the shape"),
        ({"shape": "1000"}, "tensor 'w' has the shape"),
        ({"dtype": "F64"}, "tensor 'w' has 4000 bytes for the shape"),
        ({"dtype": "object", "shape": [500]}, "no type 'object'"),
        ({"data_offsets": [0, 10**15], "shape": [10**15], "dtype": "U8"}, "describes 10+ bytes"),
        ({"data_offsets": [8, 4008]}, "tensor 'w' has the shape"),
        ({"dtype": None}, ""),
        ({"data_offsets": None}, ""),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tampered: dict[str, Any], why: str
) -> None:
    """Before memory is taken for what it claims, though the SHA-256 is right."""
    head = TorchContent.head

    def tamper(content: TorchContent, progress: Any, world: int) -> list[bytes]:
        header = json.loads(head(content, progress, world)[0][8:])
        header["w"] |= tampered
        text = json.dumps(header).encode()
        return [len(text).to_bytes(8, "little") + text]

    monkeypatch.setattr(TorchContent, "head", tamper)
    weight = torch.ones(1000)
    content = TorchContent({"x": {"w": weight}}, {weight.data_ptr()})
    told = Told()
    shard = new_shard(content, Progress(step=1), 0, 1)
    assert shard is not None
    writer = told.writer(tmp_path)
    writer.start_shard(content, Progress(step=1), shard, set(), 0.0)
    assert writer.flush(LIMIT_S)
    info = complete_checkpoint(tmp_path, told.done, 9)
    with pytest.raises(CheckpointError, match=f"cannot be loaded, it is damaged.*{why}"):
        load_checkpoint(info.path)


def test_a_checkpoint_of_another_framework_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchContent, "frontend", "tensorflow")
    info = write_checkpoint(tmp_path, {"w": torch.ones(3)}, 1)
    with pytest.raises(CheckpointError, match=r"written by hvd_elastic\.tensorflow"):
        load_checkpoint(info.path)


# -- the format


def test_the_header_names_every_tensor_and_the_progress(tmp_path: Path) -> None:
    parts = trained()
    payload = {str(i): part.state_dict() for i, part in enumerate(parts)}
    header = read_header(write_checkpoint(tmp_path, payload, 3).path)
    assert header.progress == Progress(step=3, epoch=1, examples=15).as_state()
    assert (header.frontend, header.world, header.library) == ("torch", 1, __version__)
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}
    assert found["0.0.weight"] == ("float32", (8, 4))
    assert found["0.1.num_batches_tracked"] == ("int64", ())
    assert found["1.state.0.exp_avg"] == ("float32", (8, 4))


def test_own_tensors_are_in_it_too_and_names_are_unique(tmp_path: Path) -> None:
    """``a.b`` may be one key, or two."""
    value = {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2), "bits": torch.ones(2).bfloat16()}
    for shared in (True, False):
        info = write_checkpoint(tmp_path, value, 1, shared=shared)
        assert same(value_of(info), value)
        arrays = load_arrays(info.path)
        assert {name: array.tolist() for name, array in arrays.items()} == {
            "a.b": [0, 0],
            "a.b~2": [1, 1],
            "bits": [0x3F80, 0x3F80],
        }
        assert arrays["bits"].dtype == np.uint16


def test_keys_that_look_like_marks_come_back(tmp_path: Path) -> None:
    value = {"$tensor": "w", "x": {"$tuple": [1]}, "y": [{"$": None}], "": {}}
    assert value_of(write_checkpoint(tmp_path, value, 1)) == value


def test_tensors_that_only_pytorch_has_come_back(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    value = {"s": sparse, "w": torch.ones(1)}
    loaded = value_of(write_checkpoint(tmp_path, value, 1, shared=False))
    assert torch.equal(loaded["s"].to_dense(), torch.eye(3))


# -- the disk says no


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk


@pytest.mark.root
@pytest.mark.parametrize("elements", [200_000, 2_000_000])
def test_a_full_disk_is_named_and_the_older_checkpoint_stays(
    small_disk: Path, elements: int
) -> None:
    write_checkpoint(small_disk, {"w": torch.ones(100_000)}, 1)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written: .* is full"):
        write_checkpoint(small_disk, {"w": torch.ones(elements)}, 2)
    found = newest_valid(small_disk)
    assert found is not None
    assert torch.equal(value_of(found)["w"], torch.ones(100_000))
    assert not list(small_disk.glob("*-000000000002-*"))


# -- killed while writing

WRITER = """
import sys, torch
from pathlib import Path
from tests.unit.torch.test_checkpoint import write_checkpoint
for step in range(1, 10_000):
    value = {"step": step, "w": torch.full((200_000,), step)}
    write_checkpoint(Path(sys.argv[1]), value, step, keep=2)
    print(step, flush=True)
"""


def test_a_kill_while_writing_loses_nothing_that_was_complete(tmp_path: Path) -> None:
    """Whatever the instant: what the writer reported as complete, or newer, is there and valid."""
    for delay_ms in (0, 1, 2, 5) if ALL else (1,):
        folder = tmp_path / str(delay_ms)
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": WORKER_PYTHONPATH},
        )
        assert writer.stdout is not None
        with ExitStack() as afterwards:
            afterwards.callback(writer.wait)
            afterwards.callback(writer.kill)
            afterwards.enter_context(writer.stdout)
            for _ in range(3):
                writer.stdout.readline()
            threading.Event().wait(delay_ms / 1000)  # the instant to try, not synchronisation
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            reported = [int(line) for line in writer.stdout]
        skipped: list[str] = []
        found = newest_valid(folder, lambda path, why, to=skipped: to.append(why))  # type: ignore[misc]
        assert found is not None
        assert found.step >= max([3, *reported])
        loaded = value_of(found)
        assert loaded["step"] == found.step
        assert torch.equal(loaded["w"], torch.full((200_000,), found.step))
        assert all("no manifest" in why for why in skipped)


# -- beside training


class Slow:
    """Holds the copying of a shard until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        copy = checkpoint._Piece.copy

        def slow(piece: Any, **options: Any) -> None:
            self.begun.set()
            assert self.go_on.wait(LIMIT_S)
            copy(piece, **options)

        monkeypatch.setattr(checkpoint._Piece, "copy", slow)


def begin(writer: CheckpointWriter, tensor: torch.Tensor, step: int, lasting: bool = True) -> None:
    content = TorchContent({"w": tensor}, {tensor.data_ptr()})
    progress = Progress(step=step)
    shard = new_shard(content, progress, 0, 1)
    assert shard is not None
    writer.start_shard(content, progress, shard, {tensor.data_ptr()} if lasting else set(), 0.0)


def read(folder: Path, told: Told) -> torch.Tensor:
    found: torch.Tensor = load_checkpoint(complete_checkpoint(folder, told.done, 9).path)["w"]
    return found


def test_training_goes_on_while_parameters_are_copied_and_a_step_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, told = Slow(monkeypatch), Told()
    writer = told.writer(tmp_path)
    weight = torch.ones(1000)
    begin(writer, weight, 1)  # returns although nothing can be copied
    assert slow.begun.wait(LIMIT_S)
    assert writer.busy

    def step() -> None:
        writer.settle()
        weight.add_(1)

    training = threading.Thread(target=step)
    training.start()
    training.join(0.05)
    assert training.is_alive(), "a step changes parameters: it waits"
    slow.go_on.set()
    training.join(LIMIT_S)
    assert writer.flush(LIMIT_S)
    assert not told.errors
    assert weight[0] == 2
    assert torch.equal(read(tmp_path, told), torch.ones(1000))


@pytest.mark.parametrize(
    "wrapped", [hvd.DistributedOptimizer, partial(hvd.LocalOptimizer, every=2)]
)
def test_a_step_of_either_optimizer_waits_for_the_copy(
    wrapped: Any, alone: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, told = Slow(monkeypatch), Told()
    writer = told.writer(tmp_path)
    settle = writer.settle

    def let_go_and_wait() -> None:
        slow.go_on.set()
        settle()

    monkeypatch.setattr(writer, "settle", let_go_and_wait)
    model = torch.nn.Linear(2, 1)
    before = [each.detach().clone() for each in model.parameters()]
    optimizer: Any = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader: Any = hvd.DataLoader(torch.ones(8, 2), 4)

    @hvd.run
    def train(_: Any) -> None:
        alone.checkpoints._writer = writer
        for batch in hvd.steps(2, loader):
            if not slow.begun.is_set():
                alone.checkpoints.take_checkpoint()  # returns although nothing can be copied
                assert slow.begun.wait(LIMIT_S)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            slow.go_on.set()  # too late

    train(hvd.State(model=model, optimizer=optimizer))
    assert writer.flush(LIMIT_S)
    assert not told.errors
    written = load_checkpoint(complete_checkpoint(tmp_path, told.done[:1], 9).path)
    assert [*map(torch.equal, before, written["objects"]["model"].values())] == [True, True]
    assert not torch.equal(before[0], model.weight)


def test_what_may_change_at_any_time_is_copied_at_once(tmp_path: Path) -> None:
    told = Told()
    writer = told.writer(tmp_path)
    weight = torch.ones(1000)
    begin(writer, weight, 1, lasting=False)
    weight.add_(1)
    assert writer.flush(LIMIT_S)
    assert torch.equal(read(tmp_path, told), torch.ones(1000))


def test_a_mixture_of_two_steps_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, told = Slow(monkeypatch), Told()
    writer = told.writer(tmp_path)
    weight = torch.ones(1000)
    begin(writer, weight, 1)
    weight.add_(1)  # a script that does not wait
    slow.go_on.set()
    assert writer.flush(LIMIT_S)
    assert "step 1 was not written:  was changed between two steps" in str(told.errors[0])
    assert not told.done
    begin(writer, weight, 2)
    assert writer.flush(LIMIT_S)
    assert torch.equal(read(tmp_path, told), torch.full((1000,), 2.0))


def test_the_buffer_is_kept_and_can_be_made_before(tmp_path: Path) -> None:
    told = Told()
    writer = told.writer(tmp_path)
    content = TorchContent({}, set())
    writer.prepare(content, 4000)
    assert writer.flush(LIMIT_S)
    made = writer._buffer
    for step in (1, 2):
        begin(writer, torch.full((1000,), float(step)), step)
        assert writer.flush(LIMIT_S)
    writer.prepare(content, 10)
    assert not writer.busy, "there is room"
    assert writer._buffer is made
    assert [shard.step for shard in told.done] == [1, 2]


def test_an_unwritable_folder_is_told_and_the_next_one_is_tried(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    told = Told()
    writer = told.writer(blocker / "checkpoints")
    begin(writer, torch.ones(3), 1)
    assert writer.flush(LIMIT_S)
    (error,) = told.errors
    assert isinstance(error, CheckpointError)
    assert "cannot be written to" in str(error)
    blocker.unlink()
    begin(writer, torch.ones(3), 2)
    assert writer.flush(LIMIT_S)
    assert [shard.step for shard in told.done] == [2]


def test_a_callback_that_fails_is_logged_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("callback")

    writer = CheckpointWriter(
        tmp_path, finish=lambda s: describe_shard(s, 9), on_done=broken, on_error=broken
    )
    for step in (1, 2):
        begin(writer, torch.ones(3), step)
        assert writer.flush(LIMIT_S)
    assert "the callback for a checkpoint failed" in caplog.text
    assert [shard.step for shard in find_shards(tmp_path)] == [2, 1]
