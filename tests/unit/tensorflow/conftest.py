"""A training process for the tests of this folder, which need TensorFlow."""

from __future__ import annotations

import pytest

from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Context:
    """As ``python train.py`` makes it, with nobody else, in its training function."""
    from hvd_elastic.tensorflow.frontend import TensorFlowFrontend

    made = Context(Mode.ALONE, TensorFlowFrontend())
    made.worker.in_train = True
    monkeypatch.setattr(context, "_context", made)
    return made
