"""Hosts that read for the ranks: every example once, with the same bytes, whatever happens."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from hvd_elastic.training.input.server import seed_example, undisturbed
from tests.dist.conftest import StartJob
from tests.dist.running import RunningJob, Stage
from tests.paths import NEEDS_TENSORFLOW

EXAMPLES = 150
pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


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


def read_on(job: RunningJob, host: str, since: int = 0) -> bool:
    number = zlib.crc32(host.encode())
    return any(row["host"] == number for row in examples(job)[since:])


@pytest.mark.parametrize(
    "style",
    ["torch", pytest.param("loop", marks=NEEDS_TENSORFLOW)],
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
    rows = examples(job)
    right = augmented if style == "torch" else augmented_array
    wrong = [row for row in rows if row["bytes"] != right(row["epoch"], row["index"])]
    assert not wrong
    assert len({row["host"] for row in rows}) > 1  # those that train read while it was gone
