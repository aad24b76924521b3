"""What callbacks and modules remember goes back with a step, and to workers that join."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed: make test-trainers")

from hvd_elastic.lightning.attributes import remembered, set_back, take, told
from hvd_elastic.torch.state import dump_plain, load_plain


def item() -> Any:
    return SimpleNamespace(
        seen=1,
        name="a",
        history={"loss": [1.0], "rate": []},
        by_loader=[[1], []],
        outputs=[(torch.ones(2), torch.zeros(2))],
        dicts=[{"loss": 1.0}],
        recent=deque([1, 2], maxlen=2),
        groups=defaultdict(list, a=[1]),
        ordered=OrderedDict(b=1, a=2),
        counts=Counter("aab"),
        names={"x"},
        pair=(1, 2),
        confusion=np.eye(2),
        scalar=np.float64(0.5),
        small=torch.ones(3),
        large=torch.ones(5000),
        averages={"w": torch.zeros(5000)},
        made=object(),
    )


def change(found: Any) -> None:
    found.seen += 1
    found.name = "b"
    found.history["loss"].append(2.0)
    found.by_loader[1].append(3)
    found.outputs.append((torch.ones(1), torch.ones(1)))
    found.dicts[0]["loss"] = 3.0
    found.recent.append(3)
    found.groups["b"].append(1)
    found.ordered["c"] = 1
    found.counts["c"] += 1
    found.names.add("y")
    found.pair = (3, 4)
    found.confusion[0, 1] = 7
    found.scalar += 1
    found.small += 1
    found.large.mul_(3)
    found.averages["w"].add_(1)


def text(found: Any) -> dict[str, str]:
    return {key: repr(value) for key, value in vars(found).items() if key != "made"}


def test_attributes_go_back_as_often_as_a_step_fails() -> None:
    thing, expected = item(), text(item())
    large = thing.large
    before = remembered(thing)
    assert before.keys() == vars(thing).keys() - {"made"}
    for _ in range(2):
        change(thing)
        set_back(thing, before)
        assert text(thing) == expected
        before = remembered(thing, before)
    assert thing.large is large, "what refers to a tensor refers to it still"


def test_attributes_go_to_a_worker_that_joins_in_the_types_that_it_has() -> None:
    source, joined = item(), item()
    before, own = remembered(source), remembered(joined)
    assert told(before, before) == {}
    change(source)
    sent = load_plain(dump_plain(told(remembered(source, before), before)))
    take(joined, sent, own)
    expected, found = text(source), text(joined)
    differ = {key for key in expected if found[key] != expected[key]}
    assert differ == {"outputs", "scalar"}, "tuples in lists are lists, a number is Python's"
    assert joined.scalar == source.scalar
    assert len(joined.outputs) == 2
    assert type(joined.groups["new"]) is list
    assert joined.recent.maxlen == 2
