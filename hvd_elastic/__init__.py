"""Elastic, goodput-driven data-parallel training on Horovod.

A training script imports :mod:`hvd_elastic.torch`; everything else is driven by the
``hvd-elastic`` command. Importing this package loads neither torch, tensorflow, horovod nor fabric.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
