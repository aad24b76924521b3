"""The library that the script uses: ``lightning`` or ``pytorch_lightning``, which are the same."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from hvd_elastic.errors import ScriptError

OLDEST, NEWEST = (2, 5), (2, 7)
"""Releases that it is tested with: from the first, up to but without the second."""


def _name() -> str:
    """Return the name of the library that the script has imported, else of one that is there."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ScriptError(
        "hvd_elastic.lightning needs Lightning, and it is not installed here: "
        f'pip install "lightning>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1]}"'
    )


NAME = _name()
"""Import name of the library."""


def part(module: str) -> Any:
    """Return a module of the library; ``module``: its name below that of the library."""
    return importlib.import_module(f"{NAME}.{module}")


def check_version() -> None:
    """Raise ScriptError if the library is of a release whose loops are not known."""
    version = str(importlib.import_module(NAME).__version__)
    numbers = tuple(int(each) for each in version.split(".")[:2])
    if not OLDEST <= numbers < NEWEST:
        raise ScriptError(
            f"{NAME.partition('.')[0]} {version} is installed, and hvd_elastic.lightning works "
            f"with {OLDEST[0]}.{OLDEST[1]} up to {NEWEST[0]}.{NEWEST[1] - 1}: "
            f'pip install "lightning>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1]}"'
        )
