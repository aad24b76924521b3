"""The modules that a worker's script has imported."""

from __future__ import annotations

import contextlib
import hashlib
import os
import site
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import hvd_elastic


def installed_modules() -> list[str]:
    """Return the names of the imported modules that are installed, and so do not change in a run.

    They are in the order of their imports. Modules beside the script are not among them.
    """
    prefixes = _installed_prefixes()
    found = []
    for name, module in list(sys.modules.items()):
        spec = vars(module).get("__spec__") if isinstance(module, ModuleType) else None
        if spec is not None and spec.name == name and str(spec.origin).startswith(prefixes):
            found.append(name)
    return found


def script_digests() -> dict[str, str]:
    """Return a digest of the script, and of each imported module in its folder, by file name."""
    path = vars(sys.modules["__main__"]).get("__file__")
    if path is None:  # python -c
        return {}
    script, prefixes = Path(path).resolve(), _installed_prefixes()
    files = {script}
    for module in list(sys.modules.values()):
        origin = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if origin is not None and not str(origin).startswith(prefixes):
            files.add(Path(origin).resolve())
    digests = {}
    for file in sorted(files):
        if file.is_relative_to(script.parent):
            with contextlib.suppress(OSError):  # it was removed
                name = str(file.relative_to(script.parent))
                digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def _installed_prefixes() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = (
        *(sysconfig.get_path(name) for name in names),
        *site.getsitepackages(),
        site.getusersitepackages(),
        str(Path(hvd_elastic.__file__).parent),
    )
    return tuple(f"{folder}{os.sep}" for folder in folders)
