"""An interpreter that other accounts of this machine can run, with this checkout."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = "import sys, msgspec, numpy; print(sys.version_info[:2])"


def make_python(folder: Path) -> Path:
    """Make an environment that other accounts can use, with this checkout and its packages.

    Returns:
        Its interpreter.

    Raises:
        RuntimeError: no interpreter of this version that others can run has these packages.
    """
    packages = next(Path(each) for each in sys.path if each.endswith("site-packages"))
    subprocess.run([_interpreter(packages), "-m", "venv", "--without-pip", folder], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "here.pth").write_text(f"{_ROOT}\n{packages}\n")
    return folder / "bin" / "python"


def _interpreter(packages: Path) -> str:
    stranger: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    env = {"PYTHONPATH": str(packages)}
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            said = subprocess.check_output([python, "-c", _PROGRAM], text=True, env=env, **stranger)
            if said.strip() == str(tuple(sys.version_info[:2])):
                return python
    raise RuntimeError("no interpreter that other accounts may run has these packages")
