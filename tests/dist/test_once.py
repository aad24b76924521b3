"""What a script does around its steps has its effect once, wherever a worker dies in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.dist.jobs import Job, write_script
from tests.paths import COSTLY

# test_styles.py has workers die at random lines of three scripts in every run of the tests.
pytestmark = [pytest.mark.dist, COSTLY]

SCRIPT = '''\
"""Train with everything that a script keeps between two steps; die once at each place."""
import argparse
import hashlib
import itertools
import json
import os
import signal
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--epochs", type=int)
parser.add_argument("--die-at", type=int, nargs="*", default=[], help="place in each epoch")
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
swa = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model)
by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
totals = hvd.Accumulator()
data = TensorDataset(torch.randn(48, 4).double(), torch.randn(48, 1).double())
loader = hvd.DataLoader(data, 12, shuffle=True)


class Meter:
    """A helper object with a state of its own."""

    def __init__(self):
        self.values = []

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = list(state["values"])


meter = Meter()


def die(place, epoch, rank):
    """End this process if it has this rank and nobody died here before."""
    if args.die_at[epoch : epoch + 1] == [place] and hvd.rank() == rank:
        mark = args.folder / f"died-{place}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def everything(state):
    """A digest of the whole state."""
    tensors = [t for m in (model, swa) for t in m.state_dict().values()]
    tensors += [v["momentum_buffer"] for v in optimizer.state.values()]
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]
    return {
        "tensors": digest,
        "lr": optimizer.param_groups[0]["lr"],
        "by_step": by_step.last_epoch,
        "by_epoch": by_epoch.last_epoch,
        "bad": state.bad,
        "seen": state.seen,
        "history": list(state.history),
        "meter": list(meter.values),
        "begun": state.begun,
    }


@hvd.run
def train(state):
    for epoch in hvd.epochs(args.epochs):
        place = itertools.count()
        here = lambda: die(next(place), epoch, epoch % 2)  # noqa: E731
        here()  # 0
        state.begun += 1
        state.batches = 0
        here()  # 1
        for number, (inputs, targets) in enumerate(loader):
            if number == 1:
                here()  # 2
            state.seen += 12
            state.batches += 1
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            totals.add(examples=len(inputs))
            if number == 1:
                here()  # 3
            optimizer.step()
            if number == 1:
                here()  # 4
            by_step.step()
            state.commit()
            if number == 1:
                here()  # 5
            if epoch % 2 and state.batches == 3:
                break
        here()  # 6
        by_epoch.step()
        here()  # 7
        swa.update_parameters(model)
        state.bad += 1
        state.commit()
        here()  # 8
        mean = hvd.allreduce(torch.tensor([float(epoch)]), "first").item()
        here()  # 9
        meter.values.append(mean)
        state.history.append(mean)
        here()  # 10
        state.commit()
        hvd.allreduce(torch.tensor([1.0]), "second")
        here()  # 11
        state.history.append(-mean)
        if hvd.rank() == 0:
            with open(args.folder / "story.jsonl", "a") as file:
                file.write(json.dumps({"epoch": epoch, **everything(state)}) + "\\n")
        here()  # 12


train(
    hvd.State(
        model=model, optimizer=optimizer, swa=swa, by_step=by_step, by_epoch=by_epoch, meter=meter,
        bad=0, seen=0, batches=0, begun=0, history=[],
    )
)
'''
PLACES = range(13)


def story(
    home: Path, name: str, *options: object, epochs: int, spares: int = 0
) -> dict[int, object]:
    """Train, and return the whole state at the end of each epoch."""
    (home / name).mkdir()
    script = write_script(home, SCRIPT, f"{name}.py")
    hosts = home / "hosts"
    hosts.write_text("localhost slots=4\n", encoding="utf-8")
    with Job(
        *("--hostfile", hosts, "--np", "2", "--min-np", "2", "--spares", spares),
        *("--", sys.executable, script, "--folder", home / name, "--epochs", epochs, *options),
        home=home,
    ) as job:
        assert job.wait() == 0, job.text
    lines = [json.loads(line) for line in (home / name / "story.jsonl").read_text().splitlines()]
    return {line["epoch"]: line for line in lines}


def test_a_death_at_any_statement_changes_nothing(tmp_path: Path) -> None:
    epochs = len(PLACES) + 1
    disturbed = story(tmp_path, "disturbed", "--die-at", *PLACES, epochs=epochs, spares=2)
    died = {path.name for path in tmp_path.glob("disturbed/died-*")}
    assert died == {f"died-{place}" for place in PLACES}
    assert disturbed == story(tmp_path, "undisturbed", epochs=epochs)
