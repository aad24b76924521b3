"""A generator and a discriminator whose final state does not depend on what happens to ranks.

``KILLS`` holds, for each kill, the rank that kills itself, when (bodies that two ranks have done
together), and after which of the steps of a body.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.worker import context

FOLDER = Path(sys.argv[1])
KILLS = json.loads(os.environ.get("KILLS", "[]"))
WAIT_S = 200.0

hvd.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer_g = hvd.DistributedOptimizer(
    torch.optim.Adam(generator.parameters(), lr=0.01), generator, sync_batch_norm=True
)
optimizer_d = hvd.DistributedOptimizer(
    torch.optim.SGD(discriminator.parameters(), lr=0.05, momentum=0.9), discriminator
)
data = TensorDataset(torch.randn(72, 2) * 0.5 + 1, torch.randn(72, 4))
loader: hvd.DataLoader[list[torch.Tensor]] = hvd.DataLoader(data, 12, shuffle=True)
models = {"generator": generator, "discriminator": discriminator}
optimizers = {"optimizer_g": optimizer_g, "optimizer_d": optimizer_d}


met = 0
"""Generation in which this rank trains."""
together = 0
kills_before = 0
"""How many of KILLS had happened when the two ranks that train now met: only the next one counts,
since a survivor that died in the same body would leave nobody."""


def kills_so_far():
    return len(list(FOLDER.glob("died-*")))


def may_die(place):
    if kills_before < len(KILLS):
        rank, bodies, where = KILLS[kills_before]
        died = FOLDER / f"died-{kills_before}"
        if (hvd.rank(), where) == (rank, place) and together >= bodies and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@hvd.run
def train(state):
    global met, together, kills_before
    for _ in hvd.epochs(8):
        for real, noise in loader:
            state.bodies += 1
            if met != context.current().worker.generation:
                met, together = context.current().worker.generation, 0
                kills_before = kills_so_far()
            together += hvd.size() == 2
            for turn in range(2):
                optimizer_d.zero_grad()
                fake = generator(noise).detach()
                loss = softplus(discriminator(fake)) + softplus(-discriminator(real))
                loss.mean().backward()
                optimizer_d.step()
                state.critic += 1
                may_die(f"after critic {turn}")
            hvd.allreduce(torch.tensor([float(state.critic)]), "between")
            optimizer_g.zero_grad()
            softplus(-discriminator(generator(noise))).mean().backward()
            may_die("before generator")
            optimizer_g.step()
            may_die("after generator")
            if hvd.size() == 1 and kills_so_far() < len(KILLS):
                end = time.monotonic() + WAIT_S
                while not context.current().worker.wants_change and time.monotonic() < end:
                    time.sleep(0.05)  # for the worker that joins


state = hvd.State(**models, **optimizers, bodies=0, critic=0)
train(state)
if hvd.rank() == 0:
    held = [list(model.state_dict().values()) for model in models.values()]
    for optimizer in optimizers.values():
        held += [list(values.values()) for values in optimizer.state.values()]
    torch.save([*held, [torch.tensor([state.bodies, state.critic])]], FOLDER / "end.pt")
