"""A run that reads shards, through everything that happens to a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.conftest import StartJob
from tests.dist.running import Stage
from tests.paths import COSTLY
from tests.unit.data.shards import write_numbers

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.mark.parametrize("place", ["folder", pytest.param("url", marks=COSTLY)])
def test_every_example_of_the_shards_is_used_once_through_rescales_and_a_kill(
    stage: Stage, start_job: StartJob, place: str
) -> None:
    """The batch adapts."""
    a, b, c, _ = stage.hosts
    shards: Path = write_numbers(stage.folder / "shards", [25, 40, 0, 31, 17, 37], width=8)
    where = shards.as_uri() if place == "url" else str(shards)
    options = ("--shards", where, "--max-batch-size", "48")
    job = start_job({a: 1, b: 1}, script_options=options)
    job.wait_size(2)

    def settle(hosts: dict[str, int]) -> None:
        job.use(hosts)
        job.wait_for(lambda: job.settled_on(hosts), f"training on {hosts}")
        job.wait_steps(4)

    job.wait_steps(4)
    settle({a: 1, b: 1, c: 1})
    settle({b: 1, c: 1})
    since = job.mark()
    job.workers()[0].kill()
    job.wait_event("rescale_finished", since)
    settle({a: 1, b: 1})
    audit = job.finish()
    assert audit.complete_epochs >= 1
