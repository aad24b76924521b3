"""What a State keeps, hands over and takes; the other ranks are played by an engine in memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hvd_elastic.communicator.interface import FIRST, RingRank
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.torch.checkpoint import load_checkpoint
from hvd_elastic.torch.state import State, dump_plain, load_plain
from hvd_elastic.worker.progress import Progress
from tests.unit.checkpoint.written import Told, write_alone

pytestmark = pytest.mark.usefixtures("alone")


class Wire(LocalCommunicator):
    """Records what the root broadcasts, or plays it to another rank."""

    def __init__(
        self, rank: int, said: list[Any] | None = None, *, other_lacks: bool = False
    ) -> None:
        self.rank = RingRank(rank)
        self.size = 2
        self.other_lacks = other_lacks
        self.said: list[Any] = [] if said is None else list(said)

    def gather(self, array: Any, name: str) -> Any:
        other = np.array([[int(self.other_lacks)]])
        return np.concatenate([array, other] if self.rank == 0 else [other, array])

    def hand_over(self, tensors: Sequence[torch.Tensor], lacking: Sequence[bool]) -> None:
        assert list(lacking) == [False, True], "the root has it and the newcomer does not"
        self.broadcast(tensors, 0)

    def broadcast(self, tensors: Sequence[torch.Tensor], root_rank: int) -> None:
        if self.rank == root_rank:
            self.said.append([tensor.clone() for tensor in tensors])
        else:
            for mine, theirs in zip(tensors, self.said.pop(0), strict=True):
                mine.detach().copy_(theirs)

    def broadcast_bytes(self, data: bytes, root_rank: int) -> bytes:
        if self.rank == root_rank:
            self.said.append(data)
            return data
        taken: bytes = self.said.pop(0)
        return taken


@pytest.mark.parametrize("by", ["a rank", "a checkpoint"])
def test_what_was_converted_in_training_is_converted_elsewhere(by: str, tmp_path: Path) -> None:
    def made(momentum: float = 0.9) -> State:
        layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.BatchNorm2d(4))
        layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        layers[1].half()  # as built, which no other rank has to be told
        sgd = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=momentum, fused=True)
        return State(model=layers, optimizer=sgd)

    root, newcomer = made(), made()
    root.model[0].to(memory_format=torch.contiguous_format).double()
    for parameter in root.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    root.optimizer.step()
    if by == "a rank":
        wire = Wire(0, other_lacks=True)
        root.sync(wire, FIRST, Progress())
        newcomer.sync(Wire(1, wire.said), FIRST, Progress())
    else:
        newcomer.load(saved(root, tmp_path, Progress()), "x")
    for name in ("parameters", "buffers"):
        pairs = zip(getattr(root.model, name)(), getattr(newcomer.model, name)(), strict=True)
        for own, theirs in pairs:
            torch.testing.assert_close(theirs, own)
            assert theirs.stride() == own.stride()
    for own, theirs in zip(root.model.parameters(), newcomer.model.parameters(), strict=True):
        sent, held = (
            state.optimizer.state[parameter]["momentum_buffer"]
            for state, parameter in ((root, own), (newcomer, theirs))
        )
        torch.testing.assert_close(held, sent)
        assert held.stride() == sent.stride()


def trained(seed: int, steps: int, **values: Any) -> State:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(steps):
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
    return State(model=model, optimizer=optimizer, **values)


def saved(state: State, folder: Path, progress: Progress) -> dict[str, Any]:
    """Written and read."""
    return load_checkpoint(write_alone(folder, state.content(), progress).path)


def flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [flat(item) for item in value]
    return value


def everything(state: State) -> Any:
    return flat([state.model.state_dict(), state.optimizer.state_dict(), state._plain])


@pytest.mark.parametrize("newcomer_steps", [0, 2])
def test_a_newcomer_takes_everything_bit_for_bit(newcomer_steps: int) -> None:
    """Also where it has optimizer state of its own, or none yet."""
    root = trained(0, 3, best=0.5, history=[1, 2], table=torch.arange(3))
    wire = Wire(0, other_lacks=True)
    at = Progress(step=7, epoch=1, position=30, examples=130)
    assert root.sync(wire, FIRST, at) == at
    newcomer = trained(1, newcomer_steps, best=0.0, history=[], table=None)
    parameters = list(newcomer.model.parameters())
    assert newcomer.sync(Wire(1, wire.said), FIRST, Progress()) == at
    assert everything(newcomer) == everything(root)
    kept = list(newcomer.model.parameters())
    assert all(one is other for one, other in zip(kept, parameters, strict=True))


def test_optimizer_state_keeps_its_form_on_ranks_that_receive_it() -> None:
    """PyTorch makes that of bfloat16 parameters bfloat16, which differs from that of the root.

    Fused optimizers take its strides to be those of the parameter.
    """

    def made(seed: int, *, steps: bool) -> State:
        torch.manual_seed(seed)
        model: Any = torch.nn.Conv2d(2, 3, 2, dtype=torch.bfloat16)
        model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters() if steps else ():
            moment = torch.randn_like(parameter, dtype=torch.float32)
            optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": moment}
        return State(model=model, optimizer=optimizer)

    root, newcomer, wire = made(0, steps=True), made(1, steps=False), Wire(0, other_lacks=True)
    root.sync(wire, FIRST, Progress())
    newcomer.sync(Wire(1, wire.said), FIRST, Progress())
    assert everything(newcomer) == everything(root)
    for parameter, state in newcomer.optimizer.state.items():
        assert state["exp_avg"].dtype is torch.float32
        assert state["exp_avg"].stride() == parameter.stride()


def test_what_all_ranks_have_does_not_travel() -> None:
    """Buffers and plain values do: each rank has its own."""
    root = trained(0, 3, best=0.5)
    twin = trained(0, 3, best=0.1)
    twin.model[1].running_mean.add_(1)
    wire = Wire(0)
    at = Progress(step=3, epoch=0, position=24, examples=24)
    root.sync(wire, FIRST, at)
    _header, tensors = wire.said
    buffers = [buffer.shape for buffer in root.model.buffers()]
    assert [tensor.shape for tensor in tensors] == buffers
    assert twin.sync(Wire(1, wire.said), FIRST, at, lambda theirs: theirs == at) == at
    assert everything(twin) == everything(root)


def test_one_rank_that_lacks_the_state_is_enough_to_send_it() -> None:
    root = trained(0, 3)
    wire = Wire(0, other_lacks=True)
    at = Progress(step=3, epoch=0, position=24, examples=24)
    root.sync(wire, FIRST, at)
    twin = trained(0, 3)
    assert twin.sync(Wire(1, wire.said), FIRST, at, lambda _: False) == at
    assert everything(twin) == everything(root)


def test_plain_values_go_back_to_what_was_saved() -> None:
    state = State(seen=[1], best=0.1)
    state.save_values()
    state.seen.append(2)
    state.best = 0.9
    state.roll_back()
    assert (state.seen, state.best) == ([1], 0.1)
    state.seen.append(3)
    state.roll_back()
    assert state.seen == [1], "what is given back is a copy"


def test_a_checkpoint_holds_a_copy_and_gives_it_back(tmp_path: Path) -> None:
    state = trained(0, 2, note="x")
    before = everything(state)
    payload = saved(state, tmp_path, Progress(step=2))
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(1)
    state.note = "y"
    assert everything(state) != before
    assert state.load(payload, "c.pt") == Progress(step=2)
    assert everything(state) == before


def test_what_is_frozen_is_a_part_of_the_state(tmp_path: Path) -> None:
    """A script that unfreezes a layer in its third epoch is resumed, or joined, in its fourth."""
    state = trained(0, 1)
    first, second = state.model
    first.requires_grad_(False)
    payload = saved(state, tmp_path, Progress(step=1))
    first.requires_grad_(True)
    second.requires_grad_(False)
    state.load(payload, "c.pt")
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert all(parameter.requires_grad for parameter in second.parameters())


def test_a_checkpoint_of_another_script_is_refused_by_name(tmp_path: Path) -> None:
    payload = saved(trained(0, 1), tmp_path, Progress(step=1))
    with pytest.raises(CheckpointError, match=r"c\.json holds \['model', 'opt.*\['model'\]"):
        State(model=torch.nn.Linear(3, 4)).load(payload, "c.json")


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (
            [torch.nn.Linear(3, 5)],
            r"model\.0\.weight is \(4, 3\) in the checkpoint and \(5, 3\)",
        ),
        ([torch.nn.Linear(3, 4)], r"model\.1\.weight is \(4,\) in the checkpoint and missing"),
        (
            [torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)],
            r"model\.2\.weight is missing in the checkpoint and \(2, 4\) in this script",
        ),
    ],
)
def test_a_checkpoint_of_another_model_names_the_first_parameter_and_changes_nothing(
    tmp_path: Path, layers: list[torch.nn.Module], said: str
) -> None:
    payload = saved(trained(0, 1), tmp_path, Progress(step=1))
    model = torch.nn.Sequential(*layers)
    other = State(model=model, optimizer=torch.optim.Adam(model.parameters()))
    before = everything(other)
    with pytest.raises(CheckpointError, match=rf"c\.json is of another model: {said}"):
        other.load(payload, "c.json")
    assert everything(other) == before


def test_parameters_and_optimizer_state_are_shared_and_buffers_are_not() -> None:
    state = trained(0, 1, table=torch.arange(3))
    content = state.content()
    assert [name for name in content.names if name.startswith("model")] == [
        "model.0.weight",
        "model.0.bias",
        "model.1.weight",
        "model.1.bias",
    ]
    assert sum(name.startswith("optimizer.state.") for name in content.names) == 4 * 3
    assert {tensor.data_ptr() for tensor in content.tensors} == state.lasting()
    assert not state.waits_before_step(), "it is not one of ours"


@pytest.mark.parametrize("name", ["commit", "sync", "_private"])
def test_names_that_are_taken_are_refused(name: str) -> None:
    with pytest.raises(ScriptError, match=repr(name)):
        State(**{name: 1})


def test_what_is_neither_plain_nor_stateful_is_named() -> None:
    with pytest.raises(ScriptError, match=r"'thing' is a function.*state_dict"):
        State(thing=trained)
    with pytest.raises(AttributeError, match="no value 'nothing'"):
        _ = State(a=1).nothing


def test_a_state_dict_and_swapped_arguments_are_refused() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in ((model.state_dict(), optimizer), (model, optimizer.state_dict()), (optimizer,)):
        with pytest.raises(ScriptError, match=r"itself: hvd.State\(model=model"):
            State(*wrong)
    with pytest.raises(ScriptError, match=r"State\(optimizer=...\) was given a Linear"):
        State(None, model)


def test_plain_data_travels_and_code_does_not(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, "x"], "t": torch.arange(3)}
    taken = load_plain(dump_plain(value))
    assert taken["a"] == value["a"]
    assert torch.equal(taken["t"], torch.arange(3))

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    with pytest.raises(Exception, match=r"weights_only|Weights only|Unsupported"):
        load_plain(dump_plain(Evil()))
    assert not (tmp_path / "executed").exists()


def not_finite(state: State, folder: Path) -> str:
    told = Told()
    told.write(folder, state.content(), Progress(), lasting=state.lasting())
    return told.done[0].not_finite


def test_a_checkpoint_names_a_trained_weight_that_is_not_finite(tmp_path: Path) -> None:
    state = trained(0, 2, best=float("inf"), table=torch.tensor([float("nan")]))
    state.optimizer.state[state.model[0].weight]["exp_avg"].fill_(float("inf"))
    assert not_finite(state, tmp_path) == ""
    with torch.no_grad():
        state.model[0].weight[1, 2] = float("nan")
    assert not_finite(state, tmp_path) == "model.0.weight"


def test_statistics_of_batch_normalisation_have_to_be_finite(tmp_path: Path) -> None:
    state = trained(0, 2)
    state.model[1].running_mean[0] = float("nan")
    assert not_finite(state, tmp_path) == "model.1.running_mean"


def test_masks_and_frozen_parameters_need_not_be_finite(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
    model.register_parameter("bound", torch.nn.Parameter(torch.tensor([float("inf")]), False))
    assert not_finite(State(model=model), tmp_path) == ""


class Buffers(torch.nn.Module):
    """Buffers of every kind that nothing could be received into."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(2))
        self.register_buffer("expanded", torch.tensor([float(seed)]).expand(4))
        self.register_buffer("conjugate", torch.tensor([1j * seed]).conj())
        self.register_buffer("negative", torch.tensor([1j * seed]).conj().imag)
        with torch.inference_mode():
            self.register_buffer("inferred", torch.full((2,), float(seed)))
        self.register_buffer("bank", torch.zeros(0, 3))
        self.register_buffer("late", None)
        self.register_buffer("early", torch.ones(1))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def all_buffers(state: State) -> Any:
    return {name: buffer.tolist() for name, buffer in state.model.named_buffers()}


def test_a_newcomer_gets_buffers_of_every_kind() -> None:
    root, newcomer, wire = State(model=Buffers(1)), State(model=Buffers(2)), Wire(0)
    model = root.model
    model.bank = torch.cat([model.bank, torch.ones(5, 3)])
    model.late, model.early = torch.ones(3), None
    model.cache = torch.arange(6.0)
    root.sync(wire, FIRST, Progress())
    newcomer.sync(Wire(1, wire.said), FIRST, Progress())
    assert all_buffers(newcomer) == all_buffers(root)
    assert newcomer.model.cache.tolist() == [0, 1, 2, 3, 4, 5]


def test_buffers_that_have_grown_are_resumed(tmp_path: Path) -> None:
    state = State(model=Buffers(1))
    state.model.bank, state.model.late = torch.ones(5, 3), torch.ones(3)
    payload = saved(state, tmp_path, Progress(step=1, epoch=0, position=0, examples=0))
    resumed = State(model=Buffers(2))
    resumed.load(payload, "c.json")
    assert all_buffers(resumed) == {**all_buffers(state), "cache": [0, 0]}
    assert "cache" not in payload["objects"]["model"]


def test_a_buffer_with_other_columns_is_of_another_model(tmp_path: Path) -> None:
    state = State(model=Buffers(1))
    payload = saved(state, tmp_path, Progress(step=1, epoch=0, position=0, examples=0))
    state.model.bank = torch.zeros(0, 4)
    with pytest.raises(CheckpointError, match=r"model.bank is \(0, 3\) in the checkpoint"):
        state.load(payload, "c.json")


def test_a_buffer_of_two_modules_stays_one() -> None:
    shared = torch.ones(1).expand(3)
    model: Any = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    for module in model:
        module.register_buffer("mask", shared)
    State(model=model)
    first, second = (module.get_buffer("mask") for module in model)
    assert first is second
    first[0] = 2
    assert second.tolist() == [2, 1, 1]


class Box(NamedTuple):
    a: int
    b: int


KEPT = {
    "float64": np.float64(0),
    "float32": np.float32(1.5),
    "truth": np.bool_(True),
    "nested": {"best": [np.float64(2), (1, None)]},
    "tensor": torch.ones(2),
    "size": torch.Size([1, 2]),
    "type": torch.float32,
    "bytes": b"x",
    "set": {1, 2},
    "big": 10**30,
}
REFUSED = {
    "array": np.ones(3),
    "inside": {"a": [np.ones(3)]},
    "named": Box(1, 2),
    "path": Path("x"),
    "range": range(3),
    "deque": deque([1]),
    "module_late": torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_the_state_takes_first_it_takes_later_and_hands_over(name: str) -> None:
    value = KEPT[name]
    State(value=value)
    root, newcomer, wire = State(value=None), State(value=None), Wire(0)
    root.value = value
    root.sync(wire, FIRST, Progress())
    newcomer.sync(Wire(1, wire.said), FIRST, Progress())
    assert flat(newcomer.value) == flat(value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_newcomer_could_receive_is_refused_at_the_assignment(name: str) -> None:
    state = State(value=None)
    for _ in range(2):
        with pytest.raises(ScriptError, match=r"state.value is a \w+, which is neither plain"):
            state.value = REFUSED[name]
    assert state.value is None
    if name != "module_late":
        with pytest.raises(ScriptError, match=r"State\(\): 'value' is a \w+, which is neither"):
            State(value=REFUSED[name])
