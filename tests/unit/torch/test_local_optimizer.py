"""Periods in which each rank takes its steps alone: what they learn, and what is refused."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.script.horovod_names import missing_name
from hvd_elastic.torch.optimizer import averager_of
from hvd_elastic.torch.streaming import _divide
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.step import Pass
from tests.unit.torch.two_ranks import TwoRanks
from tests.unit.worker.test_rollback import Training

EXAMPLES, BATCH = 20, 4
Optimizer = torch.optim.Optimizer
Make = Callable[[torch.nn.Module], Optimizer]


def adam(model: torch.nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def sgd(model: torch.nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05)


def nesterov(model: torch.nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)


def made() -> tuple[torch.nn.Module, TensorDataset]:
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(*layers).double()
    return model, TensorDataset(
        torch.randn(EXAMPLES, 3).double(), torch.randn(EXAMPLES, 1).double()
    )


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def trained(
    steps: int, body: Callable[[Any, Any], None], make: Make = sgd, **options: Any
) -> tuple[torch.nn.Module, Any]:
    """Train by ``hvd.steps`` with a body after each step, and return the model and the State."""
    model, data = made()
    optimizer = hvd.LocalOptimizer(make(model), model, **options)
    loader: hvd.DataLoader[Any] = hvd.DataLoader(data, BATCH)

    @hvd.run
    def train(state: Any) -> None:
        for batch in hvd.steps(steps, loader):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            body(state, optimizer)

    state = hvd.State(model=model, optimizer=optimizer)
    train(state)
    return model, state


@pytest.mark.parametrize("local", [True, False])
def test_a_step_over_two_epochs_follows_the_order_of_each(alone: Context, local: bool) -> None:
    """That of the script, which gives each epoch one of its own; 12 batches are 3 steps."""
    model, data = made()
    optimizer = (
        hvd.LocalOptimizer(sgd(model), model, every=4)
        if local
        else hvd.DistributedOptimizer(sgd(model), model)
    )
    indices = [*range(10)]
    loader: hvd.DataLoader[Any] = hvd.DataLoader(
        data, BATCH, order=lambda epoch: indices[epoch:] + indices[:epoch]
    )
    seen: list[torch.Tensor] = []

    @hvd.run
    def train(state: Any) -> None:
        if local:
            for batch in hvd.steps(12, loader):
                seen.append(batch[0])
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            return
        for batch in itertools.chain.from_iterable(loader for _ in hvd.epochs(4)):
            seen.append(batch[0])
            last = len(seen) % 4 == 0
            with nullcontext() if last else optimizer.no_sync():  # type: ignore[attr-defined]
                loss_of(model, batch).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    train(hvd.State(model=model, optimizer=optimizer))
    assert alone.worker.progress.examples == 40
    assert alone.worker.progress.step == (12 if local else 3)
    read = [indices[epoch:] + indices[:epoch] for epoch in range(4)]
    assert torch.equal(torch.cat(seen), torch.cat([data.tensors[0][each] for each in read]))


def test_the_order_of_an_epoch_that_does_not_exist_is_not_asked_for(alone: Context) -> None:
    """The last step of several batches is left open at the end of training."""
    model, data = made()
    optimizer = hvd.DistributedOptimizer(sgd(model), model)
    table = [[*range(EXAMPLES)], [*reversed(range(EXAMPLES))]]
    loader: hvd.DataLoader[Any] = hvd.DataLoader(data, BATCH, order=table.__getitem__)

    @hvd.run
    def train(_: Any) -> None:
        batches = itertools.chain.from_iterable(loader for _ in hvd.epochs(len(table)))
        for number, batch in enumerate(batches, 1):
            with nullcontext() if number % 4 == 0 else optimizer.no_sync():  # type: ignore[attr-defined]
                loss_of(model, batch).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    train(hvd.State(model=model, optimizer=optimizer))
    assert alone.worker.progress.step == 2


def reference(steps: int, every: int, inner: Make, outer: Make | None) -> torch.nn.Module:
    """The algorithm as the papers have it, at one rank."""
    model, data = made()
    own = inner(model)
    begun: list[torch.Tensor] = []
    meets = outer(model) if outer else torch.optim.SGD(model.parameters(), 1.0)
    for step in range(steps):
        if step % every == 0:
            begun = [each.detach().clone() for each in model.parameters()]
        first = step * BATCH % EXAMPLES
        own.zero_grad()
        loss_of(model, data[first : first + BATCH]).backward()
        own.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            with torch.no_grad():
                for parameter, before in zip(model.parameters(), begun, strict=True):
                    parameter.grad = before - parameter
                    parameter.copy_(before)
            meets.step()
    return model


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("every", [1, 3, 4])
def test_local_sgd_at_one_rank_is_plain_training(alone: Context, every: int) -> None:
    seen: list[int] = []
    model, _ = trained(11, lambda *_: seen.append(alone.worker.progress.step), every=every)
    assert_same(model, reference(11, 1, sgd, None))
    ends = [min(11, step) for step in range(every, 11 + every, every)]
    assert sorted(set(seen) - {0}) == ends, "progress moves at the end of a period, by its steps"


def test_diloco_follows_the_paper(alone: Context) -> None:
    model, data = made()
    optimizer: Any = hvd.LocalOptimizer(adam(model), model, every=3, outer=nesterov(model))
    loader: hvd.DataLoader[Any] = hvd.DataLoader(data, BATCH)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)

    @hvd.run
    def train(_: Any) -> None:
        for batch in hvd.steps(11, loader):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            scheduler.step()

    train(hvd.State(model=model, optimizer=optimizer, scheduler=scheduler))
    assert_same(model, reference(11, 3, adam, nesterov))
    assert alone.worker.progress.step == 11
    assert scheduler.last_epoch == 11


def test_a_period_ends_with_the_epoch(alone: Context) -> None:
    model, data = made()
    optimizer = hvd.LocalOptimizer(sgd(model), model, every=4)
    loader: hvd.DataLoader[Any] = hvd.DataLoader(data, BATCH)
    ends: list[int] = []

    @hvd.run
    def train(_: Any) -> None:
        for _epoch in hvd.epochs(2):
            for batch in loader:
                loss_of(model, batch).backward()
                optimizer.step()
                ends.append(alone.worker.progress.step)

    train(hvd.State(model=model, optimizer=optimizer))
    assert ends == [0, 0, 0, 4, 5, 5, 5, 5, 9, 10]


def test_the_time_between_two_meetings_is_known_to_the_leader(alone: Context) -> None:
    """It is how long a request of the leader waits, which asks for a last checkpoint."""
    trained(8, lambda *_: time.sleep(0.02), every=4)
    said = alone.worker.activity()
    assert said.longest_period_s >= 3 * 0.02


# ---- streaming


def streamed(steps: int, every: int, parts: list[list[int]], delay: int, mix: float) -> Any:
    """Streaming DiLoCo at one rank; also returns the shared weights."""
    model, data = made()
    own, meets = adam(model), nesterov(model)
    parameters = list(model.parameters())
    shared = [each.detach().clone() for each in parameters]
    apart = every // len(parts)
    sent: dict[int, torch.Tensor] = {}

    def outer_step(numbers: list[int], keep: float) -> None:
        mine = {number: parameters[number].detach().clone() for number in numbers}
        for number, parameter in enumerate(parameters):
            parameter.grad = sent.get(number)
            parameter.data.copy_(shared[number] if number in mine else parameter)
        meets.step()
        for number, before in mine.items():
            shared[number].copy_(parameters[number].detach())
            parameters[number].data.lerp_(before, keep)
        sent.clear()

    for step in range(1, steps + 1):
        first = (step - 1) * BATCH % EXAMPLES
        own.zero_grad()
        loss_of(model, data[first : first + BATCH]).backward()
        own.step()
        part = parts[(step - 1) // apart % len(parts)]
        if step % apart == (apart - delay) % apart and step != steps:
            sent.update({n: shared[n] - parameters[n].detach() for n in part})
        if step == steps:
            every_one = range(len(parameters))
            sent.update({n: shared[n] - parameters[n].detach() for n in every_one})
            outer_step(list(every_one), 0.0)
        elif step % apart == 0:
            outer_step(part, mix)
    return model, shared


@pytest.mark.parametrize(("delay", "mix"), [(0, 0.0), (0, 0.5), (2, 0.5), (2, 0.0)])
def test_streaming_follows_the_paper(alone: Context, delay: int, mix: float) -> None:
    """Fragments in turn, and at the end of training all of them at once."""
    model, data = made()
    outer = nesterov(model)
    optimizer: Any = hvd.LocalOptimizer(
        adam(model), model, every=6, outer=outer, fragments=2, delay=delay, mix=mix
    )
    loader: hvd.DataLoader[Any] = hvd.DataLoader(data, BATCH)

    @hvd.run
    def train(_: Any) -> None:
        for batch in hvd.steps(20, loader):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    train(hvd.State(model=model, optimizer=optimizer))
    expected, _ = streamed(20, 6, [[0], [1, 2, 3]], delay, mix)
    assert_same(model, expected)
    assert alone.worker.progress.step == 20


@pytest.mark.parametrize(
    ("sizes", "parts", "found"),
    [
        ([12, 4, 4, 1], 2, [1, 3]),
        ([1, 1, 1], 3, [1, 1, 1]),
        ([100, 1, 1], 3, [1, 1, 1]),
        ([1, 1, 100], 3, [1, 1, 1]),
        ([5] * 8, 4, [2, 2, 2, 2]),
        ([1] * 9 + [100], 2, [9, 1]),
    ],
)
def test_fragments_are_alike_and_none_is_empty(
    sizes: list[int], parts: int, found: list[int]
) -> None:
    names = {torch.zeros(size): str(number) for number, size in enumerate(sizes)}
    divided = _divide(names, parts)
    assert [len(part) for part in divided] == found
    assert [name for part in divided for name in part.values()] == list(names.values())


# ---- failures


def everything(training: Training, **streaming: Any) -> dict[str, Any]:
    """Train with all that a script does around its inner steps; returns the state at the end."""
    generators = training.context.worker.generators
    generators.settle(generators.all_bits)  # as all ranks draw alike
    linear = training.model
    norm = torch.nn.BatchNorm1d(3, affine=False).double()
    model = torch.nn.Sequential(norm, torch.nn.Dropout(0.2), linear)
    optimizer = hvd.LocalOptimizer(
        adam(linear), linear, outer=nesterov(linear), **{"every": 3} | streaming
    )
    ema = AveragedModel(linear)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def train(state: Any) -> None:
        for _ in hvd.epochs(2):  # periods of 3 batches and 1
            for (inputs,) in training.loader:
                training.fail("batch")
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                scheduler.step()
                ema.update_parameters(linear)
                state.seen += 1
            training.fail("epoch")

    state = hvd.State(model, optimizer, ema=ema, scheduler=scheduler, seen=0)
    training.run(train, state)
    moments = [value.tolist() for each in optimizer.state.values() for value in each.values()]
    tensors = {**model.state_dict(), **ema.state_dict(prefix="ema.")}
    return {
        "tensors": {name: each.tolist() for name, each in tensors.items()},
        "moments": moments,
        "scheduler": (scheduler.last_epoch, optimizer.param_groups[0]["lr"]),
        "seen": state.seen,
        "progress": training.context.worker.progress,
    }


@pytest.mark.parametrize(
    "streaming", [{}, {"every": 4, "fragments": 2, "delay": 1, "mix": 0.5}], ids=["", "streaming"]
)
def test_a_failure_anywhere_in_a_period_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, streaming: dict[str, Any]
) -> None:
    undisturbed = Training(monkeypatch)
    wanted = everything(undisturbed, **streaming)
    assert (wanted["seen"], wanted["progress"].step) == (8, 8)
    for call in range(1, len(undisturbed.calls) + 1):
        found = everything(Training(monkeypatch, call, call + 2), **streaming)
        assert found == wanted, undisturbed.calls[call - 1]


def one_weight(every: int = 2, **options: Any) -> tuple[torch.nn.Linear, Any]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    made = hvd.LocalOptimizer(
        torch.optim.SGD(model.parameters(), 1.0), model, every=every, **options
    )
    return model, made


def inner_step(
    ctx: Context, model: torch.nn.Module, optimizer: Any, by: float = 1.0, **options: Any
) -> None:
    ctx.hand_out(Pass(**{"step_examples": 8, "weight": 1.0, **options}))
    if ctx.step.ahead is None and ctx.step.continues:
        ctx.step.next_batch(ctx.worker.progress)
    optimizer.zero_grad()
    (model(torch.ones(1, 1)).sum() * by).backward()
    optimizer.step()


def test_the_ranks_meet_once_a_period_and_count_by_their_examples(alone: Context) -> None:
    alone.worker.communicator = ring = TwoRanks(3.0)
    model, optimizer = one_weight()
    inner_step(alone, model, optimizer, weight=0.5)
    assert (model.weight.item(), ring.shapes) == (-1.0, []), "nothing is sent within a period"
    assert optimizer.param_groups[0]["params"][0].grad.item() == 1.0
    inner_step(alone, model, optimizer, weight=1.0)
    assert model.weight.item() == -(0.75 * 2 + 3) / 2
    assert len(ring.shapes) == 1
    assert alone.worker.progress.step == 2


def test_a_batch_without_examples_of_this_rank_is_not_learnt(alone: Context) -> None:
    alone.worker.communicator = TwoRanks(0.0)
    model, optimizer = one_weight()
    inner_step(alone, model, optimizer)
    inner_step(alone, model, optimizer, weight=0.0, padding=True)
    assert model.weight.item() == -0.25, "moved by 1, half of the examples, one of two ranks"


def test_a_period_that_is_not_finite_is_left_out_with_its_moments(alone: Context) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer: Any = hvd.LocalOptimizer(adam(model), model, every=2)
    before = model.weight.item()
    inner_step(alone, model, optimizer, by=float("nan"))
    inner_step(alone, model, optimizer)
    assert model.weight.item() == before
    assert not optimizer.state[model.weight]
    assert (alone.worker.progress.step, alone.worker.progress.skipped) == (2, 1)

    def diverge() -> None:
        for _ in range(100):
            inner_step(alone, model, optimizer, by=float("nan"))

    with pytest.raises(ScriptError, match=r"were not finite in \d+ steps running"):
        diverge()


class Counting(TwoRanks):
    """Counts the bytes that a rank of two sends; the other one is like it."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.bytes = 0

    def sum_async(self, array: Any, name: str) -> Any:
        if name.startswith("gradient"):
            self.bytes += array.nbytes  # one half to add up, the other one to tell
        return array

    def sum_with_flags_async(self, array: Any, flags: Any, name: str) -> Any:
        return self.sum_async(array, name), lambda: flags

    def exchange_async(self, array: Any, name: str) -> Any:
        self.bytes += array.nbytes // 2
        return array

    def gather_async(self, array: Any, name: str) -> Any:
        if not isinstance(array, torch.Tensor):
            return array
        self.bytes += array.nbytes
        return torch.cat([array, array])


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, [0, 0, 0, 2]),
        ({"compression": hvd.Compression.bf16}, [0, 0, 0, 1]),
        ({"fragments": 2}, [0, 1, 0, 1]),
        ({"fragments": 2, "delay": 1, "mix": 0.5}, [1, 0, 1, 0]),
        ({"fragments": 2, "compression": hvd.Compression.fp16}, [0, 0.5, 0, 0.5]),
    ],
)
def test_what_is_sent_and_when(alone: Context, options: dict[str, Any], sent: list[float]) -> None:
    """In layers of 256 KiB, besides at most 5 KiB in a period for flags and comparisons."""
    alone.worker.communicator = ring = Counting()
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(2)])
    optimizer = hvd.LocalOptimizer(sgd(model), model, every=4, **options)
    for layers in sent:
        before = ring.bytes
        alone.hand_out(Pass(step_examples=8, weight=1.0))
        if alone.step.continues:
            alone.step.next_batch(alone.worker.progress)
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        assert 0 <= ring.bytes - before - layers * 2**18 <= 5 * 2**10


@pytest.mark.parametrize("streams", [False, True])
def test_a_checkpoint_has_of_rank_0_what_differs_and_no_rank_loses_its_own(
    alone: Context, streams: bool
) -> None:
    """What is the same on all ranks is written by all; survivors of a change keep all they have."""
    options = {"fragments": 2, "mix": 0.5} if streams else {}
    model, state = trained(7, lambda *_: None, adam, every=4, **options)
    averager: Any = averager_of(state.optimizer)
    moments = {each.data_ptr() for v in state.optimizer.state.values() for each in v.values()}
    weights = {each.data_ptr() for each in model.parameters()}
    shared = {each.data_ptr() for each in averager.shared_weights().values()}
    assert bool(shared) is streams
    assert state._shared() == (shared if streams else weights)
    assert state.lasting() == moments | weights | shared
    content = state.content()
    assert len(content.own) == len(moments) + streams * len(weights)


def test_a_failure_sets_the_learning_rate_of_the_outer_optimizer_back(alone: Context) -> None:
    """A scheduler of it may have changed it within the period."""
    model, _ = made()
    outer = nesterov(model)
    optimizer = hvd.LocalOptimizer(sgd(model), model, every=4, outer=outer)
    state: Any = hvd.State(model=model, optimizer=optimizer)
    state.keep("_outer", outer)
    before = state.take_snapshot()
    outer.param_groups[0]["lr"] = 0.1
    before.restore({}, {"optimizer": optimizer, "_outer": outer})
    assert outer.param_groups[0]["lr"] == 0.7


# ---- what is refused


def broken_body(problem: str) -> Callable[[Any, Any], None]:
    scaler = hvd.GradScaler("cpu")

    def body(state: Any, optimizer: Any) -> None:
        if problem == "twice":
            optimizer.step()
        elif problem == "no_sync":
            with optimizer.no_sync():
                pass
        elif problem == "scaler":
            scaler.scale(loss_of(state.model, made()[1][:2])).backward()
        elif problem == "step_weight":
            hvd.step_weight(3)
        elif problem == "closure":
            optimizer.step(lambda: 0.0)
        else:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})

    return body


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ("twice", "called a second time for a batch"),
        ("no_sync", "average nothing in a backward pass. Leave it out"),
        ("scaler", "a scale of its own. Train in bfloat16"),
        ("step_weight", r"hvd.step_weight\(\) with hvd.LocalOptimizer"),
        ("closure", "Optimizers that need a closure"),
        ("add_param_group", r"optimizer.add_param_group\(\) after LocalOptimizer"),
    ],
)
def test_what_a_loop_body_must_not_do(alone: Context, problem: str, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        trained(10, broken_body(problem), every=3)


def test_a_step_after_the_end_of_a_period_is_refused(alone: Context) -> None:
    with pytest.raises(ScriptError, match="whose period has ended by an earlier") as caught:
        trained(10, lambda _, optimizer: optimizer.step(), every=1)
    assert "commit" not in str(caught.value), "it ends no period"


def test_a_loop_that_is_left_within_a_period_is_refused(alone: Context) -> None:
    model, data = made()
    optimizer = hvd.LocalOptimizer(sgd(model), model, every=4)
    loader: hvd.DataLoader[Any] = hvd.DataLoader(data, BATCH)

    @hvd.run
    def train(_: Any) -> None:
        for number, batch in enumerate(hvd.steps(10, loader), 1):
            loss_of(model, batch).backward()
            optimizer.step()
            if number == 2:
                break

    with pytest.raises(ScriptError, match=r"left within a period of hvd.LocalOptimizer, after 2 b"):
        train(hvd.State(model=model, optimizer=optimizer))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "a whole number of at least 1"),
        ({"every": 2.5}, "a whole number of at least 1"),
        ({}, "missing a required argument: 'every'"),
        ({"every": 2, "sync_every": 3}, "has no argument sync_every=: do you mean every=?"),
        ({"every": 2, "outer": 0.7}, "wraps a torch.optim optimizer, not a float"),
        (
            {"every": 2, "outer": sgd(torch.nn.Linear(1, 1))},
            "two optimizers of the same parameters",
        ),
        ({"every": 2, "compression": "bf16"}, "use none, fp16 or bf16"),
        ({"every": 4, "fragments": 2}, "trains 1 parameters, and a fragment has at least one"),
        ({"every": 4, "delay": 4}, "so the delay is less than 4 batches"),
        ({"every": 4, "delay": -1}, "of at least 0 \\(batches for which training continues"),
        ({"every": 4, "mix": 1.0}, "a number from 0 to below 1"),
    ],
)
def test_bad_arguments_are_named(alone: Context, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        one_weight(**{"every": 2} | options) if "every" in options else hvd.LocalOptimizer(  # type: ignore[call-arg]
            sgd(torch.nn.Linear(1, 1))
        )


def test_it_is_the_only_optimizer_and_its_batch_is_fixed(alone: Context) -> None:
    _, data = made()
    one_weight()
    with pytest.raises(
        ScriptError, match=r"hvd.LocalOptimizer with hvd.DataLoader\(max_batch_size"
    ):
        hvd.DataLoader(data, BATCH, max_batch_size=16)
    other = torch.nn.Linear(1, 1)
    with pytest.raises(ScriptError, match=r"hvd.LocalOptimizer is the only optimizer"):
        hvd.DistributedOptimizer(sgd(other), other)


def test_the_state_has_to_hold_it(alone: Context) -> None:
    model, _ = one_weight()
    with pytest.raises(ScriptError, match=r"given to hvd.LocalOptimizer is not in the State"):
        hvd.run(lambda _: None)(hvd.State(model=model))


def test_tensorflow_has_none() -> None:
    with pytest.raises(AttributeError, match="it is for PyTorch; with TensorFlow and Keras"):
        missing_name("hvd_elastic.keras")("LocalOptimizer")


def test_an_epoch_shorter_than_a_period_is_told(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", told.append)
    model, data = made()
    optimizer = hvd.LocalOptimizer(sgd(model), model, every=100)
    loader: hvd.DataLoader[Any] = hvd.DataLoader(data, BATCH)

    @hvd.run
    def train(_: Any) -> None:
        for _epoch in hvd.epochs(3):
            for batch in loader:
                loss_of(model, batch).backward()
                optimizer.step()

    train(hvd.State(model=model, optimizer=optimizer))
    (one,) = [each for each in told if "LocalOptimizer" in each]
    assert "an epoch has 5 batches" in one


@pytest.mark.parametrize(("every", "warnings"), [(1, 0), (3, 1)])
def test_what_is_saved_within_a_period_is_said_to_be_of_one_rank(
    alone: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every: int, warnings: int
) -> None:
    told: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", told.append)
    monkeypatch.chdir(tmp_path)
    trained(6, lambda state, _: hvd.save("last.pt", state.model.state_dict()), every=every)
    assert len([each for each in told if "hvd.save()" in each]) == warnings
