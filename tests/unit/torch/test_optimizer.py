"""Averaged gradients, with the other ranks played by an engine in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hvd_elastic.communicator.interface import RingRank
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.goodput import BatchLimits
from hvd_elastic.script.run import run
from hvd_elastic.torch.finite_check import is_finite
from hvd_elastic.torch.optimizer import DistributedOptimizer, averager_of
from hvd_elastic.torch.state import State
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.planning.planner import Planner
from hvd_elastic.worker.step import Pass, Stage
from hvd_elastic.worker.worker import RunRank
from tests.unit.torch.two_ranks import TwoRanks, hand_out


@pytest.fixture
def two(alone: Context) -> TwoRanks:
    engine = TwoRanks(other=3.0)
    alone.worker.communicator = engine
    return engine


def linear(requires: bool = True) -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0)
    return model.requires_grad_(requires)


def adapts_now(ctx: Context) -> None:
    """Have a batch that adapts from now on."""
    ctx.register_data(64, 0, AdaptivePlanner(BatchLimits(8, 16), examples=64))


@pytest.mark.parametrize(("weight", "gradient"), [(1.0, 2.0), (0.5, 1.75), (0.0, 1.5)])
def test_the_mean_over_ranks_is_weighted_by_their_examples(
    alone: Context, two: TwoRanks, weight: float, gradient: float
) -> None:
    model = linear()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    hand_out(alone, weight)
    model(torch.ones(1, 1)).sum().backward()  # gradient 1
    optimizer.step()
    assert model.weight.item() == -gradient
    assert two.gradients == ["gradient.0"]
    assert alone.worker.progress.step == 1
    assert alone.worker.progress.examples == 8


def test_it_stays_the_users_optimizer(alone: Context) -> None:
    model = linear()
    own = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = DistributedOptimizer(own, model)
    assert optimizer is own
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hand_out(alone)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    schedule.step()
    assert model.weight.item() == -0.5


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_keeps_an_optimizer_from_training_is_known(alone: Context, ranks: int) -> None:
    if ranks == 2:
        alone.worker.communicator = TwoRanks(other=3.0)
    model = linear()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    averager = averager_of(optimizer)
    assert averager is not None
    assert "step() was never called" in averager.idle
    hand_out(alone)
    optimizer.step()
    assert "no parameter of the optimizer had a gradient" in averager.idle
    optimizer.zero_grad()
    hand_out(alone)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert averager.idle == ""


def test_a_parameter_that_only_another_rank_used_takes_part(alone: Context, two: TwoRanks) -> None:
    used, unused = linear(), linear()
    parameters = [*used.parameters(), *unused.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    hand_out(alone)
    used(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert unused.weight.item() == -1.5
    assert two.gradients == ["gradient.0"], "one bucket"


def test_frozen_parameters_are_left_alone(alone: Context, two: TwoRanks) -> None:
    frozen, model = linear(requires=False), linear()
    parameters = [*frozen.parameters(), *model.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    hand_out(alone)
    model(frozen(torch.ones(1, 1)) + 1).sum().backward()
    optimizer.step()
    assert len(two.gradients) == 1
    assert frozen.weight.item() == 0


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_is_frozen_later_stays_as_it_is(
    alone: Context, ranks: int, adapts: bool
) -> None:
    """With momentum and decay a zero gradient would move it."""
    alone.worker.communicator = engine = TwoRanks(other=0.0)
    engine.size = ranks
    frozen, model = linear(), linear()
    parameters = [*frozen.parameters(), *model.parameters()]
    sgd = torch.optim.SGD(parameters, lr=0.5, momentum=0.9, weight_decay=0.1)
    optimizer = DistributedOptimizer(sgd, lr_rule="none")
    if adapts:
        adapts_now(alone)
    places = []
    for learns in (True, False, False, True):
        frozen.requires_grad_(learns)
        optimizer.zero_grad()
        hand_out(alone)
        (model(torch.ones(1, 1)) + frozen(torch.ones(1, 1))).sum().backward()
        optimizer.step()
        assert (frozen.weight.grad is None) is not learns
        places.append(frozen.weight.item())
    assert places[0] == places[1] == places[2] != places[3]
    assert alone.worker.progress.step == 4


def test_sparse_gradients_of_one_rank_are_dense_too(alone: Context) -> None:
    """Adam takes no others, and the moments of SGD must be of the same layout at any size."""
    model = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1.0), model)
    hand_out(alone)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert model.weight.grad is not None
    assert not model.weight.grad.is_sparse


def test_bfloat16_gradients_are_reduced_as_float(alone: Context, two: TwoRanks) -> None:
    model = linear().to(torch.bfloat16)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    hand_out(alone)
    model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert model.weight.item() == -2.0


def test_clipping_sees_the_average(alone: Context, two: TwoRanks) -> None:
    model = linear()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    hand_out(alone)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.synchronize()  # type: ignore[attr-defined]
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 2.0
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert model.weight.item() == pytest.approx(-1.0, abs=1e-5)
    assert two.gradients == ["gradient.0"], "reduced once"


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unused", [0, 1])
def test_clipping_what_is_on_its_way_is_refused(
    alone: Context, two: TwoRanks, kind: torch.dtype, unused: int
) -> None:
    """Without an error the ranks go apart, or clip their own gradients if one is missing yet."""
    model = linear().to(kind)
    others = [torch.nn.Parameter(torch.zeros(1, dtype=kind)) for _ in range(unused)]
    parameters = [*model.parameters(), *others]
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), model)
    hand_out(alone)
    model(torch.ones(1, 1, dtype=kind)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ScriptError, match=r"'weight' was changed .* optimizer.synchronize\(\)"):
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("step", [0, 8])
def test_a_gradient_that_is_changed_through_data_is_refused(
    alone: Context, request: pytest.FixtureRequest, kind: torch.dtype, ranks: int, step: int
) -> None:
    """``grad.data`` is a tensor with a version of its own; also at one rank, which may get more."""
    if ranks == 2:
        request.getfixturevalue("two")
    weight = torch.nn.Parameter(torch.ones(3, dtype=kind))
    optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    alone.worker.progress.step = step
    hand_out(alone)
    weight.abs().square().sum().backward()
    assert weight.grad is not None
    weight.grad.data.mul_(-1)
    with pytest.raises(
        ScriptError, match=r"'parameter.0' was changed .* optimizer.synchronize\(\)"
    ):
        optimizer.step()


def test_clipping_before_the_average_is_refused_at_one_rank_too(alone: Context) -> None:
    model = linear()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    hand_out(alone)
    model(torch.ones(1, 1)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ScriptError, match=r"'weight' was changed .* optimizer.synchronize\(\)"):
        optimizer.step()


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_backward_passes_for_one_step_are_refused_with_a_way_out(
    alone: Context, request: pytest.FixtureRequest, ranks: int
) -> None:
    """On a single rank too: the script will not stay alone."""
    if ranks == 2:
        request.getfixturevalue("two")
    model = linear()
    DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    hand_out(alone)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(ScriptError, match=r"'weight' was computed twice.*optimizer.no_sync\(\)"):
        model(torch.ones(1, 1)).sum().backward()


def test_passes_without_averaging_are_weighted_each_by_its_own_share(
    alone: Context, two: TwoRanks
) -> None:
    """And the ranks exchange nothing before the last of them."""
    model = linear()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    for weight in (0.5, 0.0):
        hand_out(alone, weight)
        with optimizer.no_sync():
            model(torch.ones(1, 1)).sum().backward()  # gradient 1
        assert alone.step.accumulating
        alone.step.next_batch(alone.worker.progress)
    assert two.gradients == []
    hand_out(alone, 2.0)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert model.weight.item() == -(0.5 + 0.0 + 2.0 + 3.0) / 2
    assert two.gradients == ["gradient.0"]
    assert (alone.worker.progress.step, alone.worker.progress.examples) == (1, 24)


def test_passes_without_averaging_come_before_the_one_that_is_averaged(
    alone: Context, two: TwoRanks
) -> None:
    model = linear()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    hand_out(alone)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(ScriptError, match="are being averaged"), optimizer.no_sync():
        pass
    optimizer.synchronize()
    with pytest.raises(ScriptError, match="are being averaged"), optimizer.no_sync():
        pass


class LeftOut(LocalCommunicator):
    """Of two ranks this is the second; the first leaves the step out, or takes it."""

    rank, size = RingRank(1), 2

    def __init__(self, first: bool) -> None:
        self.first = first
        self.shapes: list[tuple[int, ...]] = []

    def reduce_async(self, tensor: Any, name: str, *, sent_as: str = "") -> Any:
        self.shapes.append(tuple(tensor.shape))
        if name == "hvd_elastic.change":
            other = tensor.copy()
            other[3] = self.first
            return (tensor + other) / 2
        return tensor

    def wait(self, handle: Any) -> Any:
        if handle.ndim > 2 and not self.first:
            raise ScriptError("what the ranks exchange does not fit together: Mismatched shapes.")
        return handle

    def gather(self, array: Any, name: str) -> Any:
        return np.concatenate([[[int(self.first), 0]], array])


class Accumulates(LocalCommunicator):
    """One of two ranks; the other one adds up passes without end, or takes each step."""

    def __init__(self, rank: int, other: bool) -> None:
        self.rank, self.size, self.other = RingRank(rank), 2, other
        self.checks = 0

    def wait(self, handle: Any) -> Any:
        checks = handle.ndim > 3  # buckets have 1 dimension, and what is left out has 3
        self.checks += checks
        if checks != self.other and isinstance(handle, torch.Tensor):
            raise ScriptError("what the ranks exchange does not fit together: Mismatched shapes.")
        return handle

    def gather(self, array: Any, name: str) -> Any:
        rows = [array, [[0, 32 * self.other]]]
        return np.concatenate(rows if self.rank == 0 else rows[::-1])


def add_up(alone: Context, model: torch.nn.Module, optimizer: Any) -> None:
    if alone.step.ahead is None and not alone.step.accumulating:
        hand_out(alone)
    else:
        alone.step.next_batch(alone.worker.progress)
        alone.hand_out(Pass(step_examples=8, weight=1.0))
    with optimizer.no_sync():
        model(torch.ones(1, 1)).sum().backward()


def test_ranks_that_all_add_up_check_it_in_long_steps_only(alone: Context) -> None:
    model = linear()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    alone.worker.communicator = communicator = Accumulates(0, other=True)
    checks = []
    for _ in range(130):
        add_up(alone, model, optimizer)
        checks.append(communicator.checks)
    assert [checks.index(number) + 1 for number in (1, 2, 3)] == [32, 64, 128]
    assert checks[-1] == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_alone_adds_up_passes_is_an_error_on_all(alone: Context, rank: int) -> None:
    """The other one waits for its gradients."""
    model = linear()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    words = (
        r"32 backward passes of step 1 were .* `with optimizer.no_sync\(\):` on rank 1 alone, of 2"
    )
    alone.worker.communicator = Accumulates(rank, other=rank == 0)
    if rank == 0:
        hand_out(alone)
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(ScriptError, match=words):
            optimizer.step()
        return
    for _ in range(31):
        add_up(alone, model, optimizer)
    with pytest.raises(ScriptError, match=words):
        add_up(alone, model, optimizer)


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("commits", [False, True])
def test_a_step_that_one_rank_alone_leaves_out_is_an_error(
    alone: Context, adapts: bool, commits: bool
) -> None:
    model = linear()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    if adapts:
        adapts_now(alone)
    alone.register_data(64, 0, Planner(8))

    def goes_on(other_too: bool) -> None:
        alone.worker.communicator = LeftOut(other_too)
        hand_out(alone)
        if commits:
            alone.commit({})
        alone.mark_consumed()

    goes_on(other_too=True)
    assert alone.worker.progress.step == 1
    alone.worker.communicator = LeftOut(first=False)
    hand_out(alone)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert alone.worker.progress.step == 2
    with pytest.raises(ScriptError, match=r"step 3 was left out on rank 1 alone, of 2.*allreduce"):
        goes_on(other_too=False)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("after_backward", [False, True])
def test_a_commit_before_the_step_does_not_end_it(
    alone: Context, ranks: int, after_backward: bool
) -> None:
    if ranks == 2:
        alone.worker.communicator = TwoRanks(other=3.0)
    model = linear()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    alone.register_data(64, 0, Planner(8))
    for step in (1, 2):
        hand_out(alone)
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).sum()
        if after_backward:
            loss.backward()
        alone.commit({})
        assert alone.worker.progress.step == step - 1, "a failure repeats the batch"
        if not after_backward:
            loss.backward()
        optimizer.step()
        alone.mark_consumed()
        progress = alone.worker.progress
        assert (progress.step, progress.position) == (step, 8 * step)


def test_a_step_that_is_called_off_may_be_left_out(alone: Context) -> None:
    """One rank had no memory for it, and another one would not have taken it."""
    alone.worker.communicator = LeftOut(first=False)
    model = linear()
    DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    adapts_now(alone)
    hand_out(alone)
    alone.step.is_too_large = True
    alone.mark_consumed()
    assert alone.step.stage is Stage.VOIDED
    assert alone.worker.progress.step == 0


def test_an_optimizer_is_averaged_once(alone: Context) -> None:
    first = DistributedOptimizer(torch.optim.SGD(linear().parameters(), lr=1.0))
    with pytest.raises(ScriptError, match="averaged already, by an earlier call or by horovod"):
        DistributedOptimizer(first)


def test_what_is_no_optimizer_is_refused(alone: Context) -> None:
    with pytest.raises(ScriptError, match=r"wraps a torch\.optim optimizer, not a Linear"):
        DistributedOptimizer(linear())  # type: ignore[arg-type]


@pytest.mark.parametrize("adapts", [False, True])
def test_a_closure_is_refused(alone: Context, adapts: bool) -> None:
    """Its gradients would come after those of the step were averaged, and passes be left out."""
    model = linear()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    if adapts:
        adapts_now(alone)
    hand_out(alone)
    optimizer.zero_grad()
    with pytest.raises(ScriptError, match=r"call backward\(\) before step\(\)"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ScriptError, match=r"call backward\(\) before step\(\)"):
        optimizer.step(closure=lambda: 0.0)


@pytest.mark.parametrize("adapts", [False, True])
def test_a_parameter_group_that_is_added_later_is_refused(alone: Context, adapts: bool) -> None:
    """Its gradients would be those of one rank, and the ranks' weights differ without a word."""
    model = torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD([model.weight], lr=1.0), model)
    if adapts:
        adapts_now(alone)
    optimizer.add_param_group({"params": [model.bias]})
    hand_out(alone)
    model(torch.ones(2, 2)).sum().backward()
    with pytest.raises(ScriptError, match=r"add_param_group.*freeze those that are to be trained"):
        optimizer.step()


@pytest.mark.parametrize("adapts", [False, True])
def test_gradients_of_a_parameter_that_is_unfrozen_later_are_averaged(
    alone: Context, two: TwoRanks, adapts: bool
) -> None:
    backbone, head, unused = linear(requires=False), linear(), linear(requires=False)
    parameters = [*backbone.parameters(), *head.parameters(), *unused.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), lr_rule="none")
    if adapts:
        adapts_now(alone)
    for learns in (False, True, True):
        backbone.requires_grad_(learns)
        unused.requires_grad_(learns)
        optimizer.zero_grad()
        hand_out(alone)
        (backbone(torch.ones(1, 1)) + head(torch.ones(1, 1))).sum().backward()
        optimizer.step()
        assert (unused.weight.grad is not None) is learns
    assert two.gradients == ["gradient.0"] * 3
    assert two.shapes[0] != two.shapes[1] == two.shapes[2], "a rank alone in it would be noticed"
    # The mean of this rank's gradient, 1 or none, and the other's, 3.
    assert [p.item() for p in (backbone.weight, head.weight, unused.weight)] == [-4, -6, -3]


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("was_frozen", [False, True])
def test_ranks_reduce_the_same_whatever_they_have_trained_before(
    alone: Context,
    two: TwoRanks,
    monkeypatch: pytest.MonkeyPatch,
    was_frozen: bool,
    to_none: bool,
) -> None:
    """Newcomers do not know it: they have no gradients, and the state's frozen parameters."""
    backbone, head = linear(requires=not was_frozen), linear()
    parameters = [*backbone.parameters(), *head.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    State(model=backbone, head=head, optimizer=optimizer)
    monkeypatch.setattr(State, "sync", lambda *_: alone.worker.progress)
    for learns in (True, False, True, True):
        alone.rescaling.synchronize_state(RunRank(0))  # a generation begins
        backbone.requires_grad_(learns)
        optimizer.zero_grad(set_to_none=to_none)
        hand_out(alone)
        (backbone(torch.ones(1, 1)) + head(torch.ones(1, 1))).sum().backward()
        optimizer.step()
        assert (backbone.weight.grad is not None) is learns
    assert two.shapes[0] != two.shapes[1] != two.shapes[2]
    assert two.shapes[0] == two.shapes[2] == two.shapes[3]


def test_a_newcomer_does_not_wait_for_the_others_to_unfreeze_again(
    alone: Context, two: TwoRanks
) -> None:
    """The received state unfreezes what the others have been training already."""
    model = linear(requires=False)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    alone.worker.generation = 3
    model.requires_grad_(True)
    hand_out(alone)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert two.gradients == ["gradient.0"]
    assert model.weight.item() == -2


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        (torch.full((100,), 6e4, dtype=torch.float16), True),  # their sum overflows
        (torch.tensor([1.0, float("inf")], dtype=torch.float16), False),
        (torch.full((1,), 1.5e308 + 1.5e308j, dtype=torch.complex128), True),
        (torch.tensor([complex(0, float("nan"))]), False),
        (torch.zeros(0), True),
        (torch.tensor([0.0, float("inf"), -float("inf")]).to_sparse(), False),
    ],
)
def test_gradients_of_any_type_are_told_finite(values: torch.Tensor, finite: bool) -> None:
    assert is_finite(values) is finite


@pytest.mark.parametrize("gradients", ["on their way", "averaged", "cleared"])
def test_a_step_that_is_left_out_after_its_gradients_is_one_of_all_ranks(
    alone: Context, gradients: str
) -> None:
    model = linear()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)

    def goes_on(other_too: bool) -> None:
        alone.worker.communicator = LeftOut(other_too)
        hand_out(alone)
        if gradients != "cleared":
            optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        if gradients == "averaged":
            optimizer.synchronize()
        if gradients == "cleared":
            optimizer.zero_grad()
        alone.mark_consumed()

    goes_on(other_too=True)
    goes_on(other_too=True)
    assert (alone.worker.progress.step, model.weight.item()) == (2, 0.0)
    with pytest.raises(ScriptError, match="step 3 was left out on rank 1 alone, of 2"):
        goes_on(other_too=False)


def training(alone: Context, step: Any) -> list[str]:
    """Return the warnings of one step on two ranks."""
    told: list[str] = []
    alone.worker.warn = told.append  # type: ignore[assignment, method-assign]
    model = linear()
    optimizer = DistributedOptimizer(step.wraps(model.parameters()), model)

    @run
    def train(state: State) -> None:
        alone.worker.communicator = TwoRanks(other=0.0)  # it is alone until then
        hand_out(alone)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        step()

    train(State(model=model, optimizer=optimizer))
    return told


class Plain:
    """A step of another optimizer."""

    wraps: Any = torch.optim.Adagrad

    def __call__(self) -> None:
        torch.optim.Adam([torch.nn.Parameter(torch.zeros(3, 2))]).step()


class Nested:
    """An optimizer that takes its step by that of another one."""

    class wraps(torch.optim.SGD):  # noqa: N801
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            torch.optim.Adam([torch.nn.Parameter(torch.zeros(3, 2))]).step()
            super().step()

    def __call__(self) -> None:
        """Nothing follows."""


@pytest.mark.parametrize("own_data", [False, True])
def test_a_batch_of_another_loader_is_warned_of_unless_it_is_meant(
    alone: Context, caplog: pytest.LogCaptureFixture, own_data: bool
) -> None:
    alone.worker.mode, alone.worker.in_train, alone.own_data = Mode.STATIC, True, own_data
    model = linear()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    told = [message.endswith("hvd.init(own_data=True)") for message in caplog.messages]
    assert told == [True] * (not own_data)


def test_an_optimizer_that_nobody_knows_of_is_named(alone: Context) -> None:
    (told,) = (each for each in training(alone, Plain()) if "a sum over" not in each)
    assert "the Adam that takes a step at test_optimizer.py:" in told
    assert "1 parameter, the first of shape (3, 2), are not averaged" in told


def test_an_optimizer_that_nobody_knows_of_is_an_error_of_an_audited_run(alone: Context) -> None:
    alone.worker.audit = True
    with pytest.raises(ScriptError, match="the Adam that takes a step"):
        training(alone, Plain())


@pytest.mark.parametrize("early", [True, False])
def test_an_optimizer_that_lasts_and_is_not_averaged_is_refused_alone_too(
    alone: Context, early: bool
) -> None:
    """Made before the training function, or with what the State holds."""
    model = linear()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    other = torch.nn.Parameter(torch.zeros(1)) if early else model.weight
    apart = [torch.optim.Adam([other])] if early else []

    @run
    def train(state: State) -> None:
        (apart or [torch.optim.Adam([other])])[0].step()

    with pytest.raises(ScriptError, match=r"the Adam that takes a step at .* was not given to"):
        train(State(model=model, optimizer=optimizer))


def test_an_optimizer_in_the_wrapped_one_is_a_part_of_it(alone: Context) -> None:
    assert not [each for each in training(alone, Nested()) if "takes a step" in each]


@pytest.mark.parametrize("through", ["itself", "data", "other data"])
def test_parameters_that_change_before_the_step_are_warned_of_once(
    alone: Context, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    """As SAM changes them: a failure there would leave the changed values."""
    monkeypatch.setattr(type(alone.worker), "elastic", True)
    warnings: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", warnings.append)
    model = linear()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    State(model=model, optimizer=optimizer)

    def body(before: float = 0.0, after: float = 0.0) -> None:
        hand_out(alone)
        optimizer.zero_grad()
        with torch.no_grad():
            if before and through == "other data":
                model.weight.data = model.weight.data + before
            elif before:
                (model.weight if through == "itself" else model.weight.data).add_(before)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight.add_(after)
        alone.rollback.body_ended(voided=False)

    for _ in range(4):
        body(after=0.5)
    assert not warnings, "after the step is the place for it"
    for _ in range(8):
        body(before=0.5)
    (warning,) = warnings
    assert "changes 'weight' in the loop body before optimizer.step()" in warning
    assert "functional_call" in warning
