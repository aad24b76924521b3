from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_elastic.cluster.copy.copying import check_destination, check_source
from hvd_elastic.errors import UsageError


@pytest.mark.parametrize(
    ("destination", "full"),
    [
        ("/data/x", "/data/x"),
        ("/data/", "/data/set"),
        ("~/job", "~/job"),
        ("~/", "~/set"),
        ("/", "/set"),
    ],
)
def test_destinations(tmp_path: Path, destination: str, full: str) -> None:
    assert check_destination(tmp_path / "set", destination) == full


@pytest.mark.parametrize("destination", ["", "data", "..", "/data/../etc", "~bob/x", "~", "//"])
def test_destinations_that_are_refused(tmp_path: Path, destination: str) -> None:
    with pytest.raises(UsageError, match="destination"):
        check_destination(Path("/"), destination)


def test_sources_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        check_source(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        check_source(tmp_path / "pipe")
