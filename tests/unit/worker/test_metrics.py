"""Whatever has one value is a metric; the rest is named at the call."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import hvd_elastic.torch as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.message_sink import FileSink
from hvd_elastic.worker.worker import Worker

ONE = {
    "float64": np.float64(0.5),
    "float32": np.mean(np.array([0.25, 0.75], np.float32)),
    "float16": np.float16(0.5),
    "int64": np.array([1, 0, 1]).sum(),
    "bool_": np.float64(1) > 0,
    "array0": np.array(0.5),
    "array1": np.array([0.5]),
    "tensor1": torch.ones(1, 1),
    "bfloat16": torch.tensor(0.5, dtype=torch.bfloat16),
    "loss": torch.ones((), requires_grad=True) * 2,
    "truth": torch.tensor(True),
    "fraction": Fraction(1, 2),
    "big": 10**30,
    "nan": float("nan"),
}


@pytest.fixture
def recorded(alone: Context, tmp_path: Path) -> Any:
    """Returns what a call of ``hvd.report`` leaves in the file of events."""

    def report(**values: Any) -> dict[str, Any]:
        alone.worker.sink = FileSink(tmp_path)
        hvd.report(**values)
        return list(read_records(tmp_path / "events.jsonl"))[-1]

    return report


@pytest.mark.parametrize("name", ONE)
def test_what_has_one_value_is_recorded_as_a_number(recorded: Any, name: str) -> None:
    found = recorded(value=ONE[name])["value"]
    value = ONE[name]
    expected = value.item() if hasattr(value, "item") else float(value)
    assert found == (None if expected != expected else pytest.approx(expected))  # JSON has no NaN
    assert type(found) in (bool, int, float, type(None))
    assert msgspec.json.encode(found)


@pytest.mark.parametrize(
    "value",
    [None, "x", [1, 2], {"a": 1}, np.ones(2), torch.ones(2), np.array([]), 1j, np.complex64(1)],
)
def test_what_is_not_one_number_is_refused_with_its_name(recorded: Any, value: Any) -> None:
    with pytest.raises(ScriptError, match=r"the metric 'value' is a .* a metric is one number"):
        recorded(value=value)


def test_a_metric_of_the_name_of_a_field_is_recorded_as_the_script_s(recorded: Any) -> None:
    event = recorded(t=1, kind=2, mono=3, step=4, lr=0.5, values=6, loss=7)
    assert event["kind"] == "metrics"
    assert event["t"] > 1e9
    assert event["step"] != 4
    own = {name: value for name, value in event.items() if name.startswith("script.")}
    assert own == {
        "script.t": 1, "script.kind": 2, "script.mono": 3, "script.step": 4, "script.lr": 0.5,
        "script.values": 6,
    }  # fmt: skip
    assert event["loss"] == 7


def test_what_is_reported_after_the_last_step_is_recorded_when_training_ends(
    alone: Context, tmp_path: Path
) -> None:
    alone.worker.sink = FileSink(tmp_path)
    alone.worker.in_train = True
    hvd.report(accuracy=0.75)
    assert not [*read_records(tmp_path / "events.jsonl")]
    alone.training_ends()
    alone.training_ends()
    (event,) = read_records(tmp_path / "events.jsonl")
    assert event["accuracy"] == 0.75


def test_what_is_reported_before_the_script_fails_is_recorded(
    alone: Context, tmp_path: Path
) -> None:
    alone.worker.sink = FileSink(tmp_path)
    alone.worker.in_train = True
    hvd.report(accuracy=0.75, loss=torch.ones(()), on_gpu=torch.ones((), device="meta"))
    alone.script_failed("ValueError: broken")
    event, *_ = read_records(tmp_path / "events.jsonl")
    assert (event["accuracy"], event["loss"]) == (0.75, 1.0)
    assert event["reported"] == ["accuracy", "loss"]


def test_an_event_says_which_metrics_were_reported_since_the_one_before(recorded: Any) -> None:
    """So readers see when it was reported, also if its value is the same again."""
    first, other, again = (recorded(**{name: 0.5}) for name in ("accuracy", "loss", "accuracy"))
    assert [event["reported"] for event in (first, other, again)] == [
        ["accuracy"],
        ["loss"],
        ["accuracy"],
    ]
    assert other["accuracy"] == 0.5


def test_a_rank_that_becomes_rank_0_sends_what_was_reported_last(
    alone: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.worker.sink = FileSink(tmp_path)
    monkeypatch.setattr(Worker, "rank", 1)
    hvd.report(old=1)
    hvd.report(older=1)
    hvd.report(accuracy=0.5)
    assert not [*read_records(tmp_path / "events.jsonl")]
    monkeypatch.setattr(Worker, "rank", 0)
    alone.training_ends()
    (event,) = read_records(tmp_path / "events.jsonl")
    assert event["accuracy"] == 0.5
    assert "old" not in event["reported"]
