"""Functions and scripts as tasks of real worker processes on this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import cloudpickle
import psutil
import pytest

from hvd_elastic.cli.runs.run_options import RunOptions
from hvd_elastic.cli.runs.scaling_options import ObjectiveOptions
from hvd_elastic.engines.dial_in import fixed_ranks, training
from hvd_elastic.engines.dial_in.fixed_ranks import MOST_RESTARTS, FixedRanks
from hvd_elastic.engines.dial_in.hosts import DialInHosts, HostProcess
from hvd_elastic.engines.dial_in.task import TASK_FILE, Task
from hvd_elastic.engines.dial_in.training import Sizes, on_this_machine, train
from hvd_elastic.errors import CheckpointError, RunError, UsageError
from hvd_elastic.hosts.dial_in import DialIn
from hvd_elastic.hosts.transfer import send_file
from hvd_elastic.programs.processes import read_process
from hvd_elastic.records.run_folder import RunFolder, list_runs
from hvd_elastic.run_events import Restored
from tests.paths import LIMIT_S, LITTLE_WORK, WORKER_PYTHONPATH
from tests.tensorboard_files import read_scalars
from tests.waiting import until

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def run(
    what: Callable[..., Any] | str,
    *args: Any,
    size: int = 2,
    sizes: Sizes | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    env = {**LITTLE_WORK, "PYTHONPATH": WORKER_PYTHONPATH}
    task, wanted = Task.of(what, args, kwargs), sizes or Sizes(size, elastic=False)
    return train(task, wanted, "127.0.0.1", "test", on_this_machine(wanted.limit, env), options)


def tell_ranks(*names: str) -> list[str]:
    sys.stdout.write("half a line, ")
    sys.stdout.flush()
    sys.stdout.write(f"of {os.environ['RANK']}\n")
    sys.stderr.write("the end has no line break")
    return [os.environ[name] for name in names]


def test_a_function_finds_its_rank_and_whole_lines_reach_the_driver(capfd):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "NODE_RANK")
    assert run(tell_ranks, *names) == ["0", "0", "2", "2", "127.0.0.1", "0"]
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == sorted(
        [
            *("half a line, of 0", "the end has no line break"),
            *("[rank 1] half a line, of 1", "[rank 1] the end has no line break"),
        ]
    )


def rank_times(factor: int, length: int) -> bytes:
    return bytes([factor * (int(os.environ["RANK"]) + 1)]) * length


def test_a_large_value_of_rank_0_comes_back():
    assert run(rank_times, 3, 20 << 20) == bytes([3]) * (20 << 20)


def fail_on(rank: str) -> None:
    if os.environ["RANK"] == rank:
        raise ValueError("no such colour")
    import time

    time.sleep(60)  # it is ended


def test_an_exception_comes_with_the_traceback_and_the_name_of_its_rank():
    with pytest.raises(RunError) as raised:
        run(fail_on, "1")
    text = str(raised.value)
    assert text.startswith("rank 1 on host localhost: Traceback (most recent call last):")
    assert text.endswith("ValueError: no such colour")
    assert "in fail_on" in text
    assert "run_task.py" not in text


def be_killed_once(folder: str, always: bool) -> str:
    if os.environ["RANK"] == "1":
        mark = Path(folder, os.environ["TORCHELASTIC_RESTART_COUNT"])
        if always or not list(Path(folder).iterdir()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_a_killed_rank_starts_all_again_and_that_is_said(tmp_path: Path, capfd) -> None:
    assert run(be_killed_once, str(tmp_path), False) == "1"
    said = capfd.readouterr().err
    assert "rank 1 on host localhost was lost (signal 9): all 2 ranks start again" in said
    assert f"restart 1 of {MOST_RESTARTS}" in said


def test_ranks_that_are_lost_again_and_again_are_given_up(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rank 1 .* was lost \(signal 9\); .* started 4 times"):
        run(be_killed_once, str(tmp_path), True)


def test_an_engine_is_asked_for_the_reason_of_a_loss_though_the_time_for_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where this process was frozen since the loss."""
    clock, asked = itertools.count(0.0, 60.0), threading.Event()
    stepped = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr(fixed_ranks, "time", stepped)
    hosts: Any = None
    FixedRanks(hosts, 1, lambda *_: None, lambda _: None, asked.set)._check_for(0.5)
    assert asked.is_set()


SCRIPT = """
import os, sys
assert __name__ == "__main__"
print("words", *sys.argv[1:], "rank", os.environ["RANK"], flush=True)
if "--fail" in sys.argv:
    sys.exit(5)
"""


def test_a_script_gets_its_words_and_prints_whole_lines(tmp_path: Path, capfd) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert run(str(script), "--lr=0.01", size=1) is None
    assert capfd.readouterr().out == "words --lr=0.01 rank 0\n"
    with pytest.raises(RunError, match="rank 0 on host localhost: it ended with exit status 5"):
        run(str(script), "--fail", size=1)


def ends(code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def test_an_exit_with_status_0_is_a_success_and_any_other_one_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\ndef main(): pass\nsys.exit(main())\n")
    assert run(str(script)) is None
    assert run(ends, 0, size=1) is None
    # 255 is no signal, whose rank would start again.
    for code, said in ((-1, "it ended with exit status 255"), ("no data", "no data")):
        with pytest.raises(RuntimeError, match=f"^rank 0 on host localhost: {said}$"):
            run(ends, code, size=1)


def reads_input() -> str:
    return sys.stdin.read()


def test_the_standard_input_of_a_function_is_empty():
    assert run(reads_input, size=1) == ""


def leaves_children(how: str) -> list[int]:
    import subprocess

    orphan = ["sh", "-c", "sleep 3600 & echo $!"]
    shell = subprocess.Popen(orphan, stdout=subprocess.PIPE)
    assert shell.stdout is not None
    pids = [
        subprocess.Popen(["sleep", "3600"]).pid,
        subprocess.Popen(["sleep", "3600"], start_new_session=True).pid,
        int(shell.stdout.readline()),
    ]
    if how == "killed":
        print(*pids, flush=True)
        os._exit(3)
    return pids


def test_children_that_a_function_leaves_behind_end_with_its_rank(capfd) -> None:
    left = run(leaves_children, "returns", size=1)
    with pytest.raises(RunError, match="exit status 3"):
        run(leaves_children, "killed", size=1)
    left += map(int, capfd.readouterr().out.split())
    assert len(left) == 6
    assert not [pid for pid in left if psutil.pid_exists(pid)]


def trains_in_silence(pids: str) -> None:
    import subprocess
    import time

    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    Path(pids).with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    Path(pids).with_suffix(".new").rename(pids)
    time.sleep(3600)


def test_a_rank_whose_link_to_the_driver_breaks_ends_with_its_children(tmp_path: Path) -> None:
    """Its host dials in again, and the driver has started the ranks again."""
    packed = Task.of(trains_in_silence, (str(tmp_path / "pids"),), {}).pack()
    (tmp_path / "task").write_bytes(packed)
    env = {**LITTLE_WORK, "PYTHONPATH": WORKER_PYTHONPATH}
    with (
        contextlib.closing(DialIn("127.0.0.1", lambda: None, pytest.fail)) as dial_in,
        contextlib.closing(HostProcess(dial_in.invitation, "here", 1, env)) as process,
    ):
        until(lambda: bool(dial_in.hosts))
        (host,) = dial_in.hosts
        connection = dial_in.connect(host.host)
        send_file(connection, tmp_path / "task", f"{host.folder}/{TASK_FILE}")
        rank = connection.start([host.python, "-m", "hvd_elastic.engines.dial_in.run_task"])
        rank.stdin.write(b'{"RANK": "0"}\n')
        until((tmp_path / "pids").exists)
        rank.close()  # its connection alone
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        until(lambda: not any(map(read_process, pids)))
        assert not process.ended
        assert connection.alive


class Halves:
    """Two hosts, one of which goes between two looks."""

    def __init__(self) -> None:
        a, b = (SimpleNamespace(host=SimpleNamespace(name=name, slots=1)) for name in "ab")
        self.looks, self.waits = [[a], [a, b]], 0

    @property
    def hosts(self) -> list[SimpleNamespace]:
        return self.looks.pop(0)

    def wait_for(self, *_: object, **__: object) -> None:
        self.waits += 1


def test_ranks_are_as_many_as_asked_for_though_a_host_goes_as_they_start() -> None:
    hosts: Any = Halves()
    places = FixedRanks(hosts, 2, lambda *_: None, lambda _: None, lambda: None)._places()
    assert [(remote.host.name, slot) for remote, slot in places] == [("a", 0), ("b", 0)]
    assert hosts.waits == 2


def returns_what_only_a_host_knows() -> None:
    from hvd_elastic.engines.dial_in.task import Outcome

    Outcome.pack = lambda _: b"cno_such_module\nOutcome\n."  # type: ignore[method-assign, assignment]


def test_an_outcome_that_cannot_be_read_is_an_error_with_its_reason() -> None:
    with pytest.raises(
        RunError, match=r"^rank 0 on host localhost: its outcome cannot be read here .*no_such_modu"
    ):
        run(returns_what_only_a_host_knows, size=1)


DRIVER = """
import sys
from hvd_elastic.spark import TorchDistributor
def train():
    import time
    print("trains", flush=True)
    time.sleep(3600)
TorchDistributor(1, local_mode=True, use_gpu=False, elastic=False).run(train)
"""


def test_a_driver_that_is_terminated_leaves_no_files(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": WORKER_PYTHONPATH, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], env=env, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "trains\n"
        driver.terminate()
        driver.stdout.read()  # ends with the last process of the run
    deadline = time.monotonic() + LIMIT_S
    while [*tmp_path.iterdir()] and time.monotonic() < deadline:
        time.sleep(0.05)  # the host's process has lost its parent, and ends
    assert [*tmp_path.iterdir()] == []


def ends_at_once() -> None:
    os._exit(7)


def test_a_rank_that_ends_without_a_value_says_how():
    with pytest.raises(RunError, match=r"rank 0 .* ended with exit status 7 and gave no value"):
        run(ends_at_once, size=1)


def elastic(steps: int, fail: bool = False, exits: bool = False) -> tuple[int, bytes]:
    import torch

    import hvd_elastic.torch as hvd

    hvd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader: Any = hvd.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=4)

    @hvd.run
    def train(state: Any) -> int:
        for (inputs,) in hvd.steps(steps, loader):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            if fail:
                raise ValueError("no such loss")
            state.commit()
        return hvd.size()

    size = train(hvd.State(model=model, optimizer=optimizer))
    print(f"trained with {size}")
    if exits:
        sys.exit()
    return size, bytes(3 << 20)


def test_an_elastic_function_returns_its_value_at_rank_0(
    tmp_path: Path, monkeypatch, capfd
) -> None:
    pytest.importorskip("horovod.torch")
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    before = signal.getsignal(signal.SIGINT)
    options = {"run_id": "drawn", "tensorboard": True}
    assert run(elastic, 5, sizes=Sizes(2), options=options) == (2, bytes(3 << 20))
    assert read_scalars(tmp_path / "runs/drawn/tensorboard")["size/world_size"][-1][1] == 2.0
    assert RunFolder.open("drawn").resume_command.startswith("its program on ")
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().out == "trained with 2\n"
    assert run(elastic, 5, exits=True, sizes=Sizes(1)) is None
    with pytest.raises(RunError) as raised:
        run(elastic, 5, fail=True, sizes=Sizes(1, 1, 2))
    assert re.search(r"run \S+ failed: .*", str(raised.value))
    assert str(raised.value).endswith("ValueError: no such loss")


def train_until(path: str) -> int:
    """Train until there is one rank left, and until a file is there."""
    import time

    import torch

    import hvd_elastic.torch as hvd

    hvd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader: Any = hvd.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=4)

    @hvd.run
    def train(state: Any) -> int:
        for (inputs,) in hvd.steps(10**9, loader):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            time.sleep(0.02)
            state.commit()
            if hvd.size() == 1 and Path(path).exists():
                break
        return hvd.size()

    return train(hvd.State(model=model, optimizer=optimizer))


def train_and_fail_once(failed: str, checkpoints: str) -> int:
    """Train until there is a checkpoint and fail; the second time return after a step."""
    import torch

    import hvd_elastic.torch as hvd

    hvd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader: Any = hvd.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=4)

    @hvd.run
    def train(state: Any) -> int:
        for (inputs,) in hvd.steps(10**9, loader):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            time.sleep(0.02)
            state.commit()
            if Path(failed).exists():
                break
            if [*Path(checkpoints).glob("step-*.json")]:
                Path(failed).touch()
                raise ValueError("no such loss")
        return hvd.size()

    return train(hvd.State(model=model, optimizer=optimizer))


@pytest.mark.parametrize("named", [True, False])
def test_a_program_without_its_old_home_continues_from_its_checkpoint_folder(
    tmp_path: Path, monkeypatch, named: bool
) -> None:
    pytest.importorskip("horovod.torch")
    place = tmp_path / "checkpoints"
    options = {"checkpoint_every_s": 0.2, "checkpoint_folder": str(place), "run_id": "again"}
    args = (str(tmp_path / "failed"), str(place))
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    with pytest.raises(RunError, match="no such loss"):
        run(train_and_fail_once, *args, sizes=Sizes(1), options=options)
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "another"))
    with pytest.raises(CheckpointError, match="holds a checkpoint of run again"):
        run(len, "", sizes=Sizes(1), options={**options, "run_id": "other"})
    if not named:
        del options["run_id"]
    with pytest.raises(CheckpointError, match="holds a checkpoint of run again"):
        train(Task.of(len, (), {}), Sizes(1), "127.0.0.1", "other", on_this_machine(1), options)
    assert not list_runs()

    def no_hosts(_: DialInHosts) -> Any:
        raise RunError("no executor is free")

    with pytest.raises(RunError, match="no executor is free"):  # before the run's leader starts
        train(Task.of(len, (), {}), Sizes(1), "127.0.0.1", "test", no_hosts, options)
    assert run(train_and_fail_once, *args, sizes=Sizes(1), options=options) == 1
    (folder,) = list_runs()
    assert folder.run_id == "again"
    assert any(isinstance(event, Restored) for event in folder.iter_events())
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "third"))
    with pytest.raises(CheckpointError, match="holds a checkpoint of run again"):
        run(len, "", sizes=Sizes(1), options=options)  # the run has succeeded
    assert not list_runs()


@pytest.mark.parametrize("named", [True, False])
def test_a_program_that_starts_again_continues_from_its_checkpoint(
    tmp_path: Path, monkeypatch, named: bool
) -> None:
    """By the name of its run, or by its checkpoint_folder alone, as the docs say."""
    pytest.importorskip("horovod.torch")
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    place = tmp_path / "checkpoints"
    checkpoints = tmp_path / "home/runs/again/checkpoints" if named else place
    options: dict[str, Any] = {"checkpoint_every_s": 0.2}
    options |= {"run_id": "again"} if named else {"checkpoint_folder": str(place)}
    args = (str(tmp_path / "failed"), str(checkpoints))
    with pytest.raises(RunError, match="no such loss"):
        run(train_and_fail_once, *args, sizes=Sizes(1), options=options)
    (folder,) = list_runs()
    if not named:
        with pytest.raises(RunError, match=f"holds checkpoints of run {folder.run_id}: leave run"):
            run(len, "", sizes=Sizes(1), options={**options, "run_id": "other"})
    assert run(train_and_fail_once, *args, sizes=Sizes(1), options=options) == 1
    assert [each.run_id for each in list_runs()] == [folder.run_id]
    assert any(isinstance(event, Restored) for event in folder.iter_events())
    if named:
        with pytest.raises(RunError, match="there is nothing to resume"):
            run(len, "", sizes=Sizes(1), options=options)
    elsewhere = {"run_id": folder.run_id, "checkpoint_folder": str(tmp_path / "elsewhere")}
    with pytest.raises(RunError, match="with that checkpoint_folder alone"):
        run(len, "", sizes=Sizes(1), options=elsewhere)


def test_a_hopeless_run_is_stopped_although_the_disk_is_full_at_first(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(training, "_LOOK_S", 0.01)
    folder, fails = RunFolder.create("r1", {}, root=tmp_path), [RunError("full"), OSError("full")]
    sent = threading.Event()

    def send(op: str) -> None:
        if fails:
            raise fails.pop()
        assert op == "stop"
        sent.set()

    def check() -> None:
        raise RunError("no more hosts are to come")

    monkeypatch.setattr(folder, "send_request", send)
    with pytest.raises(RunError, match="no more hosts are to come"):
        with training._stopped_if_hopeless(folder, check):
            assert sent.wait(LIMIT_S)


def test_a_drained_host_that_dialled_in_is_told_to_end_at_once(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("horovod.torch")
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    ended, meanwhile = tmp_path / "ended", list[bool]()

    @contextlib.contextmanager
    def two_hosts(hosts: DialInHosts) -> Iterator[Callable[[], None]]:
        env = {**LITTLE_WORK, "PYTHONPATH": WORKER_PYTHONPATH}
        kept, drained = (HostProcess(hosts.dial_in.invitation, name, 1, env) for name in "ab")

        def drain() -> None:
            folder = RunFolder.open("drained")
            joined = lambda: "worker_joined" in folder.events.read_text()  # noqa: E731
            try:
                until(lambda: folder.events.exists() and joined())
                folder.ask_leader("drain", {"host": "b"}, timeout_s=LIMIT_S)
                until(lambda: drained.ended)
                meanwhile.append(not kept.ended)
            finally:
                ended.touch()

        thread = threading.Thread(target=drain)
        thread.start()
        try:
            yield lambda: None
        finally:
            thread.join()
            kept.close()
            drained.close()

    task = Task.of(train_until, (str(ended),), {})
    options = {"run_id": "drained"}
    assert train(task, Sizes(2, 1, 2), "127.0.0.1", "test", two_hosts, options) == 1
    assert meanwhile == [True]


def test_an_elastic_function_that_does_not_train_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    with pytest.raises(RunError, match=r"error: len has ended without training\. It was run"):
        run(len, "no training", sizes=Sizes(1))
    with pytest.raises(RunError, match=r"error: RANK is asked for .* give elastic=False"):
        run(tell_ranks, sizes=Sizes(1))


def test_an_elastic_function_with_fixed_ranks_says_so() -> None:
    def train_elastically() -> None:
        import hvd_elastic.torch as hvd

        hvd.init()

    with pytest.raises(RunError, match=r": it trains with .* leave elastic=False out$"):
        run(train_elastically)


EFFICIENCY = {"policy": "goodput", "objective": "efficiency"}
COST = {"policy": "goodput", "objective": "cost", "deadline_s": 60.0, "target_examples": 1.0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_not_finite": "Skip"}, "on_not_finite 'Skip' is not known; valid: skip, stop"),
        ({"policy": "Fixed"}, "policy 'Fixed' is not known; valid: fixed, goodput"),
        ({"policy": "goodput", "objective": "gain"}, "objective 'gain' is not known; valid"),
        ({"objective": "efficiency"}, "objective is of use with policy goodput only"),
        ({"policy": "goodput", "deadline_s": 60.0}, "deadline_s belongs to objective cost"),
        ({"policy": "goodput", "objective": "cost"}, "objective cost needs a deadline_s$"),
        ({"spares": -1}, "spares is -1; it must be 0 or more"),
        ({"checkpoint_copies": -1}, "checkpoint_copies is -1; it must be 0 or more"),
        ({"keep_checkpoints": 0}, "keep_checkpoints is 0; it must be 1 or more"),
        ({"checkpoint_every_s": -1.0}, r"checkpoint_every_s is -1\.0; it must be 0 or more"),
        ({"failure_timeout_s": float("nan")}, "failure_timeout_s is nan; it must be a number abov"),
        ({**EFFICIENCY, "min_speedup_per_slot": 0.0}, r"slot is 0\.0; it must be a number above 0"),
        ({**COST, "deadline_s": -60.0}, r"deadline_s is -60\.0; it must be a number above 0"),
        ({**COST, "target_examples": -1.0}, r"target_examples is -1\.0; it must be a number above"),
        ({"failure_timeout_s": 0.1}, r"failure_timeout_s 0\.1 is below two heartbeats"),
        ({"checkpoint_every_s": "often"}, r"Expected `float`, got `str` - at .*every_s"),
        ({"policy": "goodput", "min_speedup_per_slot": "1"}, r"Expected `float`, got `str`"),
    ],
)
def test_values_of_options_are_checked_before_anything_starts(
    tmp_path: Path, monkeypatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=said):
        run(len, "", sizes=Sizes(1), options=options)
    assert not list_runs()


def test_an_empty_run_id_chooses_a_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    task = Task.of(len, (), {})

    def no_hosts(_: DialInHosts) -> Any:
        raise RunError("no node is free")

    with pytest.raises(RunError, match="no node is free"):
        train(task, Sizes(1), "127.0.0.1", "ray", no_hosts, {"run_id": ""})
    assert len(list_runs()) == 1


def test_the_bounds_of_options_are_those_of_hvd_elastic_run() -> None:
    hints = get_type_hints(ObjectiveOptions, include_extras=True)
    hints |= get_type_hints(RunOptions, include_extras=True)
    bounds = [(name, least, least - 1) for name, least in training._LEAST.items()]
    bounds += [(name, 1, 0) for name in training._ABOVE_0 if name in hints]  # a deadline is a text
    for name, valid, refused in bounds:
        parse = hints[name].__metadata__[0].parser
        assert parse(valid) == valid
        with pytest.raises(UsageError, match=f"not '{refused}'"):
            parse(refused)


def test_unknown_options_are_refused_with_the_valid_ones():
    task = Task.of(tell_ranks, (), {})
    with pytest.raises(UsageError, match="colour: no option of a run; valid are run_id, audit"):
        train(task, Sizes(1), "127.0.0.1", "test", on_this_machine(1), {"colour": 1})
    with pytest.raises(UsageError, match=r"tell_ranks has fixed ranks .* \(audit\) are for"):
        run(tell_ranks, options={"audit": True})
