"""How the scaling benchmark goes on, and the files that it writes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from hvd_elastic.cli.planning.scaling_tables import LiveTable, check_out, tables_of, write_scaling
from hvd_elastic.errors import UsageError
from hvd_elastic.install.prerequisites import BROWSERS, find_program
from tests.unit.bench.test_scaling import scaling


def test_off_a_terminal_there_is_a_line_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveTable([1, 2]).shown() as progress:
        progress.say("2 slots: measuring for 10 s")
        progress.measured(2, 510.0, None)
        progress.measured(2, 512.4, 0.01)
    assert capsys.readouterr().err == "2 slots: measuring for 10 s\n2 slots: 512 examples/s\n"


def test_on_a_terminal_there_is_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with LiveTable([2, 1]).shown() as progress:
        progress.measured(2, 512.4, 0.01)
        progress.measured(1, 270.0, None)
        progress.say("1 slot: measuring for 10 s")
    shown = capsys.readouterr().err
    for text in ("each slot", "512", "±1.0 %", "256", "270", "1 slot: measuring for 10 s"):
        assert text in shown


def test_without_a_browser_a_picture_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_elastic.views.plan_page.BROWSERS", ("no-such-browser",))
    with pytest.raises(UsageError, match=r"Chromium or Chrome.* \.html file"):
        check_out([tmp_path / "r.png"])


@pytest.mark.parametrize("suffix", [".json", ".csv", ".html"])
def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(UsageError, match=r"--out /proc/r.*: it cannot be written: "):
        check_out([Path("/proc/r" + suffix)])
    folder = tmp_path / f"r{suffix}"
    folder.mkdir()
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        check_out([folder])
    folder.rmdir()
    check_out([folder])
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(find_program(*BROWSERS) is None, reason="no browser here draws pictures")
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    found = scaling(1, 2, 4)
    write_scaling(tmp_path / "r.png", found, tables_of(found, 1000, 1))
    data = (tmp_path / "r.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1100, 640)
    assert len(data) > 10_000, "an empty page is smaller"
