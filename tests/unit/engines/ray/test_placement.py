"""How many workers a cluster has room for."""

from __future__ import annotations

import sys

import pytest

from hvd_elastic.engines.ray.placement import check_room, room_for, why_not_started
from hvd_elastic.errors import RunError

NODES = [{"CPU": 4.0, "GPU": 2.0, "node:10.0.0.1": 1.0}, {"CPU": 3.0, "node:10.0.0.2": 1.0}]


@pytest.mark.parametrize(
    ("each", "room"),
    [
        ({"CPU": 1}, 7),
        ({"CPU": 2}, 3),
        ({"CPU": 1, "GPU": 1}, 2),
        ({"CPU": 1, "GPU": 0}, 7),
        ({"GPU": 0.5}, 4),
        ({"slots": 1}, 0),
        ({"CPU": 0}, sys.maxsize),
    ],
)
def test_room_is_counted_by_node(each: dict[str, float], room: int) -> None:
    assert room_for(NODES, each) == room


@pytest.mark.parametrize(
    ("each", "least", "words"),
    [
        ({"CPU": 2}, 4, "4 workers at least, of 2 CPU each, and the cluster of 2 nodes has room"),
        ({"TPU": 1}, 1, "1 TPU, and no node of the cluster has any. The nodes have CPU, GPU"),
        ({"GPU": 3}, 1, "3 GPU, and no node has more than 2"),
    ],
)
def test_what_a_cluster_cannot_hold_is_named(
    each: dict[str, float], least: int, words: str
) -> None:
    with pytest.raises(RunError, match=words):
        check_room(NODES, each, least)


def test_what_fits_is_not_refused() -> None:
    check_room(NODES, {"CPU": 1, "GPU": 1}, 2)


def test_a_missing_package_is_named() -> None:
    said = (
        "The actor with name HostActor failed to import on the worker. This may be because:\n\n"
        "Traceback (most recent call last):\n  File …\n"
        "ModuleNotFoundError: No module named 'hvd_elastic'\n"
    )
    assert "has no package 'hvd_elastic'. Install" in why_not_started(said)
