"""Two ranks that meet once a period, and tell who took part in each.

``KILLS`` holds, for each kill, the rank that kills itself, in which step, and whether before or
after it takes it. ``PLANNED`` is a step, the last of a period, in which the ranks wait until the
leader wants other ranks. ``WAY`` is diloco, streaming, sgd (the ranks meet in each step) or plain.
``EXAMPLE_S`` is how long an example takes at least.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.worker import context

FOLDER = Path(sys.argv[1])
KILLS = json.loads(os.environ.get("KILLS", "[]"))
PLANNED = int(os.environ.get("PLANNED", "0"))
EXAMPLE_S = float(os.environ.get("EXAMPLE_S", "0"))
WAY = os.environ.get("WAY", "diloco")
EPOCHS, EVERY = int(os.environ.get("EPOCHS", "4")), 4
NAME = f"{os.environ.get('HVD_ELASTIC_WORKER')}-{os.getpid()}"

hvd.init()
worker = context.current().worker
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
data = TensorDataset(torch.randn(44, 4).double(), torch.randn(44, 1).double())
if WAY in ("diloco", "streaming"):
    streaming: dict[str, Any] = (
        {"fragments": 2, "delay": 1, "mix": 0.5} if WAY == "streaming" else {}
    )
    optimizer = hvd.LocalOptimizer(
        torch.optim.AdamW(model.parameters(), 0.01),
        model,
        every=EVERY,
        outer=torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True),
        **streaming,
    )
else:
    sgd = torch.optim.SGD(model.parameters(), 0.05)
    if WAY == "sgd":
        optimizer = hvd.LocalOptimizer(sgd, model, every=1)
    else:
        optimizer = hvd.DistributedOptimizer(sgd, model)
loader: hvd.DataLoader[torch.Tensor] = hvd.DataLoader(data, 8)


def may_die(step, place):
    for number, (rank, when, where) in enumerate(KILLS):
        died = FOLDER / f"died-{number}"
        if (hvd.rank(), step, place) == (rank, when, where) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@hvd.run
def train(state):
    for _ in hvd.epochs(EPOCHS):
        for inputs, targets in loader:
            begun = worker.progress.step
            step = begun + len(context.current().step.passes)
            may_die(step, "before")
            while step == PLANNED and not (FOLDER / "planned").exists():
                (FOLDER / "waits").touch()
                if worker.wants_change:
                    (FOLDER / "planned").touch()
                time.sleep(0.05)
            time.sleep(EXAMPLE_S * len(inputs))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if worker.progress.step != begun:
                told = [worker.generation, begun, worker.progress.step, hvd.rank(), NAME]
                with (FOLDER / f"{NAME}.jsonl").open("a") as file:
                    file.write(json.dumps(told) + "\n")
            may_die(step, "after")


train(hvd.State(model=model, optimizer=optimizer))
torch.save(model.state_dict(), FOLDER / f"end-{NAME}.pt")
