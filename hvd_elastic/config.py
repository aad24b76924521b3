"""Locate the folders in which the package keeps its files."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Return the package's folder of this user: ``$HVD_ELASTIC_HOME``, else ``~/.hvd_elastic``."""
    configured = os.environ.get("HVD_ELASTIC_HOME")
    return Path(configured) if configured else Path.home() / ".hvd_elastic"


def runs_folder() -> Path:
    """Return the folder that holds one folder for each run."""
    return home() / "runs"


def nearest_existing(path: Path) -> Path:
    """Return a path, or its nearest parent that exists as far as this user may look."""
    path = path.absolute()
    while not os.path.exists(path):  # noqa: PTH110  # Path.exists raises PermissionError
        path = path.parent
    return path
