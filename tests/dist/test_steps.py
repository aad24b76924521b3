"""Training by steps of several batches, ended by one rank, whatever happens to its processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import read_records
from tests.dist.jobs import Job, call, environment, write_script
from tests.dist.test_launch_ways import HOROVODRUN, needs_horovodrun
from tests.paths import COSTLY, LIMIT_S

pytestmark = pytest.mark.dist

SCRIPT = '''\
"""Groups of three batches that cross the passes over the data; one rank ends training."""
import argparse
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--die", action="store_true", help="once at each place")
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(sgd, model)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
data = TensorDataset(torch.randn(41, 4).double(), torch.randn(41, 1).double())
loader = hvd.DataLoader(data, 9, shuffle=True)


def die(place, rank):
    """End this process if it has this rank and nobody died here before."""
    mark = args.folder / f"died-{place}"
    if args.die and hvd.rank() == rank and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.run
def train(state):
    for number, (inputs, targets) in enumerate(hvd.steps(1000, loader), 1):
        last = number % 3 == 0
        state.seen += 1
        if state.taken == 2 and number % 3 == 2:
            die("between two passes", 0)
        with nullcontext() if last else optimizer.no_sync():
            loss = torch.nn.functional.mse_loss(model(inputs), targets) / 3
            loss.backward()
        if not last:
            continue
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        state.taken += 1
        if state.taken == 7:
            die("after a step", 1)
        if state.taken == 12 and hvd.rank() == hvd.size() - 1:
            hvd.stop("twelve are enough")
        state.commit(loss=loss)
    ended = hvd.allreduce(torch.tensor([float(state.taken)]), "ended").item()
    die("after the loop", 0)
    state.ends += 1
    if hvd.rank() == 0:
        tensors = [tensor.tolist() for tensor in model.state_dict().values()]
        rate = optimizer.param_groups[0]["lr"]
        kept = [ended, state.taken, state.seen, state.ends, rate]
        (args.folder / "end.json").write_text(json.dumps([kept, tensors]))


train(
    hvd.State(model=model, optimizer=optimizer, schedule=schedule, taken=0, seen=0, ends=0)
)
'''
STEPS = 13
"""The ranks learn of the wish, which comes after step 12, in the exchange of the next step."""


def folder(home: Path, name: str) -> Path:
    made = home / name
    made.mkdir()
    return made


def flat(values: Any) -> list[float]:
    return [n for each in values for n in flat(each)] if isinstance(values, list) else [values]


def end_of(home: Path, words: list[Any], name: str) -> tuple[list[float], str]:
    """Train without a leader; returns what the script kept, and what it printed."""
    own = {"HVD_ELASTIC_RUN_FOLDER": str(home / f"{name}-run")}
    env = environment(home, **own)
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    command = [*map(str, words), str(write_script(home, SCRIPT)), str(folder(home, name))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return flat(json.loads((home / name / "end.json").read_text())), done.stdout + done.stderr


def test_groups_and_an_early_end_survive_deaths_at_any_place(tmp_path: Path) -> None:
    """As if the script had run alone; the reason of the end is told by the run's records."""
    undisturbed, _ = end_of(tmp_path, [sys.executable], "alone")
    assert undisturbed[:4] == [STEPS, STEPS, 3 * STEPS, 1]
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=4\n", encoding="utf-8")
    script, kept = write_script(tmp_path, SCRIPT), folder(tmp_path, "disturbed")
    options = ["--hostfile", hosts, "--np", 2, "--min-np", 2, "--spares", 2, "--audit"]
    with Job(*options, "--", sys.executable, script, kept, "--die", home=tmp_path) as job:
        assert job.wait() == 0, job.text
    assert len(list(kept.glob("died-*"))) == 3
    found = flat(json.loads((kept / "end.json").read_text()))
    assert found == pytest.approx(undisturbed, rel=1e-9)
    (finished,) = job.events("run_finished")
    records = read_records(job.folder / "audit.jsonl")
    audit = check_audit(records, finished=True, ended_in=finished["epochs"])
    assert audit.ok, audit.problems()
    assert audit.complete_epochs == 7
    assert (finished["status"], finished["steps"]) == ("succeeded", STEPS)
    told = job.events("training_stopped")[-1]
    assert (told["step"], told["rank"], told["reason"]) == (STEPS, 1, "twelve are enough")
    assert "training was stopped by the script: twelve are enough" in job.text
    for command in ("status", "report"):
        shown = call(command, job.run_id, home=tmp_path).stdout
        assert "training was stopped by the script: twelve are enough" in shown


@COSTLY
@needs_horovodrun
def test_groups_and_an_early_end_without_a_leader(tmp_path: Path) -> None:
    undisturbed, _ = end_of(tmp_path, [sys.executable], "alone")
    launcher = [HOROVODRUN, "-np", 2, "--network-interfaces", "lo", sys.executable]
    found, shown = end_of(tmp_path, launcher, "launched")
    assert found == pytest.approx(undisturbed, rel=1e-9)
    assert f"training ends after step {STEPS}, as rank 1 has asked: twelve are enough" in shown


ALONE = '''\
"""One rank never leaves no_sync()."""
from contextlib import nullcontext

import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
loader = hvd.DataLoader(TensorDataset(torch.ones(1000, 4)), 10)


@hvd.run
def train(state):
    for number, (inputs,) in enumerate(hvd.steps(10**6, loader)):
        last = hvd.rank() == 0 or number < 2
        with nullcontext() if last else optimizer.no_sync():
            model(inputs).mean().backward()
        if last:
            optimizer.step()


train(hvd.State(model=model, optimizer=optimizer))
'''


@COSTLY
def test_a_rank_that_alone_accumulates_ends_the_run(tmp_path: Path) -> None:
    script = write_script(tmp_path, ALONE)
    with Job("--np", 2, "--", sys.executable, script, home=tmp_path) as job:
        assert job.wait(LIMIT_S) == 1, job.text
    assert (
        "32 backward passes of step 3 were added up in `with optimizer.no_sync():` on rank 1 "
        in (job.text)
    )


UNDONE = '''\
"""Rank 0 tells that training ends, and dies before rank 1 knows."""
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.interface import GenerationBrokenError
from hvd_elastic.worker import context
from hvd_elastic.wire.messages import TrainingStopped

told = Path(sys.argv[1])
hvd.init()
worker = context.current().worker
gather, send = worker.communicator.gather, worker.sink.send


def lose(array, name):
    found = gather(array, name)
    if name == "hvd_elastic.stop" and hvd.rank() == 1:
        while not told.exists():
            time.sleep(0.01)
        raise GenerationBrokenError("the answer of rank 0 was lost")
    return found


def tell(message):
    send(message)
    if isinstance(message, TrainingStopped):
        told.touch()
        os.kill(os.getpid(), signal.SIGKILL)


worker.communicator.gather, worker.sink.send = lose, tell
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
loader = hvd.DataLoader(TensorDataset(torch.ones(100, 4)), 10)


@hvd.run
def train(state):
    for (inputs,) in hvd.steps(12, loader):
        state.seen += 1
        if state.seen == 5 and hvd.rank() == 0 and not told.exists():
            hvd.stop("five are enough")
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
        state.commit()


train(hvd.State(model=model, optimizer=optimizer, seen=0))
'''


@COSTLY
def test_an_early_end_that_dies_with_its_rank_is_taken_back(tmp_path: Path) -> None:
    script, hosts = write_script(tmp_path, UNDONE), tmp_path / "hosts"
    hosts.write_text("localhost slots=3\n", encoding="utf-8")
    options = ["--hostfile", hosts, "--np", 2, "--min-np", 2, "--spares", 1]
    with Job(*options, "--", sys.executable, script, tmp_path / "told", home=tmp_path) as job:
        assert job.wait() == 0, job.text
    assert [event["step"] for event in job.events("training_stopped")] == [5]
    assert [event["step"] for event in job.events("training_goes_on")] == [4]
    (finished,) = job.events("run_finished")
    assert (finished["status"], finished["steps"]) == ("succeeded", 12)
    assert "stopped by the script" not in finished["message"]
