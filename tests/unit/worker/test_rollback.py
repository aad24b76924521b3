"""What a script changes in its state is changed once, at whatever call a step or an epoch fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.interface import GenerationBrokenError
from hvd_elastic.errors import ScriptError
from hvd_elastic.script.helper_copies import HelperCopies
from hvd_elastic.script.loop_parts import Place, train_by_parts
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.progress import Phase, Progress
from hvd_elastic.worker.worker import Worker


class Meter:
    """A helper object of a script."""

    def __init__(self, numbers: int = 0) -> None:
        self.values = [0.0] * numbers

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


class Training:
    """One process that fails at the given calls of the library, and goes on as a worker does.

    Attributes:
        calls: the calls at which it could have failed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failing: int) -> None:
        self.context = made = Context(Mode.ALONE, TorchFrontend())
        self.calls: list[str] = []
        self.newness: list[int] = []
        self.warnings: list[str] = []
        monkeypatch.setattr(context, "_context", made)
        monkeypatch.setattr(Worker, "elastic", True)
        monkeypatch.setattr(made.worker, "warn", self.warnings.append)
        exchange, reduce_async = made.exchange, made.worker.communicator.reduce_async

        def fail(name: str) -> None:
            self.calls.append(name)
            if len(self.calls) in failing:
                made.worker.communicator.broken = True
                raise GenerationBrokenError("another rank is gone")

        self.fail = fail

        def failing_exchange() -> None:
            if not made.step.is_exchanged:
                fail("exchange")
            exchange()

        def failing_reduce(tensor: torch.Tensor, name: str, **_: Any) -> Any:
            if name.startswith("user."):
                fail("allreduce")
            return reduce_async(tensor, name)

        monkeypatch.setattr(made, "exchange", failing_exchange)
        monkeypatch.setattr(made.worker.communicator, "reduce_async", failing_reduce)
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1).double()
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model)
        data = TensorDataset(torch.randn(8, 3).double())
        self.loader: hvd.DataLoader[Any] = hvd.DataLoader(data, 2, shuffle=True)

    def step(self, inputs: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def run(self, function: Callable[[hvd.State], None], state: hvd.State) -> None:
        """Call the function until it returns, as ``hvd.run`` does under an agent."""
        rollback = self.context.rollback
        rollback.synchronized()
        self.context.worker.in_train = True
        while True:
            rollback.function_entered()
            try:
                function(state)
                rollback.function_returned()
                self.fail("barrier")
                return
            except GenerationBrokenError:
                self.context.worker.generation += 1
                self.context.worker.communicator.broken = False
                self.context.step_failed()
                rollback.fail()
                self.newness.append(rollback.newness)
                rollback.synchronized()


def everything_once(training: Training) -> dict[str, Any]:
    """Train with all that a script does around its steps; returns the state at the end."""
    model, optimizer = training.model, training.optimizer
    swa, target = AveragedModel(model), torch.nn.Linear(3, 1).double()
    meter, totals = Meter(), hvd.Accumulator()
    by_step, by_epoch = ExponentialLR(optimizer, 0.99), StepLR(optimizer, 1, 0.5)
    story: list[Any] = []

    def train(state: hvd.State) -> None:
        state.starts += 1
        history = state.history
        for epoch in hvd.epochs(4):
            optimizer.param_groups[0]["weight_decay"] += 0.01
            target.load_state_dict(model.state_dict())
            state.begun += 1
            state.batches = 0
            for (inputs,) in training.loader:
                state.batches += 1
                state.seen += len(inputs)
                totals.add(seen=len(inputs))
                training.step(inputs)
                by_step.step()
                state.commit()
                if epoch % 2 and state.batches == 3:
                    break
            by_epoch.step()
            swa.update_parameters(model)
            state.bad += 1
            state.commit()
            mean = hvd.allreduce(torch.tensor([float(epoch)]), "first").item()
            totals.synchronize()
            meter.values.append(totals["seen"])
            totals.clear()
            history.append(mean)
            hvd.allreduce(torch.tensor([1.0]), "second")
            history.append(-mean)
        hvd.allreduce(torch.tensor([1.0]), "third")
        story.append("returned")

    values = {
        "swa": swa,
        "target": target,
        "meter": meter,
        "by_step": by_step,
        "by_epoch": by_epoch,
    }
    state = hvd.State(
        model=model,
        optimizer=optimizer,
        starts=0,
        begun=0,
        batches=0,
        seen=0,
        bad=0,
        history=[],
        **values,
    )
    training.run(train, state)
    return {
        "model": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "momentum": [v["momentum_buffer"].tolist() for v in optimizer.state.values()],
        "swa": {name: tensor.tolist() for name, tensor in swa.state_dict().items()},
        "target": {name: tensor.tolist() for name, tensor in target.state_dict().items()},
        "rates": [optimizer.param_groups[0][name] for name in ("lr", "weight_decay")],
        "steps": [by_step.last_epoch, by_epoch.last_epoch, meter.values],
        "plain": [state.starts, state.begun, state.seen, state.bad, state.history],
        "progress": training.context.worker.progress,
    }


def test_a_failure_at_any_call_leaves_the_state_of_an_undisturbed_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undisturbed = Training(monkeypatch)
    wanted = everything_once(undisturbed)
    calls = len(undisturbed.calls)
    assert set(undisturbed.calls) == {"exchange", "allreduce", "barrier"}
    assert calls > 20
    for call in range(1, calls + 1):
        disturbed = Training(monkeypatch, call, call + 3)
        assert everything_once(disturbed) == wanted, (call, undisturbed.calls[call - 1])


def test_a_checkpoint_from_the_tail_of_an_epoch_is_resumed_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All workers die in the tail: the state that they leave is that of the end of the loop."""

    def train(training: Training, state: hvd.State) -> None:
        for _ in hvd.epochs(2):
            for (inputs,) in training.loader:
                training.step(inputs)
            state.bad += 1
            state.commit()
            hvd.allreduce(torch.tensor([1.0]), "accuracy")

    def make(*failing: int) -> tuple[Training, hvd.State]:
        training = Training(monkeypatch, *failing)
        return training, hvd.State(model=training.model, optimizer=training.optimizer, bad=15)

    first, left = make(5)
    first.context.worker.in_train = True
    with pytest.raises(GenerationBrokenError):
        train(first, left)
    first.context.step_failed()
    first.context.rollback.fail()
    payload = {
        **left._values(),
        "progress": first.context.worker.progress.as_state(),
    }
    second, state = make()
    second.context.worker.progress = state.load(payload, "its checkpoint")
    second.run(lambda state: train(second, state), state)
    assert state.bad == 17
    assert second.calls == ["allreduce", *["exchange"] * 4, "allreduce", "barrier"]


def test_a_collective_between_the_step_and_the_end_of_the_body_keeps_what_came_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step cannot be undone, so the rest of the body is missing once; it is said beforehand."""
    training = Training(monkeypatch, 6)

    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(1):
            for (inputs,) in training.loader:
                training.step(inputs)
                state.before += 1
                hvd.allreduce(torch.tensor([1.0]), "loss")
                state.after += 1

    state = hvd.State(model=training.model, optimizer=training.optimizer, before=0, after=0)
    # One rank alone cannot fail here.
    monkeypatch.setattr(training.context.worker.communicator, "size", 2)
    training.run(train, state)
    assert training.calls[5] == "allreduce"
    assert (state.before, state.after) == (4, 3)
    assert training.newness == [0], "a survivor that got through the body is preferred"
    (warning,) = training.warnings
    assert "after of the State changes in the loop body after the collective 'loss'" in warning


def test_a_collective_that_nothing_follows_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(monkeypatch)

    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(1):
            for (inputs,) in training.loader:
                hvd.allreduce(torch.tensor([1.0]), "before")
                training.step(inputs)
                state.seen += 1
                hvd.allreduce(torch.tensor([1.0]), "after")

    monkeypatch.setattr(training.context.worker.communicator, "size", 2)
    training.run(train, hvd.State(model=training.model, optimizer=training.optimizer, seen=0))
    assert not training.warnings


def test_survivors_that_are_least_far_are_preferred_except_in_the_rest_of_a_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So nobody skips a part of an epoch of which another rank has not seen the end."""
    training = Training(monkeypatch)
    context = training.context
    state = hvd.State(model=training.model, optimizer=training.optimizer)
    newness = {}
    for phase in Phase:
        context.worker.progress = Progress(step=3, phase=phase)
        context.rollback.save()
        newness[phase] = context.rollback.newness
    context.worker.progress.step += 1
    context.rollback.fail()
    assert context.rollback.newness < newness[Phase.DONE] < newness[Phase.LOOP]
    assert newness[Phase.LOOP] < newness[Phase.HEAD] < newness[Phase.TAIL]
    assert not state.take_snapshot().differences(state.take_snapshot())


def test_a_rank_that_went_on_to_the_next_epoch_comes_back_to_the_end_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until a step of the next epoch: the one that died may have been before the tail's end."""
    training = Training(monkeypatch)
    context = training.context
    totals, meter = hvd.Accumulator(), Meter()
    hvd.State(model=training.model, optimizer=training.optimizer, meter=meter)
    context.worker.in_train = True
    context.worker.progress = Progress(step=4, position=8, examples=8)
    totals.add(seen=8)
    context.rollback.loop_ended()
    end = Progress(step=4, position=8, examples=8, phase=Phase.TAIL)
    assert context.worker.progress == end

    def run_tail() -> None:
        totals.synchronize()
        meter.values.append(totals["seen"])
        totals.clear()
        context.rollback.epoch_turns(0)
        assert context.worker.progress == Progress(step=4, epoch=1, examples=8)

    run_tail()
    assert context.rollback.loop_begins()
    context.rollback.fail()
    assert context.worker.progress == end
    assert meter.values == []
    run_tail()
    assert meter.values == [8], "what this rank alone had added is there again"
    context.rollback.loop_begins()
    context.worker.progress.advance(2)
    context.rollback.body_ended(voided=False)
    context.rollback.fail()
    progress = context.worker.progress
    assert (progress.epoch, progress.step, meter.values) == (1, 5, [8])


def test_what_another_library_does_after_the_loop_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(monkeypatch)
    rollback, worker = training.context.rollback, training.context.worker
    meter = Meter()
    hvd.State(model=training.model, optimizer=training.optimizer, meter=meter)
    worker.in_train = True
    worker.progress = Progress(step=4, position=8, examples=8)
    rollback.loop_ended()
    meter.values.append(1.0)
    rollback.tail_begins()
    meter.values.append(2.0)
    rollback.fail()
    assert meter.values == [1.0]
    rollback.function_entered()  # the state of the rank that has come furthest is here
    meter.values.append(1.0)
    rollback.tail_begins()
    assert meter.values == [1.0]


class Validating:
    """A library whose callbacks exchange weights for a validation after each epoch."""

    def __init__(self, training: Training) -> None:
        self.place, self.validations = Place(), 0
        self._training, self._weights = training, training.model.weight.data

    def is_done(self) -> bool:
        return self.validations == 2

    def begin_epoch(self) -> None:
        return

    def train(self, batch: Any) -> bool:
        self._training.step(batch[0])
        return self._training.loader.steps_left() <= 1

    def follow(self) -> None:
        own = self._weights.clone()
        self._weights.mul_(0.5)
        self._training.fail("validation")
        self._weights.copy_(own)
        self._training.fail("saving")
        self.validations += 1
        self.place.begun = False


def validate_twice(training: Training) -> list[float]:
    library = Validating(training)
    state = hvd.State(model=training.model, optimizer=training.optimizer)
    training.run(lambda _: train_by_parts(library, training.loader), state)
    weights: list[float] = training.model.weight.flatten().tolist()
    return weights


def test_weights_that_a_library_exchanges_for_a_validation_do_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undisturbed = Training(monkeypatch)
    expected = validate_twice(undisturbed)
    for call, name in enumerate(undisturbed.calls, 1):
        disturbed = Training(monkeypatch, call)
        if name == "validation":
            with pytest.raises(ScriptError, match="while 'weight' had other values than after"):
                validate_twice(disturbed)
        else:
            assert validate_twice(disturbed) == expected, (call, name)


def test_what_an_interrupted_body_leaves_in_lists_of_modules_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the rewards of an actor-critic, which is why its next episode would be too long."""
    training = Training(monkeypatch, 2)
    model: Any = training.model
    model.rewards, model.layers, model.seen = [], [1, 2, 3], {}

    def train(state: hvd.State) -> None:
        for (inputs,) in training.loader:
            model.rewards += [1.0] * 5
            training.step(inputs)
            model.rewards.clear()

    training.run(train, hvd.State(model=model, optimizer=training.optimizer))
    (warning,) = training.warnings
    assert "model.rewards has 5 entries and had 0 at the end of the body before." in warning
    assert "empty such objects first in the body" in warning


LARGE = 200_000
"""Numbers of a helper object whose state is above 1 MiB."""


def with_large_helper(training: Training, helper: Any) -> hvd.State:
    """A State, with a clock by which each copy of the helper takes a millisecond."""
    state = hvd.State(model=training.model, optimizer=training.optimizer, helper=helper)
    now = itertools.count()
    state._helpers = HelperCopies(clock=lambda: next(now) * 1e-3)
    training.context.worker.in_train = True
    training.context.rollback.save()
    return state


def body(training: Training, before: Callable[[], object], after: Callable[[], object]) -> None:
    before()
    training.step(torch.ones(2, 3).double())
    after()
    training.context.commit({})


def test_large_helpers_are_undone_where_copying_them_takes_little_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, large = Training(monkeypatch), Meter(LARGE)
    state = with_large_helper(training, large)
    large.values[0] = 1.0
    state.roll_back()
    assert large.values[0] == 0.0


def test_a_change_before_the_step_that_is_too_large_to_be_undone_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, large = Training(monkeypatch), Meter(LARGE)
    state = with_large_helper(training, large)

    def add() -> None:
        large.values[state.steps] = 1.0
        state.steps += 1

    def fill() -> None:
        for _ in range(100):
            body(training, add, lambda: None)

    state.steps = 0
    with pytest.raises(ScriptError, match="Meter changes in the loop body before") as refused:
        fill()
    assert "snapshot()" in str(refused.value)
    assert "right after optimizer.step()" in str(refused.value)
    assert 20 < state.steps < 100, "as long as its copies take up their credit it is undone"


def test_a_large_average_that_is_updated_after_the_step_is_no_such_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, large = Training(monkeypatch), Meter(LARGE)
    state = with_large_helper(training, large)

    def average() -> None:
        large.values[0] += 1.0

    for _ in range(200):
        body(training, lambda: None, average)
    assert "helper" not in state._saved.dumped, "it is not copied any more"


class Ring:
    """A replay buffer that undoes what it is told to, as docs/training-script.md has it."""

    def __init__(self) -> None:
        self.values, self.added = [0.0] * 8, 0
        self.old: list[float] = []

    def add(self, value: float) -> None:
        self.old.append(self.values[self.added % 8])
        self.values[self.added % 8] = value
        self.added += 1

    def snapshot(self) -> int:
        return self.added

    def roll_back(self, added: int) -> None:
        while self.added > added:
            self.added -= 1
            self.values[self.added % 8] = self.old.pop()

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("it is not copied")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_helper_with_snapshot_and_roll_back_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, ring = Training(monkeypatch), Ring()
    with monkeypatch.context() as patch:
        patch.setattr(hvd.State, "storages", lambda _: set())
        with_large_helper(training, ring)
    for number in range(12):
        body(training, lambda number=number: ring.add(number), lambda: None)  # type: ignore[misc]
    before = list(ring.values)
    ring.add(99.0)
    assert ring.values != before
    training.context.rollback.fail()
    assert ring.values == before


def test_a_loop_of_a_script_that_iterates_several_times_in_an_epoch_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leaving one loop does not end the epoch of a script that has been seen to go on."""

    def train(training: Training, state: hvd.State) -> None:
        for epoch in hvd.epochs(2):
            while state.steps < 4 * (epoch + 1):
                loop = iter(training.loader)
                (inputs,) = next(loop)
                training.step(inputs)
                state.steps += 1
                del loop
                if state.steps % 4 > 1:
                    hvd.allreduce(torch.tensor([1.0]), "loss")

    def story(*failing: int) -> list[Any]:
        training = Training(monkeypatch, *failing)
        state = hvd.State(model=training.model, optimizer=training.optimizer, steps=0)
        training.run(lambda state: train(training, state), state)
        return [training.context.worker.progress, state.steps, training.model.weight.tolist()]

    undisturbed = story()
    for call in range(4, 12):
        assert story(call) == undisturbed, call


def test_values_that_the_script_holds_stay_the_ones_of_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(monkeypatch)
    values: dict[str, Any] = {"rows": [1], "by_name": {"a": 1}, "sums": torch.zeros(2)}
    held = dict(values)
    state = hvd.State(model=training.model, **values)
    held["rows"].append(2)
    held["by_name"]["b"] = 2
    held["sums"] += 1
    state.added = 3
    state.roll_back()
    assert not hasattr(state, "added")
    assert (state.rows, state.by_name, state.sums.tolist()) == ([1], {"a": 1}, [0, 0])
    assert all(getattr(state, name) is value for name, value in held.items())


def test_what_cannot_be_copied_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    state = hvd.State(model=training.model, optimizer=training.optimizer)
    state.hooks = []
    state.hooks.append(lambda: None)  # an assignment would be refused
    with pytest.raises(ScriptError, match=r"State: 'hooks' cannot be copied"):
        state.take_snapshot()


def test_progress_that_is_not_whole_is_refused_by_the_field() -> None:
    whole = Progress(step=3, epoch=1, position=4, examples=12).as_state()
    with pytest.raises(ValueError, match="progress has no field 'phase'"):
        Progress.from_dict({name: value for name, value in whole.items() if name != "phase"})
    with pytest.raises(ValueError, match=r"Expected `int` >= 0 - at `\$\.step`"):
        Progress.from_dict({**whole, "step": -1})
    with pytest.raises(ValueError, match=r"Invalid enum value 9 - at `\$\.phase`"):
        Progress.from_dict({**whole, "phase": 9})
