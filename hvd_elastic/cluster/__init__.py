"""What the cluster tools do: run, copy, kill and check on all hosts of a hostfile.

:class:`HostGroup` gives the same to fabfiles and Python programs as a ``fabric.Group``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_elastic.cluster.host_group import HostConnection, HostGroup

__all__ = ["HostConnection", "HostGroup"]


def __getattr__(name: str) -> Any:
    """Load Fabric only for those who ask for it."""
    if name in __all__:
        from hvd_elastic.cluster import host_group

        return getattr(host_group, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
