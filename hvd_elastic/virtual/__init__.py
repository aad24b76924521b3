"""A private cluster on one machine, to rehearse what many machines will do.

Hosts are network namespaces on a bridge, each with its own sshd, host name, processes, ``/data``
and ``/tmp``; without root they are addresses of the loopback interface. See `cluster` for the
interface, `netns` and `loopback` for what hosts are made of.
"""

from __future__ import annotations

from hvd_elastic.virtual.cluster import VirtualCluster

__all__ = ["VirtualCluster"]
