"""Files that a script saves: rank 0's host is killed, and the leader's disk is full."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_elastic.torch import load_model
from tests.dist.conftest import StartJob
from tests.dist.running import RunningJob, Stage
from tests.paths import COSTLY, LIMIT_S
from tests.small_disk import mounted

pytestmark = pytest.mark.dist

# Saves the model after each epoch, with some bytes more where a file "large" is, and writes the
# same bytes where the test can read them.
SCRIPT = """\
import io, sys, time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

folder = Path(sys.argv[1])
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
data = TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
loader = hvd.DataLoader(data, 10, shuffle=True)


@hvd.run
def train(state):
    for epoch in hvd.epochs(10**6):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            time.sleep(0.02)
        best = {"model": model.state_dict(), "epoch": epoch}
        if (folder / "large").exists():
            best["more"] = torch.zeros(100_000)
        if hvd.rank() == 0:
            buffer = io.BytesIO()
            torch.save(best, buffer)
            (folder / f"epoch-{epoch}").write_bytes(buffer.getvalue())
        hvd.save("best.pt", best)
        enough = torch.tensor([float((folder / "enough").exists())])
        if hvd.allreduce(enough, "enough", average=False) > 0:
            return


train(hvd.State(model=model, optimizer=optimizer))
hvd.save("final.pt", model.state_dict())
if (folder / "load").exists():
    for name in ("best.pt", "final.pt"):
        loaded = hvd.load_model(name, torch.nn.Linear(4, 2), share=True)
        (folder / f"loaded-{hvd.rank()}-{name}").write_text(str(loaded.state_dict()))
"""


@pytest.fixture
def start_saving(stage: Stage, start_job: StartJob) -> Any:
    def start(hosts: dict[str, int], *options: str) -> RunningJob:
        script = stage.folder / "saving.py"
        script.write_text(SCRIPT)
        return start_job(hosts, *options, script=[sys.executable, str(script), "FOLDER"])

    return start


def get(job: RunningJob, name: str) -> bytes:
    """What ``hvd-elastic get RUN NAME -`` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "hvd_elastic.cli.app", "get", job.run_id, name, "-"],
        capture_output=True,
        env=job.environment(),
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_bytes(job: RunningJob, content: bytes) -> int:
    """The epoch in which the script wrote exactly these bytes."""
    epoch = int(torch.load(io.BytesIO(content))["epoch"])
    assert content == (job.folder / f"epoch-{epoch}").read_bytes()
    return epoch


def test_the_best_model_outlives_the_host_of_rank_0_and_all_ranks_load_it(
    stage: Stage, start_saving: Any
) -> None:
    a, b, c, *_ = stage.hosts
    job = start_saving({a: 1, b: 1, c: 1})
    job.wait_size(3)
    (job.folder / "load").touch()
    job.wait_event("saved", 0, host=a)
    early = check_bytes(job, get(job, "best.pt"))
    stage.cluster.crash(a)
    job.wait_event("saved", 0, host=b)
    assert check_bytes(job, get(job, "best.pt")) >= early
    (job.folder / "enough").touch()
    assert job.wait() == 0, job.story()
    events = {event["name"]: event for event in job.kinds("saved")}
    assert {event["host"] for event in events.values()} == {b}
    assert check_bytes(job, get(job, "best.pt")) == max(
        int(path.name.partition("-")[2]) for path in job.folder.glob("epoch-*")
    )
    assert "best.pt (step " in job.command("status", job.run_id)
    listed = json.loads(job.command("get", job.run_id, "--json"))
    assert [(row["name"], row["step"]) for row in listed] == [
        (name, events[name]["step"]) for name in ("best.pt", "final.pt")
    ]
    final = load_model(Path(events["final.pt"]["path"]), torch.nn.Linear(4, 2))
    newest = load_model(job.home / "runs" / job.run_id, torch.nn.Linear(4, 2))
    assert torch.equal(final.weight, newest.weight)
    for name in ("best.pt", "final.pt"):
        kept = load_model(Path(events[name]["path"]), torch.nn.Linear(4, 2)).state_dict()
        loaded = [(job.folder / f"loaded-{rank}-{name}").read_text() for rank in (0, 1)]
        assert loaded == [str(kept)] * 2
    job.check_nothing_left([b, c])


@COSTLY
def test_what_is_saved_without_a_leader_is_fetched_by_the_next(
    stage: Stage, start_saving: Any
) -> None:
    a, b, *_ = stage.hosts
    job = start_saving({a: 1, b: 1})
    job.wait_size(2)
    job.wait_event("saved", 0)
    job.process.kill()
    job.process.wait()
    job.poll()
    known = len(list(job.folder.glob("epoch-*")))
    job.wait_for(
        lambda: len(list(job.folder.glob("epoch-*"))) > known + 3, "more epochs", ended_too=True
    )
    since = job.mark()
    job.resume(alive=True)
    job.wait_event("taken_over", since)
    job.wait_event("saved", since)
    assert check_bytes(job, get(job, "best.pt")) >= known
    (job.folder / "enough").touch()
    assert job.wait() == 0, job.story()
    assert not job.kinds("warning", since)
    check_bytes(job, get(job, "best.pt"))
    job.check_nothing_left()


@COSTLY
@pytest.mark.root
def test_a_full_disk_of_the_leader_keeps_the_file_on_its_host_for_resume(
    stage: Stage, start_saving: Any
) -> None:
    if stage.cluster.loopback:
        pytest.skip("needs hosts in namespaces: without root no file system can be mounted")
    a, b, *_ = stage.hosts
    job = start_saving({a: 1, b: 1})
    job.wait_size(2)
    place = job.home / "runs" / job.run_id / "saved"
    with mounted(place, "256k", lazy=True):
        job.wait_event("saved", job.mark())
        since = job.mark()
        (job.folder / "large").touch()
        warned = job.wait_event("warning", since)["message"]
        assert f"{place} is full (No space left on device)" in warned
        assert warned.endswith("; trying again")
        held = check_bytes(job, get(job, "best.pt"))
        job.wait_steps(8)
        assert check_bytes(job, get(job, "best.pt")) == held
        (job.folder / "enough").touch()
        assert job.wait() == 1, job.story()
        ended = job.kinds("run_finished")[-1]
        assert ended["status"] == "failed"
        assert ended["message"].startswith("training has ended, and the file 'best.pt' that ")
        assert f"{place} is full" in ended["message"]
        assert f"It stays on the disk of host {a}, and hvd-elastic run --resume" in ended["message"]
        assert [event["message"] for event in job.kinds("warning", since)] == [warned]
        job.check_nothing_left(but_spools=True)
        spooled = list((job.home / "spool" / job.run_id / a / "saved").glob("*.save"))
        assert len(spooled) == 1
    since = job.mark()
    job.resume()
    assert job.wait() == 0, job.story()
    content = get(job, "best.pt")
    assert "more" in torch.load(io.BytesIO(content))
    check_bytes(job, content)
    job.check_nothing_left()
