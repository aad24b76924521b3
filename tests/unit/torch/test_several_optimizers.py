"""Several optimizers: each averages in its own step, and a loop body is undone as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.copies import OptimizerCopy
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.planning.planner import Planner
from hvd_elastic.worker.worker import Worker
from tests.unit.torch.two_ranks import TwoRanks, hand_out
from tests.unit.worker.test_rollback import Meter, Training

BODIES = 6


@pytest.fixture
def two(alone: Context) -> TwoRanks:
    alone.worker.communicator = communicator = TwoRanks(other=3.0)
    return communicator


def linear() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    return model


def sgd(*models: torch.nn.Module, lr: float = 1.0) -> Any:
    parameters = [parameter for model in models for parameter in model.parameters()]
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=lr), models[0])


def test_each_averages_its_own_gradients_in_its_own_step(alone: Context, two: TwoRanks) -> None:
    generator, discriminator = linear(), linear()
    first, second = sgd(generator), sgd(discriminator)
    hand_out(alone, weight=0.5)
    discriminator(generator(torch.ones(1, 1))).sum().backward()
    discriminator(generator(torch.ones(1, 1))).sum().backward()
    assert two.names == [], "a pass of another loss may still come"
    first.step()
    assert two.gradients == ["gradient.0"]
    assert generator.weight.item() == 1 - (0.5 * 2 + 3) / 2
    assert discriminator.weight.grad is not None
    assert discriminator.weight.grad.item() == 2.0, "left alone"
    second.step()
    assert two.gradients == ["gradient.0", "gradient:2.0"]
    assert discriminator.weight.item() == 1 - (0.5 * 2 + 3) / 2
    assert two.names.count("hvd_elastic.change") == 1, "flags are exchanged once a body"


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_are_clipped_before_they_are_averaged_are_an_error(
    alone: Context, size: int
) -> None:
    alone.worker.communicator = LocalCommunicator() if size == 1 else TwoRanks(other=3.0)
    generator, discriminator = linear(), linear()
    first, second = sgd(generator), sgd(discriminator)
    hand_out(alone)
    for optimizer, model in ((first, generator), (second, discriminator)):
        optimizer.zero_grad()
        discriminator(generator(torch.ones(1, 1))).sum().backward()
        if optimizer is first:
            optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if optimizer is first:
            first.step()
    assert generator.weight.item() == pytest.approx(0.5)
    with pytest.raises(ScriptError, match=r"call optimizer\.synchronize\(\) after backward"):
        second.step()


def test_a_body_counts_when_it_ends(alone: Context, two: TwoRanks) -> None:
    models = linear(), linear()
    first, second = map(sgd, models)
    alone.register_data(64, 0, Planner(8))
    for steps in ([first, first, second], [second], []):
        before = alone.worker.progress.step
        hand_out(alone)
        for optimizer in steps:
            sum(model(torch.ones(1, 1)).sum() for model in models).backward()
            optimizer.step()
            alone.commit({})
            assert alone.worker.progress.step == before
        alone.mark_consumed()
        assert alone.worker.progress.step == before + 1
    assert alone.worker.progress.examples == 24
    assert two.names.count("hvd_elastic.change") == 3


class LeftOut(TwoRanks):
    """The other rank leaves the body out."""

    def reduce_async(self, array: Any, name: str, *, sent_as: str = "") -> Any:
        if name == "hvd_elastic.change":
            other = array.copy()
            other[3] = 1 - array[3]
            return (array + other) / 2
        assert not name.startswith("gradient") or array is not None
        return super().reduce_async(array, name)

    def wait(self, handle: Any) -> Any:
        assert isinstance(handle, np.ndarray), "the other rank never reduces a gradient"
        return handle

    def gather(self, array: Any, name: str) -> Any:
        return np.concatenate([array, [[0 if array[0, 0] else 1, 0]]])


@pytest.mark.parametrize("steps", [True, False])
def test_a_body_that_one_rank_alone_leaves_out_is_an_error(alone: Context, steps: bool) -> None:
    model = linear()
    first, _ = sgd(model), sgd(linear())
    alone.worker.communicator = LeftOut()
    hand_out(alone)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(ScriptError, match=r"step 1 was left out on rank . alone, of 2"):
        first.step() if steps else alone.mark_consumed()


def test_accumulation_by_hand_is_refused(alone: Context, two: TwoRanks) -> None:
    first, _ = sgd(linear()), sgd(linear())
    hand_out(alone)
    with pytest.raises(ScriptError, match="a loop body is one step"), first.no_sync():
        pass


def test_a_pass_between_synchronize_and_step_is_refused(alone: Context, two: TwoRanks) -> None:
    """It would add the gradient of one rank to the average."""
    model, other = linear(), linear()
    first, _ = sgd(model), sgd(other)
    hand_out(alone)
    model(torch.ones(1, 1)).sum().backward()
    first.synchronize()
    other(torch.ones(1, 1)).sum().backward()
    with pytest.raises(ScriptError, match=r"'weight' was averaged by synchronize\(\)"):
        other(model(torch.ones(1, 1))).sum().backward()


# -- which optimizers train


def run(state: hvd.State, function: Any = lambda state: None) -> None:
    context.current().has_trained = False  # each is another script
    hvd.run(function)(state)


def test_two_optimizers_of_the_state_with_one_parameter_are_refused(alone: Context) -> None:
    model, other = linear(), torch.nn.Linear(2, 2)
    first, second = sgd(model), sgd(other, model)
    state = hvd.State(model=model, optimizer=first, second=second)
    with pytest.raises(ScriptError, match=r"State\(optimizer=..., second=...\): both .*'weight'"):
        run(state)


def test_a_parameter_that_the_state_lacks_is_refused(alone: Context) -> None:
    """A worker that joins would begin with a value of its own, as for a temperature of SAC."""
    model, alpha = linear(), torch.zeros(1, requires_grad=True)
    temperature = hvd.DistributedOptimizer(torch.optim.Adam([alpha], lr=0.1))
    state = {"model": model, "optimizer": sgd(model), "second": temperature}
    with pytest.raises(ScriptError, match=r"second=...\): this Adam trains parameter.0 of shape"):
        run(hvd.State(**state))
    run(hvd.State(**state, alpha=alpha))
    run(hvd.State(**state, values={"alpha": [alpha]}))


def test_an_optimizer_whose_parameters_are_all_frozen_trains_them_later(alone: Context) -> None:
    """As that of a backbone, while the head is trained first."""
    body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    body.requires_grad_(False)
    before = body.weight.detach().clone()
    slow, fast = sgd(body), sgd(head)
    loader: hvd.DataLoader[Any] = hvd.DataLoader(TensorDataset(torch.ones(8, 2)), 4)
    frozen = []

    def train(state: hvd.State) -> None:
        for epoch in hvd.epochs(4):
            body.requires_grad_(epoch >= 2)
            for (inputs,) in loader:
                slow.zero_grad()
                fast.zero_grad()
                head(body(inputs)).square().mean().backward()
                if epoch >= 2:
                    slow.step()
                fast.step()
            frozen.append(torch.equal(body.weight, before))

    hvd.run(train)(hvd.State(body=body, head=head, slow=slow, fast=fast))
    assert frozen == [True, True, False, False]


def test_an_optimizer_that_the_state_lacks_is_refused_before_the_first_step(
    alone: Context,
) -> None:
    """Its learning rate and what it gathers would be lost in a worker that joins."""
    model = linear()
    optimizer = sgd(model)
    wrapper = type("Wrapper", (), {"state_dict": dict, "load_state_dict": dict})
    with pytest.raises(ScriptError, match=r"the SGD that was given to .* is not in the State"):
        run(hvd.State(model=model))
    held = wrapper()
    held.inner = optimizer
    run(hvd.State(model=model, held=held))
    with pytest.raises(ScriptError, match=r"the optimizer trains weight of shape.*State\(model="):
        run(hvd.State(held=held))


def test_what_no_optimizer_trains_in_a_trained_module_is_undone(alone: Context) -> None:
    """A momentum encoder beside its query encoder, in one module."""
    query, key, other = linear(), linear(), linear()
    model = torch.nn.ModuleDict({"query": query, "key": key})
    first, second = sgd(query), sgd(other)
    state = hvd.State(model, first, other=other, second=second)
    state.save_values(tensors=True)
    at_end = state.take_snapshot(tensors=True)
    for _ in range(2):
        with torch.no_grad():
            key.weight.fill_(7.0)
        state.roll_back()
        assert key.weight.item() == 1.0
        state.save_values(at_end)


def test_an_optimizer_that_is_made_anew_takes_the_place_of_the_earlier_one(
    alone: Context, two: TwoRanks
) -> None:
    model = linear()
    earlier = sgd(model)
    later = sgd(model)
    alone.worker.progress.step = 5  # in 0, 1, 8, 64, … all are sent at the end
    hand_out(alone)
    model(torch.ones(1, 1)).sum().backward()
    assert two.gradients == ["gradient.0"], "averaged in the backward pass, as with one"
    later.step()
    assert alone.worker.progress.step == 6
    with pytest.raises(ScriptError, match=r"SGD does not train, since its parameter 'weight' was"):
        earlier.step()
    run(hvd.State(model=model, optimizer=earlier))
    earlier.step()
    with pytest.raises(ScriptError, match="does not train, since it is not in the State"):
        later.step()


def test_an_optimizer_that_the_state_lacks_does_not_train(alone: Context, two: TwoRanks) -> None:
    """A worker that joins would not have its momentum."""
    model, forgotten = linear(), linear()
    optimizer, other = sgd(model), sgd(forgotten)

    def train(state: hvd.State) -> None:
        alone.worker.progress.step = 5  # in 0, 1, 8, 64, … all are sent at the end
        hand_out(alone)
        model(torch.ones(1, 1)).sum().backward()
        assert two.gradients == ["gradient.0"]
        optimizer.step()
        with pytest.raises(ScriptError, match="does not train, since it is not in the State"):
            other.step()

    alone.worker.communicator = LocalCommunicator()
    alone.worker.communicator = two
    run(hvd.State(model=model, optimizer=optimizer), train)
    sgd(linear())
    with pytest.raises(ScriptError, match=r"2 optimizers were given .* none is in the State"):
        run(hvd.State(model=model))


def test_one_optimizer_more_in_the_training_function_is_refused(alone: Context) -> None:
    model = linear()

    def train(state: hvd.State) -> None:
        sgd(model)  # in place of the other
        with pytest.raises(ScriptError, match="in the training function for one optimizer more"):
            sgd(linear())

    run(hvd.State(model=model, optimizer=sgd(model)), train)


@pytest.mark.parametrize("loader_first", [True, False])
def test_a_batch_that_adapts_is_refused(alone: Context, loader_first: bool) -> None:
    data = TensorDataset(torch.zeros(64, 1))

    def loader() -> Any:
        return hvd.DataLoader(data, 8, max_batch_size=16)

    if loader_first:
        loader()
    models = linear(), linear()
    first, second = map(sgd, models)
    if not loader_first:
        loader()
    state = hvd.State(models[0], first, other=models[1], second=second)
    with pytest.raises(ScriptError, match=r"max_batch_size=...\) with 2 optimizers.*unequal_share"):
        run(state)


def test_a_step_may_be_skipped_after_synchronize_without_a_loader(
    alone: Context, two: TwoRanks
) -> None:
    """Where the norm of the averaged gradients is bad, for example."""
    first, second = linear(), linear()
    optimizer, _ = sgd(first), sgd(second)
    alone.worker.in_train = True
    for _ in range(2):
        first(torch.ones(1, 1)).sum().backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        alone.commit({})


def test_sparse_adam_is_refused(alone: Context) -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    with pytest.raises(ScriptError, match="cannot wrap SparseAdam, which refuses dense gradients"):
        hvd.DistributedOptimizer(torch.optim.SparseAdam(embedding.parameters()))


# -- a loop body is undone as a whole


class Adversaries(Training):
    """A generator and a discriminator on the first of two ranks, with failures at given calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failing: int) -> None:
        super().__init__(monkeypatch, *failing)
        monkeypatch.setattr("hvd_elastic.torch.optimizer.forgotten_schedulers", lambda *_: [])
        communicator = self.context.worker.communicator
        monkeypatch.setattr(communicator, "size", 2)
        reduce_async = communicator.reduce_async

        def failing_reduce(tensor: Any, name: str, **_: Any) -> Any:
            if name.startswith("gradient"):
                self.fail(name)
            return reduce_async(tensor, name)

        monkeypatch.setattr(communicator, "reduce_async", failing_reduce)
        torch.manual_seed(0)
        self.generator = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        self.discriminator = torch.nn.Linear(3, 1)
        for model in (self.generator, self.discriminator):
            model.double()
        adam = torch.optim.Adam(self.generator.parameters(), lr=0.05)
        sgd = torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)
        self.optimizer_g = hvd.DistributedOptimizer(adam, self.generator)
        self.optimizer_d = hvd.DistributedOptimizer(sgd, self.discriminator)
        data = TensorDataset(torch.randn(16, 3).double())
        self.loader = hvd.DataLoader(data, 4, shuffle=True)
        self.ema = AveragedModel(self.generator)
        self.meter = Meter()
        self.noise = torch.randn(8, 2, generator=torch.Generator().manual_seed(1)).double()

    def body(self, state: hvd.State, real: torch.Tensor) -> None:
        """Step twice, once or not at all with either, with all that a script does between."""
        state.bodies += 1
        for _ in range(state.bodies % 3):
            self.optimizer_d.zero_grad()
            fake = self.generator(self.noise[: len(real)] * state.bodies).detach()
            loss = self.discriminator(fake).mean() - self.discriminator(real).mean()
            loss.backward()
            self.optimizer_d.step()
            with torch.no_grad():
                for parameter in self.discriminator.parameters():
                    parameter.clamp_(-0.3, 0.3)
            state.critic += 1
        mean = hvd.allreduce(torch.tensor([float(state.bodies)]), "mean").item()
        self.meter.values.append(mean)
        if state.bodies % 2:
            self.optimizer_g.zero_grad()
            self.discriminator(self.generator(self.noise)).mean().neg().backward()
            self.optimizer_g.step()  # its pass has filled the discriminator's gradients too
            self.ema.update_parameters(self.generator)
        hvd.allreduce(torch.tensor([1.0]), "late")
        state.after += 1

    def made_state(self) -> hvd.State:
        return hvd.State(
            generator=self.generator,
            discriminator=self.discriminator,
            optimizer_g=self.optimizer_g,
            optimizer_d=self.optimizer_d,
            ema=self.ema,
            meter=self.meter,
            bodies=0,
            critic=0,
            after=0,
        )

    def end(self, state: hvd.State) -> dict[str, Any]:
        modules = {"g": self.generator, "d": self.discriminator, "ema": self.ema}
        optimizers = {"g": self.optimizer_g, "d": self.optimizer_d}
        return {
            **{k: [t.tolist() for t in v.state_dict().values()] for k, v in modules.items()},
            **{
                f"optimizer {name}": [
                    value.tolist()
                    for values in optimizer.state.values()
                    for value in values.values()
                ]
                for name, optimizer in optimizers.items()
            },
            "plain": [state.bodies, state.critic, state.after, self.meter.values],
            "progress": self.context.worker.progress,
        }


def adversarial(training: Adversaries) -> dict[str, Any]:
    """Train with the loader; the last epoch is left by ``break``."""

    def train(state: hvd.State) -> None:
        for epoch in hvd.epochs(2):
            for (real,) in training.loader:
                training.body(state, real)
                state.commit()
                if epoch == 1 and state.bodies == 7:
                    break
            hvd.allreduce(torch.tensor([1.0]), "tail")

    state = training.made_state()
    training.context.choose_averagers([*training.context.worker.averagers][1:])
    training.run(train, state)
    return training.end(state)


def reinforced(training: Adversaries) -> dict[str, Any]:
    """Train without a loader: from ``commit`` to ``commit``."""

    def train(state: hvd.State) -> None:
        while state.bodies < BODIES:
            at = state.bodies % 4
            training.body(state, training.noise[at : at + 2] @ torch.ones(2, 3).double())
            state.commit()

    state = training.made_state()
    training.context.data.has_loader = False
    training.context.choose_averagers([*training.context.worker.averagers][1:])
    training.run(train, state)
    return training.end(state)


@pytest.mark.parametrize("story", [adversarial, reinforced])
def test_a_failure_at_any_call_leaves_the_state_of_an_undisturbed_training(
    monkeypatch: pytest.MonkeyPatch, story: Any
) -> None:
    undisturbed = Adversaries(monkeypatch)
    wanted = story(undisturbed)
    calls = undisturbed.calls
    assert {"exchange", "allreduce", "gradient.0", "gradient:2.0"} <= {*calls}
    for call in range(1, len(calls) + 1, 2):  # and again three calls later
        disturbed = Adversaries(monkeypatch, call, call + 3)
        assert story(disturbed) == wanted, (call, calls[call - 1])


def test_nothing_is_copied_with_one_optimizer_or_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Adversaries(monkeypatch)
    rollback = training.context.rollback
    assert rollback.keeps_aside
    monkeypatch.setattr(training.context.worker.communicator, "size", 1)
    assert not rollback.keeps_aside
    monkeypatch.setattr(training.context.worker.communicator, "size", 2)
    training.context.choose_averagers([*training.context.worker.averagers][:1])
    assert not rollback.keeps_aside
    monkeypatch.setattr(Worker, "elastic", False)
    assert not rollback.keeps_aside


def test_a_scaler_of_several_goes_back_with_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """One update a body; a body that fails after it, or between two steps, is done again."""

    def story(*failing: int) -> list[Any]:
        training = Adversaries(monkeypatch, *failing)
        scaler = hvd.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        taken: list[Any] = []

        def train(state: hvd.State) -> None:
            for _ in hvd.epochs(1):
                for (real,) in training.loader:
                    state.bodies += 1
                    overflow = float("inf") if state.bodies == 2 else 1.0
                    for optimizer, factor in (
                        (training.optimizer_d, overflow),
                        (training.optimizer_g, 1.0),
                    ):
                        training.optimizer_d.zero_grad()
                        training.optimizer_g.zero_grad()
                        score = training.discriminator(training.generator(real[:, :2])).mean()
                        scaler.scale(score * factor).backward()
                        if optimizer is training.optimizer_d:
                            scaler.unscale_(optimizer)
                        scaler.step(optimizer)
                    scaler.update()
                    hvd.allreduce(torch.tensor([1.0]), "late")

        state = training.made_state()
        training.context.choose_averagers([*training.context.worker.averagers][1:])
        training.run(train, state)
        taken += [scaler.get_scale(), scaler.state_dict()["_growth_tracker"]]
        taken.append([v["step"].item() for v in training.optimizer_g.state.values()])
        return [training.end(state), taken, training.calls]

    *wanted, calls = story()
    assert wanted[1] == [8.0, 0, [4.0] * 4]
    for call in range(1, len(calls) + 1, 3):
        assert story(call)[:2] == wanted, (call, calls[call - 1])


class Repeating(Training):
    """One optimizer on the first of two ranks, which steps three times for each batch."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *failing: int, says_so: bool = True
    ) -> None:
        super().__init__(monkeypatch, *failing)
        monkeypatch.setattr("hvd_elastic.torch.optimizer.forgotten_schedulers", lambda *_: [])
        communicator = self.context.worker.communicator
        monkeypatch.setattr(communicator, "size", 2)
        reduce_async = communicator.reduce_async

        def failing_reduce(tensor: Any, name: str, **_: Any) -> Any:
            if name.startswith("gradient"):
                self.fail(name)
            return reduce_async(tensor, name)

        monkeypatch.setattr(communicator, "reduce_async", failing_reduce)
        adam = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.optimizer = hvd.DistributedOptimizer(adam, self.model, several_steps=says_so)

    def end(self, *, with_loader: bool) -> list[Any]:
        """Train, and return the state at the end."""
        data = torch.arange(24.0).reshape(8, 3).double()

        def body(state: hvd.State, batch: torch.Tensor) -> None:
            for _ in range(3):
                self.step(batch)
            state.bodies += 1
            state.commit()

        def train(state: hvd.State) -> None:
            if with_loader:
                for _ in hvd.epochs(1):
                    for (batch,) in self.loader:
                        body(state, batch)
            else:
                while state.bodies < 4:
                    body(state, data[state.bodies :: 4])

        state = hvd.State(model=self.model, optimizer=self.optimizer, bodies=0)
        self.context.data.has_loader = with_loader
        self.run(train, state)
        moments = [v.tolist() for values in self.optimizer.state.values() for v in values.values()]
        return [state.bodies, moments, *(p.tolist() for p in self.model.parameters())]


@pytest.mark.parametrize("with_loader", [True, False])
def test_several_steps_of_one_optimizer_are_undone_together(
    monkeypatch: pytest.MonkeyPatch, with_loader: bool
) -> None:
    undisturbed = Repeating(monkeypatch)
    wanted = undisturbed.end(with_loader=with_loader)
    for call in range(1, len(undisturbed.calls) + 1):
        disturbed = Repeating(monkeypatch, call)
        assert disturbed.end(with_loader=with_loader) == wanted, (call, undisturbed.calls[call - 1])
        assert not disturbed.warnings


@pytest.mark.parametrize("with_loader", [True, False])
def test_several_steps_that_are_not_declared_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, with_loader: bool
) -> None:
    training = Repeating(monkeypatch, says_so=False)
    training.end(with_loader=with_loader)
    found = [each for each in training.warnings if "several_steps=True" in each]
    assert len(found) == 1
    assert "called several times in one loop body" in found[0]


def test_a_batch_that_is_taken_ahead_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works until a worker joins, which has no batch of before."""
    training = Training(monkeypatch)

    def train(state: hvd.State) -> None:
        batches = iter(training.loader)
        ahead = next(batches)
        while ahead is not None:
            (inputs,), ahead = ahead, next(batches, None)
            training.step(inputs)

    training.run(train, hvd.State(model=training.model, optimizer=training.optimizer))
    (warning,) = training.warnings
    assert "prefetcher" in warning


class Counting(torch.optim.SGD):
    """Keeps a number in its state that is no tensor, as many optimizers of users do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                taken = self.state[parameter]["taken"] = self.state[parameter].get("taken", 0) + 1
                parameter.data.sub_(parameter.grad / taken)


def test_numbers_in_the_state_of_an_optimizer_are_undone(alone: Context) -> None:
    model = linear()
    optimizer = Counting(model.parameters(), lr=1.0)
    copied = OptimizerCopy(optimizer)
    model.weight.grad = torch.ones(1, 1)
    optimizer.step()
    copied.copy_once()
    optimizer.step()
    optimizer.step()
    copied.restore()
    assert model.weight.item() == 0.0
    assert optimizer.state[model.weight] == {"taken": 1}
