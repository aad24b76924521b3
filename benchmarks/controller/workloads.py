"""Workloads that are trained on the virtual hosts, and changes during training, as data."""

from __future__ import annotations

from dataclasses import dataclass

MOST_HOSTS = 8
"""Number of virtual hosts; a job uses some of them."""
HOSTS = 4
SLOTS = 2
"""Slots of each host; a forecast uses one per host."""
INITIAL_BATCH, MAX_BATCH = 64, 1024


@dataclass(frozen=True)
class Workload:
    """A job with an emulated device.

    Attributes:
        pass_s, example_s: a pass over m examples sleeps ``pass_s + example_s m`` [s].
        flips: fraction of labels that are random, which sets the gradient noise.
        ballast_mb: zeros reduced with the gradients in each step [MB].
        rate: rate of every host's link.
        slow: factor of the emulated device time on the last of its hosts.
    """

    pass_s: float = 0.04
    example_s: float = 0.004
    flips: float = 0.5
    ballast_mb: float = 0.0
    rate: str = "1gbit"
    slow: float = 1.0


@dataclass(frozen=True)
class Change:
    """A change to a job that has settled; by default nothing changes.

    Attributes:
        workload: workload of the job.
        hosts: number of hosts in the hostfile at the start.
        rate: new rate of every host's link; None: unchanged.
        slow: new factor of the emulated device time on the last host.
        flips: fraction of random labels, to which it grows in small steps; None: unchanged.
        appear: number of hosts added to the hostfile.
        drain: number of hosts drained, from the end of the hostfile.
    """

    workload: Workload
    hosts: int = HOSTS
    rate: str | None = None
    slow: float = 1.0
    flips: float | None = None
    appear: int = 0
    drain: int = 0

    @property
    def hosts_after(self) -> int:
        """Number of hosts that can be used after the change."""
        return self.hosts + self.appear - self.drain


_COMPUTE = Workload(pass_s=0.02, example_s=0.006)
_COMMUNICATION = Workload(ballast_mb=4.0, rate="100mbit")

WORKLOADS = {
    "compute-bound": Change(_COMPUTE),
    "communication-bound": Change(_COMMUNICATION),
    "low-noise": Change(Workload(flips=0.0)),
    "high-noise": Change(Workload(flips=0.9)),
    "noise-growing": Change(Workload(flips=0.0), flips=0.9),
    "unequal-hosts": Change(Workload(pass_s=0.02, example_s=0.006, slow=3.0)),
}
"""Workloads measured in steady state; the noise of one grows tenfold before that."""

FORECASTS = {
    "compute-bound": _COMPUTE,
    "slow-device": Workload(pass_s=0.06, example_s=0.018),
    "communication-bound": _COMMUNICATION,
}
"""Workloads whose throughput is forecast; with the slow device the cores that all processes share
matter least."""

CHANGES = {
    "link": Change(Workload(ballast_mb=4.0), rate="100mbit"),
    "slow": Change(_COMPUTE, slow=3.0),
    "appear": Change(_COMPUTE, appear=2),
    "drain": Change(_COMPUTE, hosts=HOSTS + 2, drain=2),
}
"""Every link falls from 1 Gbit/s to 100 Mbit/s; one host computes three times slower; two hosts
appear; two hosts are drained."""
