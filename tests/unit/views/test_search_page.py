"""The page of a search: its trials, their curves, and slots by rung."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from hvd_elastic.records.cluster import summarize_cluster
from hvd_elastic.search.trials import Point, Rules, Trial, TrialStatus
from hvd_elastic.views.search_page import render_search, write_search_page
from tests.unit.records.test_cluster import events

RULES = Rules("max", 9, rungs=3, reduction=3, max_examples=900)
STARTED = 1000.0


def trial(number: int, status: TrialStatus, *values: float, **more: Any) -> Trial:
    reports = zip((100.0, 300.0, 900.0), values, strict=False)
    points = tuple(Point(at, value, STARTED + at / 10) for at, value in reports)
    params = {"lr": 10.0**-number, "width": 64 << number, "act": "gelu" if number else "relu"}
    return Trial(number, params, status, points, points[-1].examples if points else 0.0, **more)


TRIALS = [
    trial(0, TrialStatus.HELD, 0.5, slot_s=100.0, reason="held: <place 3 of 3>"),
    trial(1, TrialStatus.RUNNING, 0.4, 0.7, slots=4),
    trial(2, TrialStatus.DONE, 0.6, 0.8, 0.9),
    trial(3, TrialStatus.RUNNING, math.nan),
    trial(4, TrialStatus.FAILED),
]


def test_the_table_has_the_best_trial_first_and_says_why_one_is_held() -> None:
    page = render_search("mnist", RULES, TRIALS, "val/accuracy")
    rows = re.findall(r"<tr>(.*?)</tr>", page[page.index("<h2>Trials</h2>") :])[1:]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    assert [row[1] for row in cells] == ["2", "1", "0", "3", "4"]
    assert [row[6] for row in cells] == ["3", "2", "1", "1", "0"]
    assert "held: &lt;place 3 of 3&gt;" in rows[2]
    assert "The best is trial 2, val/accuracy 0.9" in page


def test_the_chart_has_a_line_for_each_trial_in_the_colour_of_its_rung() -> None:
    page = render_search("mnist", RULES, TRIALS, "val/accuracy")
    (text,) = re.findall(r'id="run-data"[^>]*>(.*?)</script>', page)
    data = json.loads(text)
    (chart,) = data["charts"]
    colors = [chart["color"], *(line["color"] for line in chart["more"])]
    assert colors == ["size", "loss", "note", "note", "muted"]
    assert chart["y"][-1] == 0.9
    assert chart["more"][2]["y"] == [None] * len(chart["x"])
    lines = re.findall(r'<path class="key-(\w+)" d="[^"]*"><title>trial (\d)', page)
    assert lines == [("note", "0"), ("loss", "1"), ("size", "2")]


def test_the_value_of_a_trial_is_that_at_its_last_rung() -> None:
    late = Trial(0, {}, TrialStatus.DONE, (Point(900, 0.9), Point(1200, 0.1)))
    page = render_search("mnist", RULES, [late], "acc")
    assert "The best is trial 0, acc 0.9" in page
    assert page.count("acc 0.1") == 0


def test_slots_change_their_colour_where_their_trial_reaches_a_rung() -> None:
    cluster = summarize_cluster(events(), "gpus")
    first = next(iter(cluster.jobs.values()))
    begin, end = cluster.holds[0].begin_s, cluster.holds[0].end_s
    at = (cluster.started or 0.0) + (begin + end) / 2
    one = Trial(0, {}, TrialStatus.RUNNING, (Point(100, 0.5, at),), job=int(first.job))
    page = render_search("mnist", RULES, [one], "loss", cluster)
    picture = page[page.index("<h2>Slots</h2>") :]
    bars = re.findall(r'<rect class="([^"]*)" x="([\d.]*)"', picture)
    assert {name for name, _ in bars} == {"key-muted", "key-note", "others"}


def test_a_search_without_trials_and_one_without_parameters_have_a_page(tmp_path: Path) -> None:
    assert "0 trials of 9: none yet" in render_search("mnist", RULES, [], "loss")
    path = tmp_path / "page.html"
    one = Trial(0, {}, TrialStatus.RUNNING, (Point(5, math.inf), Point(9, 1.0)))
    write_search_page(path, "mnist", Rules("min", 1), [one], "loss")
    assert "1 trial of 1: 1 running" in path.read_text()


def test_a_trial_that_reports_before_it_has_trained_has_a_curve() -> None:
    first = Trial(0, {}, TrialStatus.RUNNING, (Point(0.0, 0.5, STARTED),))
    assert 'd="M0.0 0.0"' in render_search("mnist", RULES, [first], "accuracy")
