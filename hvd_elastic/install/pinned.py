"""Name packages at pinned versions to pip, which compares each file's SHA-256 before it opens it.

Standard library only, since the set-up uses it before anything is installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

RUN_REQUIREMENTS = ("packaging", "cffi", "pycparser", "cloudpickle", "psutil", "pyyaml")
"""Packages that Horovod imports, also during the build."""
BUILD_REQUIREMENTS = ("setuptools", "wheel")
"""Further packages for the build, which runs without pip's isolation and so finds frameworks."""

_PINNED = Path(__file__).with_name("pinned.txt")
_REQUIREMENT = re.compile(
    r"^(?P<name>[a-z0-9-]+)==(?P<version>[\d.]+).*(?:\\\n +--hash=\S+ *)+$", re.MULTILINE
)


def pinned_version(name: str) -> str:
    """Return the version at which a package is pinned."""
    return next(found["version"] for found in _requirements() if found["name"] == name)


def pip_arguments(names: Iterable[str], folder: Path) -> list[str]:
    """Return pip's arguments for exactly these packages, without what they depend on.

    Args:
        names: names of pinned packages.
        folder: where the file of requirements is written that the arguments name.
    """
    wanted = set(names)
    file = folder / "requirements.txt"
    lines = [found[0] for found in _requirements() if found["name"] in wanted]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["--no-deps", "--require-hashes", "--requirement", str(file)]


def _requirements() -> list[re.Match[str]]:
    return list(_REQUIREMENT.finditer(_PINNED.read_text(encoding="utf-8")))
