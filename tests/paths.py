"""Where things lie, what workers of tests import first, and which variants are costly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["ALL", "COSTLY", "ROOT", "WORKER_PYTHONPATH"]

ROOT = Path(__file__).resolve().parents[1]
WORKER_PYTHONPATH = f"{ROOT / 'tests/quick_torch'}{os.pathsep}{ROOT}"
"""For programs that train: they start without PyTorch's compiler."""
ALL = os.environ.get("HVD_ELASTIC_TEST_ALL") == "1"
COSTLY = pytest.mark.skipif(not ALL, reason="a costly variant: HVD_ELASTIC_TEST_ALL=1 runs it")
"""For a variant that starts real processes, where another one tries almost the same."""
