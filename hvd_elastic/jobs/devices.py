"""Which GPU each slot of a job has: jobs on one host must not share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvd_elastic.hosts.hostfile import Host


class Devices:
    """The GPUs of the slots of all jobs, by host.

    The slots of a job on a host are a stack: it gives up the last one first, so the others keep
    their GPUs. A GPU that was given up is free once the process that used it is gone.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[str, tuple[int, ...]]] = {}

    def restore(self, job: str, hosts: Sequence[Host]) -> None:
        """Take over what an earlier daemon wrote into the hostfile of a job."""
        self._of[job] = {host.name: host.devices for host in hosts if host.devices}

    def forget(self, job: str) -> None:
        """Free the GPUs of a job whose run has ended."""
        self._of.pop(job, None)

    def release(self, job: str, held: Mapping[str, int], occupied: Mapping[str, int]) -> None:
        """Free the GPUs of slots that a job neither holds nor has a process in."""
        for host, devices in list(self._of.get(job, {}).items()):
            self._of[job][host] = devices[: max(held.get(host, 0), occupied.get(host, 0))]

    def assign(self, job: str, host: Host, slots: int) -> tuple[int, ...]:
        """Return the GPUs of a job's slots on a host, new ones for the slots that it lacks.

        Args:
            job: name of the job.
            host: the host as in the cluster's hostfile; its ``devices`` are those that may be used.
            slots: number of slots that the job holds there.
        """
        own = self._of.setdefault(job, {}).get(host.name, ())
        taken = {
            device
            for name, hosts in self._of.items()
            if name != job
            for device in hosts.get(host.name, ())
        }
        others = [each for each in host.devices or range(host.slots) if each not in own]
        # Those of another job come last: only if its process there is about to end.
        free = sorted(others, key=taken.__contains__)
        kept = (*own, *free[: max(0, slots - len(own))])
        self._of[job][host.name] = kept
        return kept[:slots]
