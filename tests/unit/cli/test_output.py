"""What commands print while they wait."""

from __future__ import annotations

import pytest

from hvd_elastic.cli import output


def test_a_long_wait_is_told_and_does_not_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_TELL_S", 0.15)
    looks = iter([False, False, False, True])
    output.wait_until(lambda: next(looks), "it writes")
    assert capsys.readouterr().err == "after 0 s: it writes\n"
