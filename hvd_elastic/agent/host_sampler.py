"""Measures how busy a host is: processors, memory, network, disk, GPUs, and the run's workers.

The numbers are those of the whole machine as its kernel counts them, whoever uses it; hosts that
share a machine share them, but for the network of a namespace. Memory is that of the agent's
control groups if they are limited to less.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean

import psutil

from hvd_elastic.agent.gpus import Gpus
from hvd_elastic.control.progress import Activity
from hvd_elastic.programs.usable import memory_kills, usable_memory
from hvd_elastic.run_events import HostSample

_EVERY_S = 10.0
"""Time between two samples [s]."""
_HOSTS_PER_S = 4.0
"""Most samples of all hosts together in a second: with more than 40 hosts they are rarer."""
_FIRST_S = 2.0
"""Time until the first sample [s]."""


class HostSampler:
    """Samples the host that it runs on.

    Args:
        interface: network interface of the ring; None: all of them together.
    """

    def __init__(self, interface: str | None, host: str) -> None:
        self._interface, self._host = interface, host
        self._gpus = Gpus()
        psutil.cpu_percent()  # counts from now
        self._counted = self._counters()
        self._activities: dict[str, Activity] = {}
        self._at = time.monotonic()
        self.memory_kills = MemoryKills()
        self.hosts = 1
        """Number of hosts of the run."""

    async def watch(
        self, look: Callable[[], Mapping[str, Activity]], send: Callable[[HostSample], None]
    ) -> None:
        """Send samples, until cancelled.

        Args:
            look: returns what the workers are doing.
        """
        await asyncio.sleep(_FIRST_S)
        while True:
            send(self.sample(look()))
            await asyncio.sleep(max(_EVERY_S, self.hosts / _HOSTS_PER_S))

    def sample(self, activities: Mapping[str, Activity]) -> HostSample:
        """Return what was measured since the last sample, or since this object was made.

        Args:
            activities: what the workers of the host are doing now, by name.
        """
        now = time.monotonic()
        elapsed_s, self._at = max(1e-6, now - self._at), now
        before, self._counted = self._counted, self._counters()
        rates = [
            max(0, round((count - then) / elapsed_s))
            for count, then in zip(self._counted, before, strict=True)
        ]
        memory = usable_memory()
        self.memory_kills.count_kills()
        step_s, rank_wait = self._workers(activities, elapsed_s)
        return HostSample(
            host=self._host,
            cpu=round(psutil.cpu_percent() / 100, 3),
            memory=round(1 - memory.available / memory.total, 3),
            memory_bytes=memory.total,
            sent=rates[0],
            received=rates[1],
            read=rates[2],
            written=rates[3],
            gpus=self._gpus.sample_use(),
            step_s=step_s,
            rank_wait=rank_wait,
        )

    def _counters(self) -> tuple[int, int, int, int]:
        """Return the bytes sent, received, read from disks and written since the start."""
        network = psutil.net_io_counters(pernic=True)
        used = [network[name] for name in network if self._interface in (None, name)]
        disk = psutil.disk_io_counters()
        return (
            sum(each.bytes_sent for each in used),
            sum(each.bytes_recv for each in used),
            0 if disk is None else disk.read_bytes,
            0 if disk is None else disk.write_bytes,
        )

    def _workers(
        self, activities: Mapping[str, Activity], elapsed_s: float
    ) -> tuple[float | None, float | None]:
        """Return the compute time of a step, and the part of the time that waits for other ranks.

        They are means over the workers that have trained since the last sample; None: none has.
        """
        before, self._activities = self._activities, dict(activities)
        steps_s, waits = [], []
        for name, activity in activities.items():
            then = before.get(name)
            if then is None or then.generation != activity.generation:
                continue
            steps = activity.step - then.step
            waited_s = min(elapsed_s, max(0.0, activity.waited_s - then.waited_s))
            if steps > 0:
                read_s = _waited_for_data_s(activity) - _waited_for_data_s(then)
                steps_s.append(max(0.0, elapsed_s - waited_s - max(0.0, read_s)) / steps)
                waits.append(waited_s / elapsed_s)
        if not steps_s:
            return None, None
        return round(fmean(steps_s), 6), round(fmean(waits), 4)


class MemoryKills:
    """Tells whether the kernel has lately killed a process of the host for lack of memory.

    The kernel counts such kills, and does not say whose. A worker that SIGKILL ends shortly after
    one is taken for its victim; nobody else is likely to have killed it just then.

    Args:
        count: returns the number of kills so far.
    """

    def __init__(self, count: Callable[[], int] = memory_kills) -> None:
        self._count = count
        self._seen = deque([count()] * 2, maxlen=2)
        """Number at the last two looks: a large process takes seconds to end."""

    def count_kills(self) -> None:
        """Count again; called every few seconds."""
        self._seen.append(self._count())

    def any_new(self) -> bool:
        """Return whether there was one since the look before the last one, once for each."""
        now = self._count()
        is_new = now > self._seen[0]
        self._seen.extend([now, now])
        return is_new


def _waited_for_data_s(activity: Activity) -> float:
    return 0.0 if activity.reading is None else activity.reading.wait_s
