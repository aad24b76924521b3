"""The actor that makes a place in a Ray cluster a host of a training."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping
from typing import Any

from hvd_elastic.engines.host_process import HostProcess
from hvd_elastic.errors import DataError
from hvd_elastic.ray.data import RowServer, StoredRows


class HostActor:
    """One place for a worker: runs a host process, and serves rows to the worker.

    Args:
        invitation: of the leader; it reaches the actor through Ray, with the cluster's token.
        datasets: names of the data sets that will be offered.
    """

    def __init__(self, invitation: Mapping[str, Any], datasets: Collection[str]) -> None:
        self._rows = RowServer(datasets)
        self._process = HostProcess(invitation, platform.node(), 1, self._rows.variables)

    def serve(self) -> None:
        """Wait until the leader has no more use for this host; see :meth:`HostProcess.wait`."""
        self._process.wait()

    def offer(self, name: str, stored: StoredRows | DataError) -> None:
        """Serve a data set, or say why there is none."""
        self._rows.offer(name, stored)
