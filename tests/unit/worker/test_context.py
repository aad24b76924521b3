from __future__ import annotations

import contextlib
import inspect
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.checkpoint.manifests import newest_valid
from hvd_elastic.communicator.interface import GenerationBrokenError, RingRank
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.control.progress import Position
from hvd_elastic.errors import RunError, ScriptError
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.script.horovod_names import explain_arguments
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.wire import messages as msg
from hvd_elastic.worker import checkpointing, context, metrics, worker
from hvd_elastic.worker.checks.data_digest import DataDigest
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.debugging.uncaught import script_line
from hvd_elastic.worker.launch import Mode, detect_mode, refuse_other_launchers
from hvd_elastic.worker.message_sink import Sink
from hvd_elastic.worker.progress import Progress
from hvd_elastic.worker.step import Pass
from tests.paths import LIMIT_S
from tests.tensorboard_files import read_scalars


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, Mode.ALONE),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, Mode.ALONE),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, Mode.STATIC),
        ({"HOROVOD_RANK": "0"}, Mode.STATIC),
        ({"HOROVOD_RANK": "0", "HOROVOD_ELASTIC": "1"}, Mode.HOROVOD_ELASTIC),
        ({"HOROVOD_RANK": "0", "HVD_ELASTIC_AGENT": "x"}, Mode.AGENT),
    ],
)
def test_how_a_process_was_launched(environment: dict[str, str], mode: Mode) -> None:
    assert detect_mode(environment) is mode


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE"])
def test_processes_of_another_launcher_are_refused(name: str) -> None:
    with pytest.raises(RunError, match=rf"started 4 of this process \({name}=4\).*--np 4"):
        refuse_other_launchers({name: "4"})
    refuse_other_launchers({name: "1"})
    refuse_other_launchers({name: "4", "HVD_ELASTIC_AGENT": "x"})
    refuse_other_launchers({name: "4", "HOROVOD_RANK": "0"})


def test_init_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_context", None)
    with pytest.raises(ScriptError, match=r"call hvd\.init\(\) first"):
        hvd.rank()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder without a leader."""
    monkeypatch.setenv("HVD_ELASTIC_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("HVD_ELASTIC_AUDIT", "1")
    monkeypatch.setenv("HVD_ELASTIC_CHECKPOINT_EVERY", "1000")
    return tmp_path


def train(
    monkeypatch: pytest.MonkeyPatch,
    epochs: int,
    stop_after: int | None = None,
    examples: int = 10,
    batch_size: int = 4,
    mode: Mode = Mode.ALONE,
) -> Context:
    made = Context(Mode.ALONE, TorchFrontend())
    made.worker.mode = mode
    monkeypatch.setattr(context, "_context", made)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader: hvd.DataLoader[Any] = hvd.DataLoader(
        TensorDataset(torch.randn(examples, 2)), batch_size, shuffle=True
    )

    class Stop(Exception):  # noqa: N818
        pass

    @hvd.run
    def steps(state: hvd.State) -> None:
        for _ in hvd.epochs(epochs):
            for (inputs,) in loader:
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                state.commit(loss=loss)
                if made.worker.progress.step == stop_after:
                    made.checkpoints.take_checkpoint(wait=True)
                    made.checkpoints.close()
                    raise Stop

    with contextlib.suppress(Stop):
        steps(hvd.State(model=model, optimizer=optimizer))
    return made


def test_a_run_alone_uses_everything_once_and_records_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = train(monkeypatch, 3)
    assert made.worker.progress.as_dict() == {"step": 9, "epoch": 3, "position": 0, "examples": 30}
    result = check_audit(read_events_of(folder), finished=True)
    assert result.ok, result.problems()
    assert result.complete_epochs == 3
    assert next(e["kind"] for e in read_records(folder / "events.jsonl")) == "metrics"


def test_a_problem_is_warned_of_once(alone: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", told.append)
    for message in ("one", "one", "another"):
        alone.worker.warn_once(message)
    for steps in (3, 4):
        alone.worker.warn_once(f"{steps} steps so far", of="steps")
    assert told == ["one", "another", "3 steps so far"]


def test_a_run_goes_on_from_its_checkpoint_in_the_middle_of_an_epoch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = train(monkeypatch, 3, stop_after=4)
    assert stopped.worker.progress.as_dict() == {
        "step": 4,
        "epoch": 1,
        "position": 4,
        "examples": 14,
    }
    assert train(monkeypatch, 3).worker.progress.step == 9
    result = check_audit(read_events_of(folder), finished=True)
    assert result.ok, result.problems()
    assert (result.steps, result.voided_steps) == (9, 0)


@pytest.mark.parametrize("way", ["next", "break", "whole"])
def test_a_commit_without_our_optimizer_counts_a_step_whose_loop_is_left(
    alone: Context, way: str
) -> None:
    """Else the script would read the same batch for ever; in a whole loop the body's end counts."""
    loader: hvd.DataLoader[Any] = hvd.DataLoader(TensorDataset(torch.arange(8)), 2)
    seen: list[Any] = []
    at: list[int] = []

    def train_on(state: Any, batch: Any) -> None:
        seen.append(batch[0].tolist())
        state.commit()
        state.commit(loss=1.0)
        assert not alone.step.is_exchanged, "rank 0 may call it alone, before a collective"
        at.append(alone.worker.progress.step)

    @hvd.run
    def steps(state: Any) -> None:
        while way == "next" and len(seen) < 3:
            train_on(state, next(iter(loader)))
        while way == "break" and len(seen) < 3:
            for batch in loader:
                train_on(state, batch)
                break
        for batch in loader:
            train_on(state, batch)

    steps(hvd.State())
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert at == [0, 1, 2, 3]
    assert (alone.worker.progress.step, alone.worker.progress.examples) == (4, 8)


def test_a_run_of_horovods_elastic_launcher_ends_with_a_checkpoint_and_its_metrics(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("horovod.common.elastic", reason="Horovod is not built")

    class Launcher:
        """What Horovod's launcher does in a world that does not change."""

        elastic = SimpleNamespace(
            run=lambda function: lambda state: (state.sync(), function(state))[1]
        )
        broadcast_object = staticmethod(lambda item, **_: item)
        rank = staticmethod(lambda: 0)

    monkeypatch.setattr("hvd_elastic.script.run.load_horovod", lambda _: Launcher)
    made = train(monkeypatch, 3, mode=Mode.HOROVOD_ELASTIC)
    assert made.worker.progress.as_dict() == {"step": 9, "epoch": 3, "position": 0, "examples": 30}
    newest = newest_valid(folder / "checkpoints")
    assert newest is not None
    assert newest.step == 9
    told = [event for event in read_records(folder / "events.jsonl") if event["kind"] == "metrics"]
    assert told[-1]["step"] == 9


def test_any_rank_asks_for_the_checkpoint_that_is_due_and_all_take_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank 0 whose host keeps losing its worker has never been there for so long."""
    now = [0.0]
    monkeypatch.setattr(checkpointing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ranks = []
    for rank in range(2):
        made = Context(Mode.ALONE, TorchFrontend())
        monkeypatch.setattr(context, "_context", made)
        made.worker.communicator.rank = RingRank(rank)
        hvd.State(number=rank)
        ranks.append(made.checkpoints)
        made.checkpoints.schedule()
        now[0] += 400.0
    now[0] = 1100.0
    assert [each.wishes()[0] for each in ranks] == [True, False]
    for each in ranks:
        each.take_checkpoint(wait=True)
    assert [each.wishes()[0] for each in ranks] == [False, False]
    now[0] = 2099.0
    assert [each.wishes()[0] for each in ranks] == [False, False], "one interval for all"
    now[0] = 2100.0
    assert [each.wishes()[0] for each in ranks] == [True, True]
    for each in ranks:
        each.close()


def test_a_run_alone_writes_its_metrics_for_tensorboard(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_TENSORBOARD", "1")
    monkeypatch.setattr(metrics, "_INTERVAL_S", 0.0)
    train(monkeypatch, 3)
    told = [event for event in read_records(folder / "events.jsonl") if event["kind"] == "metrics"]
    shown = read_scalars(folder / "tensorboard")
    assert shown["size/world_size"] == [(event["step"], 1.0) for event in told]
    losses = [(event["step"], round(event["loss"], 6)) for event in told if "loss" in event]
    assert shown["train/loss"] == losses


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_computes_the_metrics_of_a_step(rank: int) -> None:
    process = Context(Mode.ALONE, TorchFrontend())
    process.worker.communicator = LocalCommunicator()
    process.worker.communicator.rank = RingRank(rank)
    asked: list[int] = []

    def planned() -> dict[str, Any]:
        asked.append(rank)
        return {}

    for _ in range(3):
        process.metrics.step_finished(planned)
    assert asked == ([0] if rank == 0 else [])


def read_events_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def test_a_rank_alone_hears_that_its_generation_was_called_off() -> None:
    """No collective fails that would tell it."""

    class Link:
        def __init__(self, aborted: int) -> None:
            self._aborted = aborted

        def aborted(self, generation: int) -> bool:
            return generation <= self._aborted

        def pending(self, generation: int) -> bool:
            return False

    for aborted, generation in ((1, 2), (2, 2)):
        made = Context(Mode.ALONE, TorchFrontend())
        made.worker.generation = generation
        made.worker.link = Link(aborted)  # type: ignore[assignment]
        if aborted < generation:
            made.exchange()
        else:
            with pytest.raises(GenerationBrokenError, match="called this generation off"):
                made.exchange()


def test_what_the_run_counts_itself_is_not_the_scripts_to_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = train(monkeypatch, 1)
    hvd.report(step=-5, examples=7, accuracy=0.5)
    made.checkpoints.close()
    last = [event for event in read_records(folder / "events.jsonl") if event["kind"] == "metrics"][
        -1
    ]
    assert (last["step"], last["examples"], last["accuracy"]) == (3, 10, 0.5)


def test_a_checkpoint_that_was_asked_for_in_a_step_that_breaks_is_still_wanted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = train(monkeypatch, 1)
    said: list[msg.WorkerToAgent] = []

    class Link:
        wanted = True

        def pending(self, generation: int) -> bool:
            return False

        aborted = pending

        def take_checkpoint_request(self) -> bool:
            wanted, self.wanted = self.wanted, False
            return wanted

        def give_back_checkpoint_request(self) -> None:
            self.wanted = True

    class Recorder(Sink):
        checkpoint_every_s = 1000.0

        def send(self, message: msg.WorkerToAgent) -> None:
            said.append(message)

    link = made.worker.link = Link()  # type: ignore[assignment]
    made.worker.sink = Recorder()
    made.rescaling.start_alone()
    made.step_failed()  # the last one is over: another begins
    made.exchange()
    assert not link.wanted, "it was taken"
    made.broken(GenerationBrokenError("the ring broke"))
    assert link.wanted
    assert isinstance(said[-1], msg.Broken)


def test_a_long_wait_is_told_with_its_collective_and_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Context(Mode.ALONE, TorchFrontend())
    made.worker.communicator.waiting_since = time.monotonic() - 1
    made.worker.communicator.waiting_for = "the gradients"
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_LONG_S", LIMIT_S)
        brief = made.worker.activity()
    assert (brief.line, brief.waiting_for, brief.begun, brief.progress) == ("", "", {}, None)
    made.worker.communicator.waiting_since -= 2
    said, line = made.worker.activity(), inspect.currentframe().f_lineno  # type: ignore[union-attr]
    assert said.line == f"{Path(__file__).name}:{line} ({inspect.stack()[0].function})"
    assert said.waiting_for == "the gradients"
    assert said.progress == Position(step=0, epoch=0, position=0, examples=0)


def test_a_long_step_is_told_with_its_line_alone() -> None:
    made = Context(Mode.ALONE, TorchFrontend())
    made.worker.step_clock.began = time.monotonic() - 3
    said = made.worker.activity()
    assert said.line.startswith("test_context.py:")
    assert not said.waiting_for


def test_the_line_is_that_of_the_script_and_not_of_a_library() -> None:
    found: list[str] = []

    waits = threading.Event()

    def look() -> None:
        waits.wait()
        found.append(script_line())

    thread = threading.Thread(target=look)
    thread.start()
    waits.set()
    thread.join()  # of the standard library
    assert found[0].startswith("test_context.py:")
    assert found[0].endswith("(test_the_line_is_that_of_the_script_and_not_of_a_library)")


class Ranks(LocalCommunicator):
    """Averages as Horovod does, with ranks that stand at these places."""

    order = 0
    described = b"[]"
    """What the data sets of the other rank are, where orders differ."""

    def __init__(self, others: list[tuple[int, int]]) -> None:
        self.size = 1 + len(others)
        self._others = others

    def reduce_async(self, array: Any, name: str, *, sent_as: str = "") -> Any:
        for epoch, position in self._others:
            place = Progress(epoch=epoch, position=position, order_hash=self.order).place_hash()
            array += np.array([place, place * place, 0, 0, 0, 0, 0, 0, 0, 0], np.float32)
        array *= np.float32(1 / self.size)
        return array

    def gather(self, array: Any, name: str) -> Any:
        if name == "hvd_elastic.data_sets":
            return np.concatenate([array, np.frombuffer(b"%s\n" % self.described, np.uint8)])
        others = "".join(f"{self.order}|90|in epoch {e} at example {p}|\n" for e, p in self._others)
        return np.concatenate([array, np.frombuffer(others.encode(), np.uint8)])


def at_place(epoch: int, position: int, others: list[tuple[int, int]]) -> Context:
    made = Context(Mode.ALONE, TorchFrontend())
    made.worker.mode, made.worker.generation = Mode.AGENT, 1
    made.worker.progress = Progress(step=5, epoch=epoch, position=position)
    made.worker.communicator = Ranks(others)
    made.hand_out(Pass(step_examples=8, weight=1.0))
    return made


@pytest.mark.parametrize("ranks", [2, 3, 7, 100, 999, 4096])
def test_ranks_at_one_place_of_the_data_are_left_alone(ranks: int) -> None:
    for place in ((0, 0), (1, 96), (7, 10**12), (300, 17)):
        at_place(*place, [place] * (ranks - 1)).exchange()


@pytest.mark.parametrize("ranks", [2, 3, 100])
def test_a_rank_at_another_place_of_the_data_is_an_error_of_all_ranks(ranks: int) -> None:
    """One has left the loop of its own accord: the gradients are of different epochs."""
    here, there = (1, 96), (2, 0)
    for place, others in ((here, [*[here] * (ranks - 2), there]), (there, [here] * (ranks - 1))):
        made = at_place(*place, others)
        with pytest.raises(
            ScriptError, match="different places of the training data in step 6:"
        ) as e:
            made.exchange()
        assert "in epoch 1 at example 96" in str(e.value)
        assert "in epoch 2 at example 0" in str(e.value)


def test_ranks_whose_data_sets_differ_are_told() -> None:
    """Each would read a permutation of its own, with examples left out and read twice."""
    made = at_place(0, 0, [(0, 0)])
    made.worker.data_sets.examples, others = 100, Ranks([(0, 0)])
    made.worker.communicator, others.order = others, 5
    with pytest.raises(
        ScriptError, match=r"rank 0 in one of 100 examples; rank 1 in one of 90 examples\. Bring"
    ):
        made.exchange()


def test_the_field_in_which_data_sets_differ_is_named() -> None:
    made = at_place(0, 0, [(0, 0)])
    made.worker.data_sets.digests = [DataDigest(["b", "a"], 2)]
    made.worker.communicator, others.order = (others := Ranks([(0, 0)])), 5
    others.described = json.dumps([DataDigest(["a", "b"], 2).described()]).encode()
    with pytest.raises(ScriptError, match="those of ranks 0 and 1 differ in 'entries'"):
        made.exchange()


def test_every_step_of_another_epoch_is_at_another_place() -> None:
    """A rank that is an epoch further is found within few steps."""
    for lead in (1, 2, 10):
        same = [
            Progress(epoch=0, position=32 * i).place_hash()
            == Progress(epoch=lead, position=32 * (i + 4)).place_hash()
            for i in range(200)
        ]
        assert sum(same) < 20
        assert not any(all(same[i : i + 3]) for i in range(200))


def test_a_loop_outside_of_a_training_function_is_told_where_to_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Context(Mode.ALONE, TorchFrontend())
    made.worker.mode = Mode.AGENT
    monkeypatch.setattr(context, "_context", made)
    loader: hvd.DataLoader[Any] = hvd.DataLoader(TensorDataset(torch.zeros(4)), 2)
    with pytest.raises(ScriptError, match=r"Put the loop into a function under @hvd\.run"):
        next(iter(loader))


def test_a_collective_after_training_that_fails_is_told_as_what_it_is(alone: Context) -> None:
    class Broken(LocalCommunicator):
        def wait(self, handle: Any) -> torch.Tensor:
            raise GenerationBrokenError("Horovod has been shut down.")

    alone.worker.communicator = Broken()
    with pytest.raises(ScriptError, match=r"hvd.allreduce\(\.\.\., 'test'\) was called after"):
        hvd.allreduce(torch.zeros(1), "test")
    alone.worker.in_train = True
    with pytest.raises(GenerationBrokenError):
        hvd.allreduce(torch.zeros(1), "test")


@pytest.mark.parametrize(
    ("error", "words"), [(UnboundLocalError, "set before it"), (StopIteration, "for batch in load")]
)
def test_what_fails_in_the_middle_of_an_epoch_is_explained(
    alone: Context, error: type[Exception], words: str
) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    @hvd.run
    def train(state: hvd.State) -> float:
        if error is StopIteration:
            next(iter(()))
        for _ in ():
            loss = 1.0
        return loss  # type: ignore[possibly-undefined]

    for step, explained in ((0, False), (8, True)):
        alone.worker.progress.step = step
        alone.has_trained = False
        with pytest.raises(error) as raised:
            train(hvd.State(model=model, optimizer=optimizer))
        assert ("after a failure or in a resumed run" in str(raised.value)) is explained
        assert (words in str(raised.value)) is explained


ANY: Any = hvd  # mypy knows that these calls are wrong


@pytest.mark.parametrize("name", ["broadcast_parameters", "Sum", "local_size", "elastic"])
def test_a_name_of_horovod_that_is_missing_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}': .*docs/migration.md"):
        getattr(hvd, name)
    assert not hasattr(hvd, "no_such_name")


NET = torch.nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: ANY.DistributedOptimizer(SGD(NET.parameters()), named_parameters=[]),
            r"no argument named_parameters=: give the model in its place: .*\(optimizer, model\)",
        ),
        (lambda: ANY.DistributedOptimizer(SGD(NET.parameters()), NET.parameters()), "a generator"),
        (lambda: ANY.allreduce(torch.ones(1)), r'needs name=.*hvd.allreduce\(tensor, "'),
        (lambda: ANY.allgather(torch.ones(1)), "hvd.allgather.* needs name="),
        (lambda: ANY.allreduce(torch.ones(1), "a", op=None), "op=: .*average=False"),
        (lambda: ANY.DataLoader([1], 1, shuffel=True), "shuffel=: do you mean shuffle="),
        (lambda: ANY.DataLoader([1], 1, True), "give these by name: shuffle, "),
        (lambda: ANY.DataLoader((torch.ones(3), torch.ones(3)), 1), r"TensorDataset\(\*tensors"),
        (lambda: ANY.allreduce({}, "a"), "takes a tensor or a number, not a dict"),
        (lambda: list(ANY.epochs("3")), r"hvd.epochs\('3'\): give the number of epochs"),
    ],
)
def test_a_call_in_horovods_way_says_what_to_write(
    call: Callable[[], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_context", Context(Mode.ALONE, TorchFrontend()))
    with pytest.raises(ScriptError, match=words):
        call()


def test_a_number_is_averaged_like_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_context", Context(Mode.ALONE, TorchFrontend()))
    assert ANY.allreduce(1.5, "loss").item() == 1.5
    assert ANY.allgather(1.5, "loss").tolist() == [1.5]


def test_a_process_that_reads_for_a_worker_may_import_its_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context, "_context", None)
    monkeypatch.setenv("HVD_ELASTIC_AGENT", "nobody listens")
    monkeypatch.setattr("multiprocessing.parent_process", object)
    ANY.init()
    assert ANY.rank() == 0
    with pytest.raises(ScriptError, match=r"started, while a slot trains in one process.*__main__"):
        ANY.run(lambda state: None)(ANY.State())


def test_a_type_error_inside_of_a_function_stays_what_it_is() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        explain_arguments(lambda number: number + "b")(1)


def test_a_rank_that_breaks_off_while_it_receives_the_state_tells_no_place(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(alone.worker.sink, "send", said.append)
    alone.rescaling.report_broken(RuntimeError("a test"))
    assert (said[0].step, said[0].progress) == (-1, None)


def test_a_checkpoint_that_is_due_waits_while_a_rank_still_writes_the_one_before(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    for name in ("take_checkpoint", "_make_room"):
        monkeypatch.setattr(alone.checkpoints, name, lambda name=name: begun.append(name))
    for busy in (True, False):
        alone.checkpoints.agree((True, False, busy))
        alone.checkpoints.step_boundary()
    assert begun == ["_make_room"]
