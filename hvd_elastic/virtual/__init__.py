"""Virtual clusters: many hosts on one machine, to try out what real machines will do.

Each host is a set of namespaces on a network bridge, with its own sshd, host name, processes,
``/data`` and ``/tmp``. Without root, hosts are addresses of the loopback interface instead. See
`cluster` for the interface, `netns` and `loopback` for the two kinds of hosts.
"""

from __future__ import annotations

from hvd_elastic.virtual.cluster import VirtualCluster

__all__ = ["VirtualCluster"]
