"""A training process for the tests of this folder, which need TensorFlow."""

from __future__ import annotations

import pytest

from hvd_elastic.worker.context import Context
from tests.unit.tensorflow.conftest import alone as in_training

__all__ = ["alone", "in_training"]


@pytest.fixture
def alone(in_training: Context) -> Context:
    """As ``python train.py`` makes it, with nobody else, before ``model.fit``."""
    in_training.worker.in_train = False
    return in_training
