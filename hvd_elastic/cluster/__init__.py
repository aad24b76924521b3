"""Cluster tools for fabfiles and Python programs; the tools are in ``hvd_elastic.tools``.

Their modules can be imported from here too: ``from hvd_elastic.cluster.kill import kill_run``.
"""

from typing import TYPE_CHECKING, Any

from hvd_elastic import tools

if TYPE_CHECKING:
    from hvd_elastic.tools.host_group import HostConnection, HostGroup

__all__ = ["HostConnection", "HostGroup"]
__path__ = [*__path__, *tools.__path__]


def __getattr__(name: str) -> Any:
    """Import Fabric only when one of these classes is used."""
    if name in __all__:
        from hvd_elastic.tools import host_group

        return getattr(host_group, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
