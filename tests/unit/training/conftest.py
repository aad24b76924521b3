"""What the tests of this folder share."""

from __future__ import annotations

import sys

import pytest

from tests.unit.torch.conftest import alone

__all__ = ["alone"]


@pytest.fixture(autouse=True)
def _schedulers_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a training looks at all objects of the process, which tests have many of.

    ``tests/unit/torch/test_schedule.py`` has the tests of that.
    """
    if "hvd_elastic.torch.optimizer" in sys.modules:
        monkeypatch.setattr("hvd_elastic.torch.optimizer.forgotten_schedulers", lambda *_: [])
