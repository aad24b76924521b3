"""Changes the rate of a virtual host's link while the host is up."""

from __future__ import annotations

from hvd_elastic.errors import RunError
from hvd_elastic.virtual import VirtualCluster, plan
from hvd_elastic.virtual.processes import SWITCH, marked_processes, run_tool


def limit_link(cluster: VirtualCluster, host: str, bits_per_s: int) -> None:
    """Limit the link of a host in network namespaces, in both directions.

    Raises:
        RunError: the kernel does not accept the limit.
    """
    words = plan.Rate(bits_per_s).arguments.split()
    change = ["tc", "qdisc", "replace", "dev"]
    inside = cluster.run_on(host, [*change, "eth0", "root", *words])
    if inside.returncode != 0:
        raise RunError(f"the link of {host} cannot be limited: {inside.stderr}")
    index = cluster.state.host(host).index
    for process in marked_processes(cluster.folder, SWITCH):
        run_tool(["nsenter", "-t", str(process.pid), "-n", *change, f"p{index}", "root", *words])
