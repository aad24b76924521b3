"""Plays NVIDIA's library NVML, by a program in C that has its functions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def build_nvml(folder: Path, source: str) -> Path:
    """Compile a library that answers as NVML does, and return its path; skip without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for a library that answers as NVML does")
    program, library = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    program.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, program], check=True)
    return library
