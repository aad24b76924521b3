"""A training process for the tests of this folder, which need TensorFlow."""

from __future__ import annotations

from tests.paths import HAS_TENSORFLOW
from tests.unit.tensorflow.conftest import alone

__all__ = ["alone"]

collect_ignore_glob = [] if HAS_TENSORFLOW else ["test_*.py"]
