"""A model that the script converts between two epochs, while ranks die and join."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.jobs import Job, environment, write_script
from tests.paths import COSTLY, LIMIT_S

pytestmark = pytest.mark.dist

SCRIPT = '''\
"""Converts its model after the second epoch; a rank dies in the fourth."""
import json
import os
import signal
import sys
from pathlib import Path

import torch

import hvd_elastic.torch as hvd

folder, how, dies = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "dies"
hvd.init()
torch.manual_seed(0)
layers = torch.nn.Conv2d(3, 8, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(288, 1)
model = torch.nn.Sequential(*layers)
inputs = torch.randn(66, 3, 8, 8)
targets = inputs.mean((1, 2, 3))[:, None] * 5
sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5, fused=True)
optimizer = hvd.DistributedOptimizer(sgd, model)
loader = hvd.DataLoader(torch.utils.data.TensorDataset(inputs, targets), 12, shuffle=True)


def convert():
    if how == "there and back":
        model.double()
        model.float()
    elif how == "another type":
        model.double()
        for state in optimizer.state.values():  # as PyTorch has it, moments keep their type
            state["momentum_buffer"] = state["momentum_buffer"].double()
    elif how == "other strides":
        model.to(memory_format=torch.channels_last)


@hvd.run
def train(state):
    for epoch in hvd.epochs(6):
        for number, (a, b) in enumerate(loader):
            kind = model[0].weight.dtype
            optimizer.zero_grad()
            (model(a.to(kind)) - b.to(kind)).square().mean().backward()
            if how == "gradients":
                optimizer.synchronize()
                for parameter in model.parameters():
                    parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)
            optimizer.step()
            mark = folder / "died"
            if dies and epoch == 3 and hvd.rank() == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        flat = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
        every = hvd.allgather(flat[None], "parameters")
        assert (every == every[0]).all(), f"ranks differ after epoch {epoch}"
        if epoch == 1:
            convert()
    if hvd.rank() == 0:
        (folder / "end.json").write_text(json.dumps([str(kind), hvd.size(), *flat.tolist()]))


train(hvd.State(model=model, optimizer=optimizer))
'''
HOW = [
    "another type",
    *(
        pytest.param(each, marks=COSTLY)
        for each in ("there and back", "other strides", "gradients")
    ),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=COSTLY)])
@pytest.mark.parametrize("how", HOW)
def test_a_model_that_is_converted_trains_as_on_one_rank(
    tmp_path: Path, how: str, ranks: int
) -> None:
    """The rank that joins after the conversion has built the model as it was before."""
    script = write_script(tmp_path, SCRIPT)
    alone, folder = tmp_path / "alone", tmp_path / "ranks"
    alone.mkdir()
    folder.mkdir()
    command = [sys.executable, str(script), str(alone), how, "lives"]
    subprocess.run(command, env=environment(tmp_path), check=True, timeout=LIMIT_S)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"localhost slots={ranks + 1}\n", encoding="utf-8")
    options = ["--hostfile", hosts, "--np", ranks, "--min-np", ranks, "--spares", 1]
    with Job(*options, "--", sys.executable, script, folder, how, "dies", home=tmp_path) as job:
        assert job.wait() == 0, job.text
    assert (folder / "died").exists()
    kind, _, *expected = json.loads((alone / "end.json").read_text())
    found_kind, size, *found = json.loads((folder / "end.json").read_text())
    assert (found_kind, size) == (kind, ranks)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
