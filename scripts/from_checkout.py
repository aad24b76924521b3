"""Run one of the package's commands from a checkout, installed or not.

The shell scripts beside this file call it as ``from_checkout.py PROGRAM MODULE:FUNCTION ARGS…``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main() -> None:
    """Import the function and call it as if it were ``PROGRAM``."""
    _, program, target, *arguments = sys.argv
    # the script's own folder, first on the path by default, holds no importable package
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.argv = [program, *arguments]
    module, function = target.split(":")
    try:
        getattr(importlib.import_module(module), function)()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hvd_elastic"):
            raise
        sys.exit(
            f"error: {program} needs the Python package {error.name}. In {sys.path[0]}, run "
            "'make horovod' once; for the cluster commands alone, 'make env EXTRAS=' is enough"
        )


if __name__ == "__main__":
    main()
