"""Cluster tools: run commands, copy, end processes and check on all hosts of a hostfile.

:class:`HostGroup` offers them as a ``fabric.Group``, for fabfiles and Python programs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_elastic.cluster.host_group import HostConnection, HostGroup

__all__ = ["HostConnection", "HostGroup"]


def __getattr__(name: str) -> Any:
    """Import Fabric only when one of these classes is used."""
    if name in __all__:
        from hvd_elastic.cluster import host_group

        return getattr(host_group, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
