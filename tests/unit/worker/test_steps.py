"""Training for a number of steps, steps of several batches, and training that is ended early."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.records.audit import check_audit
from hvd_elastic.run_events import TrainingStopped
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.progress import Phase, Progress
from tests.unit.worker.test_rollback import Training

BATCHES = 4  # of the loader of Training, in an epoch

Script = Callable[[Training, hvd.State], None]


def outcome(script: Script, monkeypatch: pytest.MonkeyPatch, *failing: int) -> dict[str, Any]:
    """Run a script that keeps ``seen`` and ``story``; returns all that its training has changed."""
    training = Training(monkeypatch, *failing)
    by_step = ExponentialLR(training.optimizer, 0.9)
    state = hvd.State(training.model, training.optimizer, by_step=by_step, seen=0, story=[])
    training.run(lambda state: script(training, state), state)
    return {
        "model": training.model.weight.tolist(),
        "momentum": [v["momentum_buffer"].tolist() for v in training.optimizer.state.values()],
        "rate": training.optimizer.param_groups[0]["lr"],
        "values": (state.seen, state.story),
        "progress": training.context.worker.progress,
        "calls": len(training.calls),
    }


def check_undisturbed_wherever_it_fails(script: Script, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fail at each call of the library once; returns the outcome of the undisturbed training."""
    wanted = outcome(script, monkeypatch)
    for call in range(1, wanted.pop("calls") + 1):
        found = outcome(script, monkeypatch, call, call + 3)
        found.pop("calls")
        assert found == wanted, call
    return wanted


# ---- a number of steps


def two_loops(training: Training, state: hvd.State) -> None:
    """Train the bias alone for some steps, and then everything."""
    training.model.weight.requires_grad = False
    for (inputs,) in hvd.steps(3, training.loader):
        training.step(inputs)
        state.by_step.step()
        state.seen += len(inputs)
    state.story.append(("bias", hvd.allreduce(torch.tensor([1.0]), "bias").item()))
    training.model.weight.requires_grad = True
    for (inputs,) in hvd.steps(6, training.loader):
        training.step(inputs)
        state.by_step.step()
        state.seen += len(inputs)
    hvd.allreduce(torch.tensor([1.0]), "end")
    state.story.append("end")


def test_steps_and_what_lies_between_them_count_once_wherever_a_rank_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = check_undisturbed_wherever_it_fails(two_loops, monkeypatch)
    assert wanted["values"] == (12, [("bias", 1.0), "end"])
    assert wanted["rate"] == pytest.approx(0.1 * 0.9**6)
    progress = wanted["progress"]
    assert (progress.step, progress.epoch, progress.position) == (6, 1, 4)


def test_steps_go_over_the_data_as_epochs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batches in the same order, so the same parameters."""

    def by_epochs(training: Training, state: hvd.State) -> None:
        for _ in hvd.epochs(3):
            for (inputs,) in training.loader:
                training.step(inputs)

    def by_steps(training: Training, state: hvd.State) -> None:
        for (inputs,) in hvd.steps(3 * BATCHES, training.loader):
            training.step(inputs)

    epochs, steps = outcome(by_epochs, monkeypatch), outcome(by_steps, monkeypatch)
    assert epochs["model"] == steps["model"]
    assert steps["progress"] == Progress(step=12, epoch=3, examples=24, phase=Phase.DONE)


def test_steps_of_a_batch_that_adapts_count_their_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three times the progress in a step, a third of the steps is enough."""

    def script(training: Training, state: hvd.State) -> None:
        def is_enough(done: int, count: int, unit: str = "epoch") -> bool:
            return unit == "step" and 3 * done >= count

        monkeypatch.setattr(training.context.planner, "is_enough", is_enough)
        for (inputs,) in hvd.steps(18, training.loader):
            training.step(inputs)

    assert outcome(script, monkeypatch)["progress"].step == 6


class Alone:
    """A process without a launcher that keeps its records and checkpoints in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HVD_ELASTIC_RUN_FOLDER", str(folder))
        monkeypatch.setenv("HVD_ELASTIC_AUDIT", "1")
        monkeypatch.setenv("HVD_ELASTIC_CHECKPOINT_EVERY", "1000")
        self.folder = folder
        self.context = Context(Mode.ALONE, TorchFrontend())
        monkeypatch.setattr(context, "_context", self.context)
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1).double()
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model)
        data = TensorDataset(torch.randn(8, 3).double())
        self.loader: hvd.DataLoader[Any] = hvd.DataLoader(data, 2, shuffle=True)

    def step(self, inputs: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def run(self, function: Callable[[hvd.State], None]) -> Progress:
        state = hvd.State(self.model, self.optimizer, ends=0)
        hvd.run(function)(state)
        return self.context.worker.progress

    def records(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def test_a_resumed_run_goes_on_in_the_middle_of_the_pass_and_reads_all_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(count: int) -> Progress:
        alone = Alone(tmp_path, monkeypatch)

        def function(state: hvd.State) -> None:
            for (inputs,) in hvd.steps(count, alone.loader):
                alone.step(inputs)
            state.ends += 1

        return alone.run(function)

    first, second = train(5), train(11)
    assert (first.epoch, first.position, first.phase) == (1, 2, Phase.LOOP)
    assert (second.step, second.epoch, second.position) == (11, 2, 6)
    records = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    made = {"steps_made": 11, "examples_made": 22}
    audit = check_audit(records, finished=True, ended_in=2, **made)
    assert audit.ok, audit.problems()
    assert (audit.complete_epochs, audit.epochs[-1].used) == (2, 6)


def test_steps_that_were_all_taken_before_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    for count in (9, 5):
        alone = Alone(tmp_path, monkeypatch)
        monkeypatch.setattr(alone.context.worker, "warn", warnings.append)

        def train(_state: hvd.State, alone: Alone = alone, count: int = count) -> None:
            for (inputs,) in hvd.steps(count, alone.loader):
                alone.step(inputs)

        assert alone.run(train).step == 9
    (warning,) = warnings
    assert "training stands at step 9 already, so hvd.steps(5, loader) has nothing to do" in warning


@pytest.mark.parametrize(
    ("count", "loader", "message"),
    [
        (2e4, None, r"hvd.steps\(20000.0, loader\): the number of steps comes first"),
        (-1, None, "must be a whole number, 0 or more"),
        (9, [1, 2], r"the loader is a list; give it a hvd_elastic.torch.DataLoader\(dataset"),
    ],
)
def test_steps_of_something_else_are_refused(
    count: Any, loader: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(monkeypatch)
    with pytest.raises(ScriptError, match=message):
        hvd.steps(count, loader or training.loader)


def test_a_loop_without_end_is_told_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)

    def train(_state: hvd.State) -> None:
        while True:
            for (inputs,) in training.loader:
                training.step(inputs)

    with pytest.raises(ScriptError, match=r"`for batch in hvd.steps\(20_000, loader\)`"):
        training.run(train, hvd.State(training.model, training.optimizer))
    assert training.context.worker.progress.step == BATCHES


# ---- steps of several batches


def accumulate(training: Training, inputs: torch.Tensor, *, last: bool, parts: int) -> None:
    with nullcontext() if last else training.optimizer.no_sync():  # type: ignore[attr-defined]
        (training.model(inputs).square().mean() / parts).backward()
    if last:
        training.optimizer.step()
        training.optimizer.zero_grad()


def groups_in_steps(training: Training, state: hvd.State) -> None:
    for number, (inputs,) in enumerate(hvd.steps(5, training.loader), 1):
        accumulate(training, inputs, last=number % 3 == 0, parts=3)
        state.seen += len(inputs)
        if number % 3 == 0:
            state.by_step.step()
    hvd.allreduce(torch.tensor([1.0]), "end")
    state.story.append("end")


def groups_in_epochs(training: Training, state: hvd.State) -> None:
    """The last batch of an epoch begins a step that the next epoch ends."""
    for epoch in hvd.epochs(3):
        state.story.append(("begin", epoch))
        for number, (inputs,) in enumerate(training.loader, 1):
            accumulate(training, inputs, last=number % 3 == 0, parts=3)
            state.seen += len(inputs)
        state.story.append(("end", epoch, hvd.allreduce(torch.tensor([1.0]), "mean").item()))


def plain_groups(batches: list[torch.Tensor], ends: set[int], decay: float = 1.0) -> list[Any]:
    """The same in plain PyTorch: a step after the batches at ``ends``."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = ExponentialLR(optimizer, decay)
    for number, inputs in enumerate(batches, 1):
        (model(inputs).square().mean() / 3).backward()
        if number in ends:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return list(model.weight.tolist())


def batches_of(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.Tensor]:
    training = Training(monkeypatch)
    read: list[torch.Tensor] = []

    def train(_state: hvd.State) -> None:
        for (inputs,) in hvd.steps(count, training.loader):
            read.append(inputs)
            training.step(inputs)

    training.run(train, hvd.State(training.model, training.optimizer))
    return read


def test_a_group_of_batches_is_one_step_across_passes_wherever_a_rank_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = check_undisturbed_wherever_it_fails(groups_in_steps, monkeypatch)
    assert wanted["values"] == (30, ["end"])
    progress = wanted["progress"]
    assert (progress.step, progress.epoch, progress.position) == (5, 3, 6)
    assert progress.examples == 30
    batches = batches_of(monkeypatch, 15)
    assert wanted["model"] == plain_groups(batches, {3, 6, 9, 12, 15}, decay=0.9)


def test_a_group_that_an_epoch_leaves_open_goes_on_in_the_next_as_in_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = check_undisturbed_wherever_it_fails(groups_in_epochs, monkeypatch)
    story = [(("begin", n), ("end", n, 1.0)) for n in range(3)]
    assert wanted["values"] == (24, [each for turn in story for each in turn])
    batches = batches_of(monkeypatch, 11)
    assert wanted["model"] == plain_groups(batches, {3, 7, 11})
    # The group that was left open at the very end is no part of the progress.
    assert (wanted["progress"].step, wanted["progress"].epoch) == (3, 2)


def test_a_group_that_is_open_at_the_end_of_training_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(monkeypatch)
    state = hvd.State(training.model, training.optimizer, by_step=None, seen=0, story=[])
    training.run(lambda state: groups_in_epochs(training, state), state)
    (warning,) = training.warnings
    assert "ends without an optimizer.step() after the last backward passes" in warning


def test_a_gradient_scaler_scales_a_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    scaler = hvd.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scales: list[float] = []

    def train(_state: hvd.State) -> None:
        for number, (inputs,) in enumerate(hvd.steps(5, training.loader), 1):
            last = number % 3 == 0
            scales.append(scaler.get_scale())
            with nullcontext() if last else training.optimizer.no_sync():  # type: ignore[attr-defined]
                scaler.scale(training.model(inputs).square().mean() / 3).backward()
            if last:
                scaler.step(training.optimizer)
                training.optimizer.zero_grad()
            scaler.update()

    training.run(train, hvd.State(training.model, training.optimizer))
    assert scales == [8.0 * 2 ** (number // 3) for number in range(15)]
    wanted = plain_groups(batches_of(monkeypatch, 15), {3, 6, 9, 12, 15})
    assert training.model.weight.tolist() == wanted


def test_the_world_may_change_between_groups_and_not_within(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(monkeypatch)
    boundary = training.context.step_boundary
    state = hvd.State(training.model, training.optimizer, by_step=None, seen=0, story=[])
    boundaries: list[int] = []

    def noted() -> None:
        boundaries.append(state.seen // 2)  # batches read
        boundary()

    monkeypatch.setattr(training.context, "step_boundary", noted)

    def train(state: hvd.State) -> None:
        for number, (inputs,) in enumerate(hvd.steps(4, training.loader), 1):
            accumulate(training, inputs, last=number % 3 == 0, parts=3)
            state.seen += len(inputs)

    training.run(train, state)
    assert boundaries == [0, 3, 6, 9]


def test_steps_left_counts_down_within_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the last batch of an epoch is known wherever the function was entered."""
    training = Training(monkeypatch)
    left: list[int] = []
    places: list[int] = []

    def train(_state: hvd.State) -> None:
        for _ in hvd.epochs(1):
            for number, (inputs,) in enumerate(training.loader, 1):
                left.append(training.loader.steps_left())
                places.append(training.loader.position)
                last = number % 3 == 0 or left[-1] == 1
                accumulate(training, inputs, last=last, parts=3)

    training.run(train, hvd.State(training.model, training.optimizer))
    assert left == [4, 3, 2, 1]
    assert places == [0, 2, 4, 6]
    assert training.context.worker.progress.step == 2


def test_epochs_have_no_first_number(monkeypatch: pytest.MonkeyPatch) -> None:
    Training(monkeypatch)
    with pytest.raises(ScriptError, match=r"hvd.epochs\(1, 11\): epochs count from 0"):
        next(hvd.epochs(1, 11))


def test_a_group_that_is_left_by_break_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)

    def train(_state: hvd.State) -> None:
        for _ in hvd.epochs(1):
            for number, (inputs,) in enumerate(training.loader, 1):
                accumulate(training, inputs, last=number == 2, parts=2)
                if number == 3:
                    break

    training.run(train, hvd.State(training.model, training.optimizer))
    progress = training.context.worker.progress
    assert (progress.step, progress.epoch, progress.examples) == (1, 1, 4)
    assert training.model.weight.grad is None


def test_the_audit_knows_the_examples_of_a_group_of_two_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: Any = Alone(tmp_path, monkeypatch)

    def train(_state: hvd.State) -> None:
        for number, (inputs,) in enumerate(hvd.steps(2, alone.loader), 1):
            accumulate(alone, inputs, last=number % 6 == 0, parts=6)

    assert alone.run(train).examples == 24
    used = [record for record in alone.records("audit.jsonl") if record["kind"] == "used"]
    assert [len(record["indices"]) for record in used] == [8, 4]
    assert [[len(part) for part in record["later"]] for record in used] == [[4], [8]]
    audit = check_audit(
        alone.records("audit.jsonl"), finished=True, ended_in=3, steps_made=2, examples_made=24
    )
    assert audit.ok, audit.problems()
    assert (audit.steps, audit.complete_epochs, audit.unrecorded_steps) == (2, 3, 0)


def test_a_step_whose_last_pass_is_not_averaged_is_refused(alone: Context) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for take in (optimizer.step, optimizer.synchronize):
        with optimizer.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ScriptError, match=r"leave no_sync\(\) out around the last pass"):
            take()
        with optimizer.no_sync():
            model(torch.ones(1, 2)).sum().backward()
            with pytest.raises(ScriptError, match=r"in `with optimizer.no_sync"):
                take()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_passes_of_a_batch_that_adapts_are_the_loaders_business(alone: Context) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    hvd.DataLoader(TensorDataset(torch.zeros(64, 2)), 8, max_batch_size=32)
    alone.worker.in_train = True
    with pytest.raises(ScriptError, match=r"not come from hvd\.DataLoader"), optimizer.no_sync():
        pass
    alone.worker.in_train = False
    with pytest.raises(ScriptError, match="the batch adapts"), optimizer.no_sync():
        pass


def test_a_step_that_no_pass_ends_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)

    def train(_state: hvd.State) -> None:
        for number, (inputs,) in enumerate(hvd.steps(2, training.loader), 1):
            last = number in (BATCHES, 4 * BATCHES)  # a step may have all batches of an epoch
            accumulate(training, inputs, last=last, parts=1)
            assert len(training.warnings) == (number > 2 * BATCHES), number

    training.run(train, hvd.State(training.model, training.optimizer))
    (warning,) = training.warnings
    assert warning.startswith(
        "step 2 continues after 4 backward passes in `with optimizer.no_sync():`, which have read "
        "8 examples, and the data set has 8"
    )


class OtherPlace(LocalCommunicator):
    """The first of two ranks; the second reads the first batch of the step."""

    size = 2

    def reduce_async(self, tensor: Any, name: str, *, sent_as: str = "") -> Any:
        if name == "hvd_elastic.change":
            tensor[1] += 100
        return tensor

    def gather(self, array: Any, name: str) -> Any:
        order, examples, *_ = array.tobytes().split(b"|")
        other = b"|".join([order, examples, b"in epoch 0 at example 0", b"\n"])
        return np.concatenate([array, np.frombuffer(other, np.uint8)])


def test_ranks_with_unequal_numbers_of_passes_are_told_where_each_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(monkeypatch)
    training.context.worker.communicator = OtherPlace()

    def train(_state: hvd.State) -> None:
        for number, (inputs,) in enumerate(hvd.steps(9, training.loader), 1):
            accumulate(training, inputs, last=number == 3, parts=3)

    with pytest.raises(
        ScriptError,
        match=r"step 1: rank 0 in epoch 0 at example 4, with 2 of 3 backward passes in "
        r"no_sync\(\); "
        r"rank 1 in epoch 0 at example 0\. .*Enter optimizer\.no_sync\(\) on all ranks",
    ):
        training.run(train, hvd.State(training.model, training.optimizer))


# ---- phases of training


def test_phases_in_one_function_count_once_wherever_a_rank_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def script(training: Training, state: hvd.State) -> None:
        for _ in hvd.epochs(1):
            for (inputs,) in training.loader:
                training.step(inputs)
                state.seen += len(inputs)
        training.optimizer.param_groups[0]["lr"] /= 10
        state.story.append("fine-tuned")
        for _ in hvd.epochs(2):
            for (inputs,) in training.loader:
                training.step(inputs)
                state.seen += len(inputs)

    wanted = check_undisturbed_wherever_it_fails(script, monkeypatch)
    assert wanted["values"] == (16, ["fine-tuned"])
    assert wanted["rate"] == pytest.approx(0.01)


def test_a_second_training_in_a_script_is_told_how_to_write_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Alone(tmp_path, monkeypatch)

    def train(_state: hvd.State) -> None:
        for (inputs,) in hvd.steps(2, alone.loader):
            alone.step(inputs)

    alone.run(train)
    with pytest.raises(ScriptError, match=r"train\(\) is a second training .* one function"):
        alone.run(train)
    assert alone.context.worker.progress.step == 2


# ---- an early end


@pytest.mark.parametrize("where", ["before", "after", "tail", "head"])
def test_training_ends_early_once_wherever_a_rank_dies(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(training: Training, state: hvd.State) -> None:
        for epoch in hvd.epochs(9):
            if where == "head" and epoch == 1:
                hvd.stop("it is enough")
            for (inputs,) in training.loader:
                if where == "before" and state.seen == 8:
                    hvd.stop("it is enough")
                training.step(inputs)
                state.seen += len(inputs)
                if where == "after" and state.seen == 10:
                    hvd.stop("it is enough")
            state.story.append((epoch, hvd.allreduce(torch.tensor([1.0]), "mean").item()))
            if where == "tail" and epoch == 0:
                hvd.stop("it is enough")
        hvd.allreduce(torch.tensor([1.0]), "end")
        state.story.append("end")

    wanted = check_undisturbed_wherever_it_fails(script, monkeypatch)
    seen = {"before": 10, "after": 12, "tail": 8, "head": 10}[where]
    epochs = 1 if where == "tail" else 2
    assert wanted["values"] == (seen, [*((n, 1.0) for n in range(epochs)), "end"])
    assert wanted["progress"].examples == seen
    assert wanted["progress"].epoch == 1


def test_steps_end_early_too_and_so_do_all_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(training: Training, state: hvd.State) -> None:
        for count in (100, 200):
            for (inputs,) in hvd.steps(count, training.loader):
                training.step(inputs)
                state.seen += len(inputs)
                if state.seen >= 12:
                    hvd.stop("it is enough")
            state.story.append((count, hvd.allreduce(torch.tensor([1.0]), "mean").item()))

    wanted = check_undisturbed_wherever_it_fails(script, monkeypatch)
    assert wanted["values"] == (14, [(100, 1.0), (200, 1.0)])


def test_a_run_that_was_ended_early_tells_why_and_goes_on_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(stop_at: int) -> Progress:
        alone = Alone(tmp_path, monkeypatch)

        def function(state: hvd.State) -> None:
            for _ in hvd.epochs(3):
                for (inputs,) in alone.loader:
                    alone.step(inputs)
                    if alone.context.worker.progress.step == stop_at:
                        hvd.stop("the loss\nis low")
            state.ends += 1

        return alone.run(function)

    first, second = train(5), train(0)
    assert (first.step, first.epoch, first.position, first.stopped) == (6, 1, 4, False)
    assert (second.step, second.epoch) == (12, 3)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    (told,) = [e for e in map(json.loads, lines) if e["kind"] == "training_stopped"]
    assert (told["step"], told["rank"], told["reason"]) == (6, 0, "the loss is low")
    records = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert check_audit(records, finished=True, ended_in=3).complete_epochs == 3


class OtherAsks(LocalCommunicator):
    """The first of two ranks; the second asks for the end of training, from call ``at`` on.

    It answers for a third one too, which asks for it in other words.
    """

    size = 2

    def __init__(self, at: int) -> None:
        self.calls = 0
        self.at = at

    def reduce_async(self, tensor: Any, name: str, *, sent_as: str = "") -> Any:
        if name == "hvd_elastic.change":
            self.calls += 1
            if self.calls >= self.at:
                tensor[5] += 0.5
        return tensor

    def gather(self, array: Any, name: str) -> Any:
        if name == "hvd_elastic.stop":
            return np.concatenate([array, np.frombuffer(b"it is late\nme too\n", np.uint8)])
        return array


@pytest.mark.parametrize(("at", "steps", "epoch"), [(2, 2, 0), (4, 4, 1), (5, 4, 1), (6, 5, 1)])
def test_what_another_rank_asks_for_ends_training_here(
    monkeypatch: pytest.MonkeyPatch, at: int, steps: int, epoch: int
) -> None:
    """The fifth call is that of the turn between two epochs."""
    training = Training(monkeypatch)
    training.context.worker.communicator = OtherAsks(at)
    sent: list[Any] = []
    monkeypatch.setattr(training.context.worker.sink, "send", sent.append)

    def train(_state: hvd.State) -> None:
        for _ in hvd.epochs(3):
            for (inputs,) in training.loader:
                training.step(inputs)

    training.run(train, hvd.State(training.model, training.optimizer))
    progress = training.context.worker.progress
    assert (progress.step, progress.epoch) == (steps, epoch)
    (told,) = [each for each in sent if isinstance(each, TrainingStopped)]
    assert told == TrainingStopped(step=steps, rank=1, reason="it is late")


def test_an_end_without_a_reason_or_without_training_is_refused(alone: Context) -> None:
    with pytest.raises(ScriptError, match="outside of the training function"):
        hvd.stop("it is enough")
    alone.worker.in_train = True
    for reason in ("", None, 7):
        with pytest.raises(ScriptError, match="give the reason in words"):
            hvd.stop(reason)  # type: ignore[arg-type]
