"""Where the project keeps its files."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["home", "runs_folder"]


def home() -> Path:
    """The project's folder of this user: ``$HVD_ELASTIC_HOME``, else ``~/.hvd_elastic``."""
    configured = os.environ.get("HVD_ELASTIC_HOME")
    return Path(configured) if configured else Path.home() / ".hvd_elastic"


def runs_folder() -> Path:
    """The folder that holds one folder for each run."""
    return home() / "runs"
