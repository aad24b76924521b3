"""A slow rank gets fewer examples of each batch, as long as it is slow; all are still read once.

Device time is a sleep: so much for each example of a pass, three times as much on a slow host.
"""

from __future__ import annotations

from statistics import median

import pytest

from tests.dist.conftest import EVERY_STYLE, StartJob
from tests.dist.running import RunningJob, Stage
from tests.paths import COSTLY, LIMIT_S

pytestmark = pytest.mark.dist

BATCH = 24
DATA = ("--batch-size", str(BATCH), "--examples", "300")
DEVICE = ("--step-time", "0", "--example-time", "0.004")
DEADLINE_S = LIMIT_S


def shares_told(job: RunningJob, since: int = 0) -> list[list[int]]:
    return [event["shares"] for event in job.kinds("shares", since)]


def throughput(job: RunningJob, shares: list[int]) -> list[float]:
    made = [event for event in job.kinds("metrics") if event.get("shares") == shares]
    return [event["throughput"] for event in made if "throughput" in event]


def slow_one_gets_less(job: RunningJob, ranks: int, slow: int, since: int) -> list[int]:
    """Wait until it has about a third of what the others have."""

    def balanced() -> list[int] | None:
        told = [shares for shares in shares_told(job, since) if len(shares) == ranks]
        if not told or not 0.15 * max(told[-1]) < told[-1][slow] < 0.55 * max(told[-1]):
            return None
        return told[-1]

    shares: list[int] = job.wait_for(balanced, f"smaller shares for rank {slow}", DEADLINE_S)
    assert sum(shares) == BATCH
    return shares


@EVERY_STYLE
def test_shares_follow_a_host_that_is_slow_and_recovers(stage: Stage, start_job: StartJob) -> None:
    fast, slow = stage.hosts[:2]
    options = (*DATA, *DEVICE, "--max-batch-size", str(BATCH))
    job = start_job({fast: 1, slow: 1}, script_options=options)
    job.wait_size(2)
    job.wait_for(lambda: throughput(job, [12, 12]), "training with equal shares", DEADLINE_S)
    assert shares_told(job) == [], "alike until one is slow"
    at = job.mark()
    (job.folder / f"slow-{slow}").touch()
    slow_one_gets_less(job, 2, 1, at)
    # A busy machine may give either rank too few examples first, which is corrected.
    reasons = [event["reason"] for event in job.kinds("shares", at)]
    assert any("rank 1 takes" in reason and "steps of" in reason for reason in reasons)
    assert f"of {BATCH} examples: rank 1 takes" in job.command("status", job.run_id)
    # Three to one: 24 examples take as long as 18 of the fast host, instead of 12 of the slow one.
    before = median(e["throughput"] for e in job.kinds("metrics", at)[:4])
    job.wait_for(  # shares are refined later
        lambda: median([0.0, *throughput(job, shares_told(job, at)[-1])[-3:]]) > 1.2 * before,
        "shorter steps",
        DEADLINE_S,
    )
    at = job.mark()
    (job.folder / f"slow-{slow}").unlink()
    job.wait_for(lambda: shares_told(job, at)[-1:] == [[]], "equal shares", DEADLINE_S)
    assert job.kinds("shares", at)[-1]["reason"]
    job.finish()


@EVERY_STYLE
@COSTLY
def test_unequal_shares_through_a_join_and_a_death(stage: Stage, start_job: StartJob) -> None:
    one, slow, three = stage.hosts[:3]
    job = start_job({one: 1, slow: 1}, script_options=(*DATA, *DEVICE, "--unequal-shares"))
    (job.folder / f"slow-{slow}").touch()
    job.wait_size(2)
    slow_one_gets_less(job, 2, 1, 0)
    at = job.mark()
    job.use({one: 1, slow: 1, three: 1})
    job.wait_size(3, at)
    job.wait_for(lambda: [] in shares_told(job, at), "equal shares: ranks have moved")
    slow_one_gets_less(job, 3, 1, at)
    at = job.mark()
    job.worker(one).kill()  # the one that decides
    job.wait_event("rescale_finished", at)
    job.wait_steps(5)
    job.finish()
