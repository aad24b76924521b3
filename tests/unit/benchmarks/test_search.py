"""Searches on recorded curves, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.search import CURVES, Setting, simulate


@pytest.mark.parametrize("way", ["halving", "optuna"])
def test_slots_that_go_where_they_help_end_a_search_sooner(way: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    elastic = Setting("elastic", 0, 0.85, adapts=False, seed=1)
    ours = simulate(elastic, CURVES, 3, 3, page, trials=9)
    fixed = simulate(Setting(way, 4, 0.85, adapts=False, seed=1), CURVES, 3, 3, trials=9)
    assert ours["end_s"] < fixed["end_s"]
    assert ours["busy"] > 0.95 > fixed["busy"]
    assert page.read_text().count('<rect class="key-muted"') >= 9
