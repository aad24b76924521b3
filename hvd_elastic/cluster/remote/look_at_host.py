"""What a host is: Python, packages, disk, clock, cores.

Input: {"packages": [import names], "folders": [paths]}. Output: a JSON object, see the end.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import sys
import time
from importlib import util
from pathlib import Path
from typing import Any

NOW = time.time()


def version_of(package: str) -> str | None:
    """The version of an importable package, or None; heavy ones are not imported for it."""
    try:
        if util.find_spec(package) is None:
            return None
        # Cheap to import, and right where it runs from a source tree and was never installed.
        if package == "hvd_elastic":
            return str(importlib.import_module(package).__version__)
        # Missing before Python 3.8, whose age is then what the leader complains of.
        from importlib import metadata

        return metadata.version(package.replace("_", "-"))
    except ImportError:
        return "unknown"
    except Exception as error:  # noqa: BLE001  # whatever a broken package raises is the answer
        return f"broken ({type(error).__name__}: {error})"


def free_in(folder: str) -> int | None:
    """Free bytes where a folder lies, or would lie; None when that cannot be told."""
    path = Path(folder).expanduser()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(str(path)).free
    except OSError:
        return None


def main() -> None:
    """Reads the request, answers it."""
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    answer: dict[str, Any] = {
        "clock": NOW,
        "name": platform.node(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {package: version_of(package) for package in request["packages"]},
        "free": {folder: free_in(folder) for folder in request["folders"]},
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
