"""What the cluster commands make of what they are given; no hosts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_elastic.cli.clust import _is_nothing


@pytest.mark.parametrize(("name", "nothing"), [("null", True), ("zero", False)])
def test_an_input_that_is_nothing(name: str, nothing: bool) -> None:
    with Path("/dev", name).open("rb") as file:
        assert _is_nothing(file.fileno()) is nothing


def test_an_input_that_is_empty_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open("rb") as file:
        assert not _is_nothing(file.fileno())
    ours, theirs = os.pipe()
    assert not _is_nothing(ours)
    os.close(ours)
    os.close(theirs)
