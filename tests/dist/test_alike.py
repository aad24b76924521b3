"""Ranks that are not alike: their data, their random numbers, and the sums of their losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.dist.jobs import Job, call, times_all_trained, write_script
from tests.paths import COSTLY

pytestmark = pytest.mark.dist

DATA = """\
import random
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset, TensorDataset, random_split

import hvd_elastic.torch as hvd

hvd.init()


class Files(Dataset):
    def __len__(self):
        return len(names)

    def __getitem__(self, index):
        return torch.tensor([float(names[index])]), names[index]


kind = sys.argv[1]
letters = list(set("hello world, this is the text"))
if kind == "split":
    data, _ = random_split(TensorDataset(torch.arange(200).float()[:, None]), [160, 40])
elif kind == "listed":
    names = random.sample(range(200), 200)  # as os.listdir() on each host
    data = Files()
else:
    data = TensorDataset(torch.tensor([[float(ord(letter))] for letter in letters]))
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
loader = hvd.DataLoader(data, 8, shuffle=True)


@hvd.run
def train(state):
    for epoch in hvd.epochs(1):
        for inputs, *_ in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()


train(hvd.State(model=model, optimizer=optimizer))
"""


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("split", "indices"),
        pytest.param("listed", "examples", marks=COSTLY),
        pytest.param("letters", None, marks=COSTLY),
    ],
)
@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=COSTLY) for n in (1, 3))])
def test_indices_mean_the_same_examples_on_all_ranks(
    tmp_path: Path, kind: str, field: str | None, ranks: int
) -> None:
    """Else the run ends before its first step; a set has one order on all ranks of a run."""
    script = write_script(tmp_path, DATA)
    done = call("run", "--np", ranks, "--", sys.executable, script, kind, home=tmp_path)
    if field is None or ranks == 1:
        assert done.returncode == 0, done.stdout + done.stderr
        return
    assert done.returncode == 1
    said = " ".join((done.stdout + done.stderr).split())
    assert f"they differ in '{field}' of the " in said
    assert "run failed after 0 steps" in said


CHANGED = """\
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

import hvd_elastic.torch as hvd

mark, listing = Path(sys.argv[1]), Path(sys.argv[2])
hvd.init()


class Files(Dataset):
    def __init__(self):
        self.names = json.loads(listing.read_text())

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return torch.tensor([float(self.names[index])])


model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
loader = hvd.DataLoader(Files(), 24, shuffle=True)


@hvd.run
def train(state):
    for epoch in hvd.epochs(200):
        for inputs in loader:
            time.sleep(0.02)
            if epoch == 5 and hvd.rank() == hvd.size() - 1 and not mark.exists():
                mark.touch()
                listing.write_text(json.dumps(random.sample(range(240), 240)))
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()


train(hvd.State(model=model, optimizer=optimizer))
"""


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=COSTLY) for n in (2, 3)])
def test_a_worker_that_joins_with_other_data_is_refused_by_the_name_of_the_field(
    tmp_path: Path, ranks: int
) -> None:
    """The files are listed in another order when the worker that replaces a lost one starts."""
    listing = tmp_path / "listing.json"
    listing.write_text(json.dumps(list(range(240))), encoding="utf-8")
    script = write_script(tmp_path, CHANGED)
    words = ["--np", ranks, "--", sys.executable, script, tmp_path / "died", listing]
    with Job(*words, home=tmp_path) as job:
        assert job.wait() == 1, job.text
    assert "'names'" in job.text
    assert "Traceback" not in job.text


ALIKE = """\
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

mark, dies, over = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
hvd.init()
random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))


def made():
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


model, optimizer = made()
model.rewards = []
optimizer = hvd.DistributedOptimizer(optimizer, model)
loader = hvd.DataLoader(data, 24, shuffle=True)
totals = hvd.Accumulator()


def loss_of(model, inputs, targets):
    if over == "examples":
        return mse_loss(model(inputs), targets, reduction="sum")
    valid = targets > 0
    return ((model(inputs) - targets).square() * valid).sum() / valid.sum()


def end(state):
    plain, sgd = made()
    for _ in range(state.step):
        sgd.zero_grad()
        loss_of(plain, *data.tensors).backward()
        sgd.step()
    for own, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-5)
    totals.synchronize()
    assert totals.mean("ones") == 1.0
    print("ends alike", hvd.size())


@hvd.run
def train(state):
    random.random()  # a worker that joins does it too
    for epoch in hvd.epochs(10_000):
        for inputs, targets in loader:
            time.sleep(0.02)
            model.rewards += [1.0] * 5
            dice = [random.random(), np.random.rand(), torch.rand(1).item()]
            all_here = state.step >= 5 and hvd.size() == state.ranks  # one may come late
            if all_here and hvd.rank() == dies and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            drawn = hvd.allgather(torch.tensor([dice], dtype=torch.float64), "dice")
            assert (drawn == drawn[0]).all(), drawn
            optimizer.zero_grad()
            if over == "valid targets":
                hvd.step_weight(int((targets > 0).sum()))
            loss_of(model, inputs, targets).backward()
            optimizer.step()
            totals.add(ones=len(inputs))
            model.rewards.clear()
            state.step += 1
            state.after += mark.exists() and hvd.size() == state.ranks
            if state.after == 10 or (dies < 0 and state.step == 20):
                hvd.stop("enough")
    end(state)


values = {"step": 0, "after": 0, "ranks": int(sys.argv[3])}
train(hvd.State(model=model, optimizer=optimizer, **values))
"""


@pytest.mark.parametrize(
    ("over", "ranks", "dies"),
    [
        ("examples", 2, 1),
        *(
            pytest.param(*each, marks=COSTLY)
            for each in [
                *(("examples", *each) for each in ((1, -1), (2, 0), (3, 2), (3, 0))),
                *(("valid targets", *each) for each in ((1, -1), (2, 1), (3, 0))),
            ]
        ),
    ],
)
def test_sums_and_random_numbers_do_not_depend_on_joins_and_kills(
    tmp_path: Path, over: str, ranks: int, dies: int
) -> None:
    script = write_script(tmp_path, ALIKE)
    words = ["--np", ranks, "--", sys.executable, script, tmp_path / "died", dies, ranks, over]
    with Job(*words, home=tmp_path) as job:
        assert job.wait() == 0, job.text
        assert f"ends alike {ranks}" in job.text
        assert ("model.rewards has 5 entries and had 0" in job.text) == (dies >= 0)
        assert times_all_trained(job.events(), ranks) == (1 if dies < 0 else 2)
