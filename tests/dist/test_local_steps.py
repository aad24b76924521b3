"""Rings that meet once a period: what they learn is what the algorithm says, whoever dies in it."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tests.dist.conftest import StartJob
from tests.dist.running import RunningJob, Stage
from tests.paths import COSTLY, ROOT, WORKER_PYTHONPATH

pytestmark = pytest.mark.dist

SCRIPT = ROOT / "tests" / "dist" / "scripts" / "local_steps.py"
EXAMPLES, BATCH = 44, 8
BATCHES = 6
Weights = dict[str, torch.Tensor]
Kill = tuple[int, int, str]


def run(stage: Stage, start_job: StartJob, *kills: Kill, **variables: str) -> RunningJob:
    """Train with two ranks, two spares, and these kills: rank, step, and before or after it."""
    sizes = ("--np", "2", "--min-np", "2", "--spares", "2")
    variables["KILLS"] = json.dumps(kills)
    return start(start_job, dict.fromkeys(stage.hosts, 1), *sizes, **variables)


def start(start_job: StartJob, hosts: dict[str, int], *options: str, **of: str) -> RunningJob:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in of.items():
            patch.setenv(name, value)
        script = [sys.executable, str(SCRIPT), "FOLDER"]
        job: RunningJob = start_job(hosts, *options, script=script)
    return job


def end_of(job: RunningJob, epochs: int = 4) -> Weights:
    """What the run learnt, which is the same on all ranks, each example once in an epoch."""
    assert job.wait() == 0, job.story()
    audit = job.check_audit(finished=True)
    assert (audit.complete_epochs, audit.voided_steps) == (epochs, 0), job.story()
    assert job.kinds("run_finished")[-1]["steps"] == epochs * BATCHES, "each inner step counts"
    first, *others = (torch.load(path) for path in job.folder.glob("end-*.pt"))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    return first


def periods(job: RunningJob) -> list[tuple[int, int, list[str]]]:
    """First step of each period, the step after its last, and who took part, by rank."""
    found: dict[int, dict[int, list[Any]]] = {}
    for path in job.folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            generation, begin, end, rank, name = json.loads(line)
            found.setdefault(begin, {}).setdefault(generation, []).append((rank, name, end))
    newest = [(begin, sorted(tries[max(tries)])) for begin, tries in sorted(found.items())]
    return [(begin, ranks[0][2], [name for _, name, _ in ranks]) for begin, ranks in newest]


def by_the_paper(members: list[tuple[int, int, list[str]]], *, streams: bool = False) -> Weights:
    """DiLoCo in plain PyTorch, by the ranks that took part in each period.

    Who comes anew begins with what was there before: moments, and if it streams, parameters.
    """
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers).double()
    inputs, targets = torch.randn(EXAMPLES, 4).double(), torch.randn(EXAMPLES, 1).double()
    parameters = list(model.parameters())
    outer = torch.optim.SGD(parameters, 0.7, momentum=0.9, nesterov=True)
    shared = [each.detach().clone() for each in parameters]
    states: dict[str, Any] = {}
    turn = 0
    for begin, end, names in members:
        whole = not streams or end % BATCHES == 0
        part = range(4) if whole else ([0], [1, 2, 3])[turn]
        turn = 0 if whole else 1 - turn
        known = next((states[name] for name in names if name in states), (shared, None))
        before, states = states, {}
        moved = []
        for rank, name in enumerate(names):
            own, moments = before.get(name, known)
            inner = torch.optim.AdamW(parameters, 0.01)
            if moments is not None:
                inner.load_state_dict(copy.deepcopy(moments))
            torch._foreach_copy_([each.data for each in parameters], own)
            far: list[torch.Tensor] = []
            for step in range(begin, end):
                first = step % BATCHES * BATCH
                share = min(BATCH, EXAMPLES - first) // len(names)
                mine = slice(first + rank * share, first + (rank + 1) * share)
                inner.zero_grad()
                torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
                inner.step()
                if step == end - (1 if whole else 2):
                    far = [shared[n] - parameters[n].detach() for n in part]
            states[name] = (
                [each.detach().clone() for each in parameters],
                copy.deepcopy(inner.state_dict()),
            )
            moved.append(far)
        torch._foreach_copy_([each.data for each in parameters], shared)
        outer.zero_grad()
        for number, each in zip(part, zip(*moved, strict=True), strict=True):
            parameters[number].grad = sum(each) / len(each)
        outer.step()
        shared = [each.detach().clone() for each in parameters]
        for own, _ in states.values():
            for number in part:
                own[number] = shared[number].lerp(own[number], 0.0 if whole else 0.5)
    return model.state_dict()


def check_by_the_paper(job: RunningJob, epochs: int = 4, *, streams: bool = False) -> Weights:
    found = end_of(job, epochs)
    expected = by_the_paper(periods(job), streams=streams)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)  # bit for bit
    return found


def test_kills_within_periods_leave_what_the_algorithm_says(
    stage: Stage, start_job: StartJob
) -> None:
    """Survivors keep their moments, and newcomers have theirs; periods are of 4 steps and 2."""
    job = run(stage, start_job, (1, 8, "after"), (0, 16, "before"))
    check_by_the_paper(job)
    assert len(list(job.folder.glob("died-*"))) == 2
    assert len({name for *_, names in periods(job) for name in names}) == 4


@COSTLY
def test_kills_between_fragments_leave_what_streaming_says(
    stage: Stage, start_job: StartJob
) -> None:
    """Periods of 2 batches, of which the last in an epoch averages both fragments."""
    kills: list[Kill] = [(1, 8, "before"), (0, 10, "after"), (1, 15, "after"), (0, 18, "before")]
    check_by_the_paper(run(stage, start_job, *kills, WAY="streaming"), streams=True)


@COSTLY
@pytest.mark.parametrize(
    "kill", [None, (1, 7, "before"), (1, 8, "after"), (1, 9, "before"), (1, 10, "before")]
)
def test_a_kill_anywhere_is_a_planned_change_at_the_beginning(
    stage: Stage, start_job: StartJob, kill: Kill | None
) -> None:
    """The period of the steps 7 to 10, which rank 1 does not survive, or leaves before."""
    if kill is not None:
        check_by_the_paper(run(stage, start_job, kill))
        return
    job = run(stage, start_job, PLANNED="6")
    job.wait_for((job.folder / "waits").exists, "the ranks wait for other ranks")
    second = stage.hosts[1]
    job.use({host: 1 for host in stage.hosts if host != second})
    check_by_the_paper(job)
    members = {begin: names for begin, _, names in periods(job)}
    assert members[4][0] in members[6], "one rank stays"
    assert members[4][1] not in members[6], "and the other is another"


@COSTLY
def test_twenty_random_faults_change_nothing(stage: Stage, start_job: StartJob) -> None:
    rng = random.Random(0)
    # One in each epoch, whose periods have 4 steps and 2, so that a survivor is left each time.
    steps = [BATCHES * epoch + rng.randint(1, 4) for epoch in range(20)]
    kills = [(rng.randint(0, 1), step, rng.choice(["before", "after"])) for step in steps]
    job = run(stage, start_job, *kills, EPOCHS="21")
    check_by_the_paper(job, epochs=21)
    assert len(list(job.folder.glob("died-*"))) == 20


@COSTLY
def test_steps_of_sgd_that_meet_each_time_are_synchronous_training(
    stage: Stage, start_job: StartJob, tmp_path: Path
) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HVD_", "HOROVOD_"))}
    plain = {**kept, "PYTHONPATH": WORKER_PYTHONPATH, "OMP_NUM_THREADS": "1", "WAY": "plain"}
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], env=plain, check=True)
    (alone,) = tmp_path.glob("end-*.pt")
    found = end_of(run(stage, start_job, (1, 8, "before"), (0, 16, "after"), WAY="sgd"))
    torch.testing.assert_close(found, torch.load(alone), rtol=0, atol=1e-13)


@COSTLY
def test_the_policy_and_plan_know_steps_of_a_period(stage: Stage, start_job: StartJob) -> None:
    """Examples take the time, so two ranks train twice as fast, also where they meet seldom."""
    options = ("--policy", "goodput", "--np", "1", "--min-np", "1")
    job = start(start_job, {stage.hosts[0]: 2}, *options, EXAMPLE_S="0.01", EPOCHS="100")
    job.wait_size(2)
    assert "useful examples/s expected" in job.kinds("decision")[0]["reason"]
    job.wait_for(lambda: job.kinds("decision")[-1]["action"] == "stay", "a decision to stay")
    (both,) = json.loads(job.command("plan", job.run_id, "--hosts", "1", "--json"))["forecasts"]
    assert both["seen"]
    rates = [e["throughput"] for e in job.kinds("metrics") if e["size"] == 2]
    assert both["low"] / 2 < median(rates) < 2 * both["high"]
    assert both["throughput"] < 2 / 0.01, "an inner step is of one batch, not of a period of four"
    end_of(job, 100)
