"""Which GPUs a cluster's hosts have, as the hosts say themselves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from pathlib import Path

from hvd_elastic.jobs.asked_hosts import AskedHosts
from hvd_elastic.jobs.host_wish import Gpus

_COMMAND = (
    "! command -v nvidia-smi >/dev/null || "
    "timeout 8 nvidia-smi --query-gpu=memory.total,name --format=csv,noheader,nounits"
)
"""Prints the memory [MiB] and the name of each GPU; nothing on a host without a driver."""
_AGAIN_S = 30.0
"""Time until a host that has not answered is asked again [s]."""


class HostGpus:
    """The GPUs of the hosts, which are asked when a job is the first for which they matter.

    Args:
        hostfile: hostfile of the cluster.
        ssh_config: its ssh configuration; None: the user's own.

    Attributes:
        known: GPUs of the hosts that have answered.
    """

    def __init__(self, hostfile: Path, ssh_config: str | None) -> None:
        self._hostfile, self._ssh_config = hostfile, ssh_config
        self.known: dict[str, Gpus] = {}
        self._answered: set[str] = set()
        self._asked: AskedHosts | None = None
        self._asked_at: dict[str, float] = {}

    def ask(self, hosts: Collection[str]) -> bool:
        """Ask the hosts that have not answered yet; return whether some are about to answer."""
        now = time.monotonic()
        due = [
            host
            for host in hosts
            if host not in self._answered and now >= self._asked_at.get(host, -_AGAIN_S) + _AGAIN_S
        ]
        if due and self._asked is None:
            self._asked = AskedHosts(self._hostfile, self._ssh_config, due, _COMMAND)
            self._asked_at |= dict.fromkeys(due, now)
        return self._asked is not None

    def changed(self) -> bool:
        """Take what hosts have answered; return whether all that were asked have, or will not."""
        answers = None if self._asked is None else self._asked.answers()
        if answers is None:
            return False
        self._asked = None
        for host, text in answers.items():
            with contextlib.suppress(ValueError):  # not a number: it is asked again
                self.known[host] = _gpus(text)
                self._answered.add(host)
        return True

    def ask_again(self, hosts: Collection[str]) -> None:
        """Have hosts asked again that were away: they may be other machines."""
        self._answered.difference_update(hosts)
        for host in hosts:
            self._asked_at.pop(host, None)

    def close(self) -> None:
        """End a question that is open."""
        if self._asked is not None:
            self._asked.close()


def _gpus(text: str) -> Gpus:
    """Return the GPUs of a host by what it has printed; raises ValueError if that makes no sense.

    >>> _gpus("15360, Tesla T4")
    Gpus(memory_gb=(16.10612736,), names=('Tesla T4',))
    >>> _gpus("No devices were found")
    Gpus(memory_gb=(), names=())
    """
    lines = text.replace("No devices were found", "").splitlines()
    told = [line.partition(",") for line in lines if line.strip()]
    memory_gb = (float(mib) * 2**20 / 1e9 for mib, _, _ in told)
    return Gpus((*memory_gb,), (*(name.strip() for _, _, name in told),))
