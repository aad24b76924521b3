"""The folder on a host's disk that keeps what a run needs when its agent or its leader is gone."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["SPEC_NAME", "keep_run"]

SPEC_NAME = "run.json"


def keep_run(spool: Path, fields: Mapping[str, Any]) -> None:
    """Write the run's specification into the spool of a host, in one line."""
    path = spool / f"{SPEC_NAME}.part"
    with contextlib.suppress(OSError):  # a full disk; other hosts have it, too
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(dict(fields)) + "\n")
        path.replace(spool / SPEC_NAME)
