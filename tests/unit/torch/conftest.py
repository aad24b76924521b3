"""A training process for the tests of this folder."""

from __future__ import annotations

import pytest

from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode
from tests.unit.real_ranks import stores

__all__ = ["alone", "stores"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Context:
    """As ``python train.py`` makes it, with nobody else."""
    made = Context(Mode.ALONE, TorchFrontend())
    monkeypatch.setattr(context, "_context", made)
    return made
