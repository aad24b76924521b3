"""Cluster tools for fabfiles and Python programs; the tools are in ``hvd_elastic.tools``.

Their modules have names here too: ``from hvd_elastic.cluster.kill import kill_run``.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_elastic.tools.host_group import HostConnection, HostGroup

__all__ = ["HostConnection", "HostGroup"]

for _name in ("check", "check.health", "copy", "copy.copying", "kill", "run", "run.commands"):
    # The same modules, not second copies, whose classes would be others.
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"hvd_elastic.tools.{_name}")


def __getattr__(name: str) -> Any:
    """Import Fabric only when one of these classes is used."""
    if name in __all__:
        from hvd_elastic.tools import host_group

        return getattr(host_group, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
