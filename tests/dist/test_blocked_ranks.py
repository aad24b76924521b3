"""Ranks that block each other or die by a signal: the user is told where in the script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvd_elastic.virtual import VirtualCluster
from tests.dist import jobs
from tests.dist.jobs import Job, assert_nothing_left, hostfile_of, write_script
from tests.paths import COSTLY

pytestmark = pytest.mark.dist

hosts, shared = jobs.hosts, jobs.shared

SCRIPT = """
import ctypes
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
data = TensorDataset(torch.randn(80, 4), torch.randint(2, (80,)))
loader = hvd.DataLoader(data, 10)
what, mark = sys.argv[1], Path(sys.argv[2])


def evaluate():
    while not mark.exists(): time.sleep(0.05)  # the others wait longer than is usual


def validate():
    hvd.allreduce(torch.zeros(1), "val_loss")


def crash():
    mark.touch()
    ctypes.string_at(0)


@hvd.run
def train(state):
    for epoch in hvd.epochs(3):
        for step, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            if what == "leave" and hvd.rank() == 1 and step == 4:
                return
            if what == "break" and hvd.rank() == 1 and step == 4:
                break
            if what == "crash" and hvd.rank() == 1 and not mark.exists():
                crash()
            if what == "crash" and hvd.size() == 1 and not mark.exists():
                time.sleep(3)  # the other one comes late
        if what == "apart" and hvd.rank() == 0:
            evaluate() if epoch == 0 else validate()


train(hvd.State(model=model, optimizer=optimizer))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def line_of(words: str) -> int:
    """Number of the line of the script that has these words."""
    (line,) = [n for n, text in enumerate(SCRIPT.splitlines(), 1) if words in text]
    return line


def test_ranks_in_different_collectives(home: Path) -> None:
    """After an epoch in which one rank kept the others waiting, which is shown and no fault."""
    script = write_script(home, SCRIPT)
    options = ["-H", hostfile_of(home / "hosts", ["localhost"], 2), "--min-np", 2]
    options += ["--checkpoint-every", 0]
    busy = f"which is at tiny.py:{line_of('while not mark')} (evaluate)"
    waits = f"the others wait for worker localhost:0, {busy}"
    with Job(*options, "--", sys.executable, script, "apart", home / "mark", home=home) as job:
        job.until(lambda: waits in job.text, waits)
        (home / "mark").touch()
        assert job.wait() == 1
    (ended,) = job.events("run_finished")
    where, turn = f"tiny.py:{line_of('allreduce')}", f"tiny.py:{line_of('hvd.epochs(')}"
    assert (
        "rank 0 (localhost:0) waits for allreduce 'val_loss' "
        f"at {where} (validate), after 16 steps; "
        "rank 1 (localhost:1) waits for the flags that the ranks exchange in each step, and where "
        f"an epoch ends at {turn} (train), after 16 steps. "
    ) in ended["message"]
    assert ended["steps"] == 16, "as the message says, though metrics come less often"
    assert len(job.events("rescale_started")) == 1, "nothing was tried again"
    assert_nothing_left(mark=job.mark)


@COSTLY
def test_a_rank_that_has_left_the_loop(home: Path) -> None:
    script = write_script(home, SCRIPT)
    options = ["-H", hostfile_of(home / "hosts", ["localhost"], 2), "--min-np", 2]
    options += ["--checkpoint-every", 0]
    with Job(*options, "--", sys.executable, script, "leave", home / "mark", home=home) as job:
        assert job.wait() == 1
    (ended,) = job.events("run_finished")
    assert "rank 0 (localhost:0) waits for the gradients" in ended["message"]
    assert "rank 1 (localhost:1) waits for the end of training" in ended["message"]
    assert ended["steps"] == 5
    assert_nothing_left(mark=job.mark)


def test_a_rank_that_has_gone_on_to_the_next_epoch(home: Path) -> None:
    script = write_script(home, SCRIPT)
    options = ["-H", hostfile_of(home / "hosts", ["localhost"], 2), "--min-np", 2]
    with Job(*options, "--", sys.executable, script, "break", home / "mark", home=home) as job:
        assert job.wait() == 1
    (ended,) = job.events("run_finished")
    left = line_of('what == "break"') + 1
    assert (
        "rank 1 of 2 is at the end of epoch 0 (it left epoch 0 at example 50, "
        f"tiny.py:{left} (train)), and other ranks take step 6 of it"
    ) in ended["message"]
    assert ended["steps"] == 5, "the gradients of two epochs were not used"
    assert job.text.count("rank 1 of 2 is at the end") == 1, "told once in full"
    assert_nothing_left(mark=job.mark)


@pytest.mark.root
def test_a_host_that_does_not_know_its_own_name(
    home: Path, hosts: VirtualCluster, shared: Path
) -> None:
    """It trains all the same; of a worker that dies there by a signal the stack is shown."""
    if hosts.loopback:
        pytest.skip("hosts on the loopback network have this machine's name")
    a, b, *_ = hosts.hosts
    names, mark = shared / "names", shared / "crashed"
    names.write_text("127.0.0.1 localhost\n")
    hosts.run_on(b, ["mount", "--bind", str(names), "/etc/hosts"], check=True)
    try:
        options = ["-H", hostfile_of(home / "hosts", [a, b]), "-F", hosts.ssh_config, "--np", 2]
        script = write_script(shared, SCRIPT, "crash.py")
        with Job(*options, "--", sys.executable, script, "crash", mark, home=home) as job:
            assert job.wait() == 0, job.text
    finally:
        hosts.run_on(b, ["umount", "/etc/hosts"], check=True)
    assert f"worker {b}:0: this host does not know its own name '{b}'" in job.text
    assert 2 in [event["size"] for event in job.events("rescale_finished")]
    (crashed,) = job.events("worker_crashed")
    assert (crashed["host"], crashed["cause"]) == (b, "was killed by signal 11")
    assert f'crash.py", line {line_of("string_at")} in crash' in crashed["traceback"]
    assert "Fatal Python error: Segmentation fault" in job.text
    assert_nothing_left(mark=job.mark, cluster=hosts)
