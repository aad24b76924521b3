from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hvd_elastic.torch as hvd
from hvd_elastic.checkpoint.header import decode_values
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.progress import Phase
from hvd_elastic.worker.step import Pass


class ThreeAlike(LocalCommunicator):
    size = 3

    def gather(self, array: Any, name: str) -> Any:
        return np.concatenate([array] * 3)


def test_sums_over_ranks_since_the_last_time(alone: Context) -> None:
    alone.worker.communicator = ThreeAlike()
    totals = hvd.Accumulator()
    totals.add(loss=torch.tensor([2.0], requires_grad=True), examples=4)
    totals.add(loss=1.0, examples=1)
    assert dict(totals) == {}
    totals.synchronize()
    totals.synchronize()
    assert dict(totals) == {"loss": 9.0, "examples": 15.0}
    totals.add(loss=1.0)
    totals.synchronize()
    assert totals["loss"] == 12.0
    totals.clear()
    assert len(totals) == 0


@pytest.mark.parametrize("state_first", [True, False])
def test_sums_are_part_of_the_state(alone: Context, state_first: bool) -> None:
    state = hvd.State(seen=1) if state_first else None
    totals = hvd.Accumulator("hits")
    state = state or hvd.State(seen=1)
    totals.add(hits=5)
    totals.synchronize()
    content = decode_values(state.content().values, {}, ())
    totals.clear()
    state.load({**content, "progress": alone.worker.progress.as_state()}, "there")
    assert totals["hits"] == 5.0


def test_ranks_that_add_different_names_or_nothing(alone: Context) -> None:
    """A worker that replaces another after the last step of an epoch has added nothing."""

    class Others(ThreeAlike):
        def gather(self, array: Any, name: str) -> Any:
            text = b'{}\n{"hits": [2.5, 8], "loss": [NaN, 8]}\n'
            others = np.frombuffer(text, np.uint8)
            return np.concatenate([array, others])

    alone.worker.communicator = Others()
    totals = hvd.Accumulator()
    totals.add(hits=1.0, steps=1)
    totals.synchronize()
    assert {name: str(value) for name, value in totals.items()} == {
        "hits": "3.5",
        "steps": "1.0",
        "loss": "nan",
    }


def test_the_mean_is_over_the_examples_that_were_seen(alone: Context) -> None:
    """And not over those of the data set: a rank that dies takes its part of both with it."""
    totals, others = hvd.Accumulator(), hvd.Accumulator("others")
    alone.worker.in_train, alone.worker.progress.phase = True, Phase.LOOP
    for number, share in enumerate((12, 12, 5)):
        alone.step.begin_step(Pass(step_examples=2 * share, weight=1.0, examples=share))
        before = totals.snapshot()
        totals.add(loss=torch.tensor(3.0) * share)
        totals.add(loss=0.0)
        if number == 0:  # the body fails, and runs again
            totals.roll_back(before)
            totals.add(loss=3.0 * share)
    totals.add(10, hits=5)
    totals.synchronize()
    assert (totals.mean("loss"), totals.mean("hits")) == (3.0, 0.5)
    others.load_state_dict(totals.state_dict())
    assert others.mean("loss") == 3.0
    others.load_state_dict({"sums": {"loss": 3.0}, "examples": {"loss": 0}, "times": 1})
    with pytest.raises(ScriptError, match=r"give their number first: add\(len\(targets\), loss"):
        others.mean("loss")
    with pytest.raises(ScriptError, match="has no sum 'accuracy'"):
        totals.mean("accuracy")


def test_examples_that_are_read_again_do_not_count(alone: Context) -> None:
    """A rank that has none of its own in a step reads those of another, which adds them."""
    totals = hvd.Accumulator()
    alone.worker.in_train, alone.worker.progress.phase = True, Phase.LOOP
    alone.step.begin_step(Pass(step_examples=2, weight=2.0, examples=1))
    totals.add(loss=3.0, examples=1)
    alone.step.begin_step(Pass(step_examples=1, weight=0.0, padding=True, examples=1))
    totals.add(loss=5.0, examples=1)
    totals.add(2, hits=1)
    totals.synchronize()
    assert dict(totals) == {"loss": 3.0, "examples": 1.0, "hits": 1.0}
    assert totals.mean("loss") == 3.0


def test_a_rank_that_is_asked_to_leave_loses_nothing(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.worker.communicator = ThreeAlike()
    monkeypatch.setattr(alone.rescaling, "follow", lambda: None)
    totals = hvd.Accumulator()
    totals.add(hits=2)
    alone.rescaling.rescale()
    assert totals["hits"] == 6.0


def test_two_of_one_name_are_refused(alone: Context) -> None:
    """The first one would not last."""
    hvd.Accumulator()
    hvd.Accumulator("hits")
    with pytest.raises(ScriptError, match="'accumulator' already; make it once, outside"):
        hvd.Accumulator()


@pytest.mark.parametrize("value", [torch.zeros(2), torch.tensor(1j), "many", None, 1j])
def test_what_is_no_number(alone: Context, value: Any) -> None:
    with pytest.raises(ScriptError, match=r"add\(loss=.*(is no number|must be a number)"):
        hvd.Accumulator().add(loss=value)


def test_a_sum_that_is_not_there_is_named(alone: Context) -> None:
    totals = hvd.Accumulator()
    totals.add(hits=1)
    with pytest.raises(ScriptError, match="'accumulator' has no sum 'hits', it has nothing: add"):
        totals["hits"]
    assert totals.get("hits") is None
    assert "hits" not in totals


def test_one_in_the_training_function_is_refused_at_once(alone: Context) -> None:
    """And not only after a failure, when the function is called again."""

    @hvd.run
    def train(state: hvd.State) -> None:
        hvd.Accumulator()

    with pytest.raises(ScriptError, match="made in the training function, which is called again"):
        train(hvd.State(seen=1))
    hvd.Accumulator()


def test_what_another_rank_has_in_its_sums_is_not_added_again(alone: Context) -> None:
    """A synchronisation that failed on this rank went through on the one whose state all take."""
    totals = hvd.Accumulator()
    totals.add(hits=3)
    totals.load_state_dict({"sums": {"hits": 10.0}, "examples": {"hits": 0}, "times": 1})
    totals.synchronize()
    assert totals["hits"] == 10
    totals.add(hits=2)
    totals.load_state_dict({"sums": {"hits": 10.0}, "examples": {"hits": 0}, "times": 2})
    totals.synchronize()
    assert totals["hits"] == 12, "this time it failed on both"
