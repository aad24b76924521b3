"""A training process for the tests of this folder, which need TensorFlow."""

from __future__ import annotations

from tests.unit.tensorflow.conftest import alone

__all__ = ["alone"]
