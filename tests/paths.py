"""Where things lie, what workers of tests import first, and which variants are costly."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from hvd_elastic.install.horovod_wheel import has_library

__all__ = [
    "ALL",
    "COSTLY",
    "HAS_TENSORFLOW",
    "LIMIT_S",
    "LITTLE_WORK",
    "NEEDS_TENSORFLOW",
    "OF_ONE_FRAMEWORK",
    "ROOT",
    "WORKER_PYTHONPATH",
    "skip_module_without_tensorflow",
]

ROOT = Path(__file__).resolve().parents[1]
OF_ONE_FRAMEWORK = {
    "torch": (
        *("hvd_elastic/torch", "hvd_elastic/lightning", "hvd_elastic/transformers"),
        "hvd_elastic/bench/models.py",
        *("hvd_elastic/bench/allreduce_torch.py", "hvd_elastic/bench/digits.py"),
        "hvd_elastic/bench/synthetic_torch.py",
    ),
    "tensorflow": (
        *("hvd_elastic/tensorflow", "hvd_elastic/keras"),
        "hvd_elastic/bench/synthetic_tensorflow.py",
    ),
    "lightning": ("hvd_elastic/lightning",),
    "transformers": ("hvd_elastic/transformers",),
}
"""What cannot be imported without a framework."""
WORKER_PYTHONPATH = f"{ROOT / 'tests/quick_torch'}{os.pathsep}{ROOT}"
"""For programs that train: they start without PyTorch's compiler."""
LITTLE_WORK = {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "5"}
"""For programs that train: several share a core, and Horovod looks for work less often."""
LIMIT_S = 200.0
"""For what takes seconds on an idle machine; busy ones take many times that, and no test fails by
its own limit there."""
ALL = os.environ.get("HVD_ELASTIC_TEST_ALL") == "1"
COSTLY = pytest.mark.skipif(not ALL, reason="a costly variant: HVD_ELASTIC_TEST_ALL=1 runs it")
"""For a variant that starts real processes, where another one tries almost the same."""


HAS_TENSORFLOW = has_library("tensorflow") and importlib.util.find_spec("tensorflow") is not None
WHY_NO_TENSORFLOW = "TensorFlow, or Horovod's binding of it, is not installed: make horovod"
NEEDS_TENSORFLOW = pytest.mark.skipif(
    not HAS_TENSORFLOW,
    reason=WHY_NO_TENSORFLOW,
)
"""For a test of hvd_elastic.tensorflow or hvd_elastic.keras."""


def skip_module_without_tensorflow() -> None:
    """Skip the module of tests that is being imported; called before it imports TensorFlow."""
    if not HAS_TENSORFLOW:
        pytest.skip(WHY_NO_TENSORFLOW, allow_module_level=True)
