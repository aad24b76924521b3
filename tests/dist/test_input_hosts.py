"""Hosts that read for the ranks: every example once, with the same bytes, whatever happens."""

from __future__ import annotations

import json
import random
import zlib
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from hvd_elastic.input.server import seed_example, undisturbed
from hvd_elastic.model.sharding import epoch_order
from tests.dist.conftest import StartJob
from tests.dist.running import RunningJob, Stage
from tests.paths import COSTLY, NEEDS_TENSORFLOW

EXAMPLES = 150
pytestmark = pytest.mark.dist


def examples(job: RunningJob) -> list[dict[str, Any]]:
    path = job.folder / "examples.jsonl"
    # The last line may be incomplete while a rank appends to it.
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def augmented(epoch: int, index: int) -> str:
    """The bytes of an example of the probe in PyTorch, which is read here."""
    inputs = torch.randn(EXAMPLES, 8, generator=torch.Generator().manual_seed(1))
    with undisturbed(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_example(0, epoch, index))
        noise = torch.randn(8) + random.random() + float(np.random.rand())
        content: bytes = (inputs[index] + 0.01 * noise).numpy().tobytes()
    return content.hex()


def augmented_array(epoch: int, index: int) -> str:
    """The bytes of an example of the probe in TensorFlow."""
    inputs = np.random.default_rng(1).normal(size=(EXAMPLES, 8)).astype(np.float32)
    with undisturbed():
        seed_example(0, epoch, index)
        noise = np.random.rand(8).astype(np.float32) + random.random()
        content: bytes = (inputs[index] + 0.01 * noise).tobytes()
    return content.hex()


def check_examples(job: RunningJob, style: str, *, all_heard: bool = True) -> None:
    """After its end: each example has its bytes and its place in the order without input hosts.

    Without ``all_heard``, one epoch may lack steps whose records have died with the agents.
    """
    right = augmented if style == "torch" else augmented_array
    steps: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row in examples(job):
        assert row["bytes"] == right(row["epoch"], row["index"])
        steps[row["epoch"]][row["step"]].add(row["index"])
    lacking = 0
    for epoch, found in steps.items():
        unheard = 0
        order = epoch_order(0, epoch, EXAMPLES)(np.arange(EXAMPLES)).tolist()
        for step in sorted(found):
            count = len(found[step])
            first = min(map(order.index, found[step]))
            unheard, order = unheard + first, order[first:]
            assert found[step] == {*order[:count]}, f"step {step} of epoch {epoch}"
            order = order[count:]
        lacking += bool(unheard or order)
    assert lacking <= (0 if all_heard else 1)


def read_on(job: RunningJob, host: str, since: int = 0) -> bool:
    number = zlib.crc32(host.encode())
    return any(row["host"] == number for row in examples(job)[since:])


@pytest.mark.parametrize(
    "style",
    ["torch", pytest.param("loop", marks=[NEEDS_TENSORFLOW, COSTLY])],
    indirect=True,
    scope="module",
)
def test_bytes_and_order_are_the_same_through_a_kill_a_join_and_an_adapting_batch(
    stage: Stage, start_job: StartJob, style: str
) -> None:
    """The worker of the input host is killed, and the ranks read until it is back."""
    a, b, c, reads = stage.hosts
    job = start_job(
        {a: 1, b: 1},
        *("--input-hosts", reads),
        script_options=(
            *("--examples", str(EXAMPLES), "--augment", "0.002"),
            *("--max-batch-size", "48"),
        ),
    )
    job.wait_size(2)
    job.wait_event("input_host_joined", 0, host=reads)
    job.wait_for(lambda: read_on(job, reads), f"examples that {reads} has read")
    since = job.mark()
    job.use({a: 1, b: 1, c: 1})
    job.wait_size(3, since)
    job.wait_steps(4)
    job.worker(reads).kill()
    job.wait_event("input_host_left", since, host=reads)
    job.wait_steps(2)
    job.wait_event("input_host_joined", since, host=reads)
    before = len(examples(job))
    job.wait_for(lambda: read_on(job, reads, before), f"examples that {reads} has read again")
    since = job.mark()
    job.use({b: 1, c: 1})
    job.wait_size(2, since)
    audit = job.finish()
    assert audit.complete_epochs >= 1
    check_examples(job, style)
    # Those that train read while it was gone.
    assert len({row["host"] for row in examples(job)}) > 1


@pytest.mark.parametrize(
    "style",
    ["torch", pytest.param("loop", marks=[NEEDS_TENSORFLOW, COSTLY])],
    indirect=True,
    scope="module",
)
def test_another_leader_goes_on_with_hosts_that_read(
    stage: Stage, start_job: StartJob, style: str
) -> None:
    """Once in the processes that are there, and once from a checkpoint, after all have died."""
    a, b, _, reads = stage.hosts
    options = ("--examples", str(EXAMPLES), "--augment", "0.002")
    job = start_job({a: 1, b: 1}, "--input-hosts", reads, script_options=options)
    job.wait_size(2)
    job.wait_for(lambda: read_on(job, reads), f"examples that {reads} has read")
    ranks, reader = job.workers(a) + job.workers(b), job.worker(reads)

    job.process.kill()
    job.wait()
    before = len(examples(job))
    job.wait_for(lambda: read_on(job, reads, before), "reading without a leader", ended_too=True)
    since = job.mark()
    job.resume(alive=True)
    job.wait_event("taken_over", since)
    job.wait_event("input_host_joined", since, host=reads)
    before = len(examples(job))
    job.wait_for(lambda: read_on(job, reads, before), f"examples that {reads} has read again")
    assert job.workers(a) + job.workers(b) == ranks
    assert job.worker(reads) == reader

    job.check_audit()
    job.wait_event("checkpoint", since)
    job.process.kill()
    job.wait()
    for host in (a, b, reads):
        job.kill_agent(host)
    job.wait_for(lambda: not job.workers(), "all processes end", ended_too=True)
    since, before = job.mark(), len(examples(job))
    job.resume()
    job.wait_event("restored", since)
    job.wait_size(2, since)
    job.wait_for(lambda: read_on(job, reads, before), f"examples that {reads} has read at last")
    job.finish(all_recorded=False)  # what the last leader had not heard died with the agents
    check_examples(job, style, all_heard=False)
