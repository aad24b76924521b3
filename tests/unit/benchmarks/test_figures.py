"""Medians, ratios, and the conditions that stand beside them."""

from __future__ import annotations

import json
import math
from pathlib import Path

from benchmarks.testbed.figures import Result, conditions, figure, plain, processor_model, ratio


def test_a_single_sample_has_no_range():
    assert str(figure([0.1234])) == "0.123 s"


def test_nothing_measured_is_said_and_not_divided_by():
    assert str(figure([])) == "-"
    assert ratio(figure([]), figure([1.0])) is None
    assert ratio(figure([1.0]), figure([])) is None


def test_ratio_of_medians():
    assert ratio(figure([2.0, 4.0, 9.0]), figure([2.0])) == 2.0


def test_processor_model(tmp_path: Path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Fast: 9000\n")
    assert processor_model(path) == "Fast: 9000"
    assert processor_model(tmp_path / "missing")


def test_a_written_result_is_a_summary_beside_everything_that_was_measured(tmp_path: Path):
    taken = conditions("3 virtual hosts", "Steps are padded.", (0.5, 1.0, 2.0))
    path = tmp_path / "results" / "x.json"
    body = {"target_s": 8.0, "rows": [{"pause": figure([1.0, 2.00004]), "curve": [[1, 2]]}]}
    Result("startup", taken, body, []).write(path)
    content = json.loads(path.read_text())
    assert content["benchmark"] == "startup"
    assert content["target_s"] == 8.0
    assert content["rows"] == [{"pause": {"median_s": 1.5, "min_s": 1.0, "max_s": 2.0}}]
    assert content["conditions"]["load_before"] == [0.5, 1.0, 2.0]
    assert content["conditions"]["cores"] >= 1
    raw = json.loads(path.with_suffix(".raw.json").read_text())
    assert raw["rows"][0]["pause"]["samples_s"] == [1.0, 2.0]
    assert raw["rows"][0]["curve"] == [[1, 2]]
    assert "Steps are padded." in taken.sentence()
    assert "0.50 (1 min)" in taken.sentence()


def test_what_is_not_finite_is_null_in_json():
    assert plain({"noise": math.inf, "of": [math.nan, 1.0]}) == {"noise": None, "of": [None, 1.0]}
