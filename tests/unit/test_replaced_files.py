"""A file is replaced in one step or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_elastic.replaced_files import replacing, write_whole


def test_what_was_there_stays_until_the_new_content_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, "old", mode=0o600)

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("ne")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fail()
    assert path.read_text() == "old"
    write_whole(path, b"new", mode=0o600, synced=True)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
