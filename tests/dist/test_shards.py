"""A run that reads shards, through everything that happens to a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.testbed.file_server import FileServer
from tests.dist.conftest import StartJob
from tests.dist.running import Stage
from tests.paths import COSTLY
from tests.unit.data.shards import write_numbers

pytestmark = pytest.mark.dist


@COSTLY
def test_every_example_behind_a_url_is_used_once_through_rescales_and_a_kill(
    stage: Stage, start_job: StartJob
) -> None:
    """The batch adapts. Shards in a folder are read in the schedules."""
    a, b, c, _ = stage.hosts
    shards: Path = write_numbers(stage.folder / "shards", [25, 40, 0, 31, 17, 37], width=8)
    cache = str(stage.folder / "cache")
    options = ("--shards", shards.as_uri(), "--cache", cache, "--max-batch-size", "48")
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


@COSTLY
@pytest.mark.parametrize("attempt", range(20))
def test_ranks_and_their_loader_processes_share_a_cache_while_one_is_killed(
    stage: Stage, start_job: StartJob, attempt: int
) -> None:
    """A process that waits for a shard must not wait for another rank, which waits for its rank."""
    a, b = stage.hosts[:2]
    shards = write_numbers(stage.folder / f"shards-{attempt}", [40] * 8, width=8)
    address = stage.cluster.leader_address
    with FileServer(shards, delay_s=0.05, address=address).serving() as server:
        cache = stage.folder / f"cache-{attempt}"
        options = ("--shards", server.url, "--cache", str(cache), "--num-workers", "8")
        job = start_job({a: 2, b: 1}, script_options=options)
        job.wait_size(3)
        since = job.mark()
        job.workers()[attempt % 3].kill()
        job.wait_event("rescale_finished", since)
        job.wait_steps(2)
        audit = job.finish()
    assert audit.complete_epochs >= 1
