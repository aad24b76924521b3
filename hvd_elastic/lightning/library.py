"""The library that the script uses: ``lightning`` or ``pytorch_lightning``, which are the same."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from hvd_elastic.errors import ScriptError
from hvd_elastic.frameworks import LIGHTNING_REQUIREMENT, install_command, why_no_lightning


def _name() -> str:
    """Return the name of the library that the script has imported, else of one that is there."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ScriptError(
        "hvd_elastic.lightning needs Lightning, and it is not installed here: "
        f"{install_command(LIGHTNING_REQUIREMENT)}"
    )


NAME = _name()
"""Import name of the library."""


def part(module: str) -> Any:
    """Return a module of the library; ``module``: its name below that of the library."""
    return importlib.import_module(f"{NAME}.{module}")


def check_version() -> None:
    """Raise ScriptError if the library is of a release whose loops are not known."""
    why = why_no_lightning(str(importlib.import_module(NAME).__version__))
    if why is not None:
        raise ScriptError(f"{why}; run: {install_command(LIGHTNING_REQUIREMENT)}")
