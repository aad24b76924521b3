"""What callbacks and trainers remember goes back with a step, and to workers that join."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hvd_elastic.torch.attributes import Attributes
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
        nested={"train": defaultdict(list, a=[1])},
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
    found.nested["train"]["b"].append(1)
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
    values = {**vars(found), "names": sorted(found.names)}  # the order of a set is not its content
    return {key: repr(value) for key, value in values.items() if key != "made"}


def attributes(thing: Any) -> Attributes:
    return Attributes(lambda: {"thing": thing}, lambda _, name: name == "left_out")


def test_attributes_go_back_as_often_as_a_step_fails() -> None:
    thing, expected = item(), text(item())
    kept, large = attributes(thing), thing.large
    before = kept.snapshot()
    assert before["thing"].keys() == vars(thing).keys() - {"made"}
    for _ in range(2):
        change(thing)
        kept.roll_back(before)
        assert text(thing) == expected
        before = kept.snapshot()
    assert thing.large is large, "what refers to a tensor refers to it still"


def test_attributes_go_to_a_worker_that_joins_in_the_types_that_it_has() -> None:
    source, joined = item(), item()
    ours, theirs = attributes(source), attributes(joined)
    assert ours.state_dict() == {"thing": {}}
    change(source)
    joined.seen = 7
    theirs.load_state_dict(load_plain(dump_plain(ours.state_dict())))
    expected, found = text(source), text(joined)
    differ = {key for key in expected if found[key] != expected[key]}
    assert differ == {"outputs", "scalar"}, "tuples in lists are lists, a number is Python's"
    assert joined.scalar == source.scalar
    assert len(joined.outputs) == 2
    assert type(joined.names) is set
    assert type(joined.groups["new"]) is list
    assert joined.recent.maxlen == 2


def test_an_object_that_was_made_since_stays() -> None:
    thing = SimpleNamespace(writer=None, left_out=1)
    kept = attributes(thing)
    before = kept.snapshot()
    thing.writer, thing.left_out = object(), 2
    kept.roll_back(before)
    assert thing.writer is not None
    assert thing.left_out == 2
