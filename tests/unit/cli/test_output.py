"""What commands print while they wait."""

from __future__ import annotations

import pytest

from hvd_elastic.cli import output


class FakeClock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_long_wait_is_told_and_does_not_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(output, "time", clock)
    output.wait_until(lambda: clock.now_s >= 250.0, "it writes")
    assert capsys.readouterr().err == "after 60 s: it writes\nafter 120 s: it writes\n"
