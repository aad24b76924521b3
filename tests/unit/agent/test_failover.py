"""An agent is found by the next one of its run and host, however long their names are."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_elastic.agent.failover import listen_for_successors
from hvd_elastic.errors import RunError

RUN = "resnet50-imagenet-batch4096-lr0.1-wd1e-4-seed0-" + 17 * "x"
HOST = ".".join(["ip-10-0-123-45", *("a" * 63,) * 3, "internal.example.com"])


def test_agents_of_long_names_below_a_long_home_find_each_other(tmp_path: Path) -> None:
    spool = tmp_path.joinpath(*["a-long-folder-of-a-home" * 8] * 3, "spool", RUN, HOST)
    spool.mkdir(parents=True)
    with listen_for_successors(spool):
        with pytest.raises(RunError, match="another agent of this run"):
            listen_for_successors(spool)
    listen_for_successors(spool).close()
