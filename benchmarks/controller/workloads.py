"""What is trained on the virtual hosts, and what happens to it: data alone."""

from __future__ import annotations

from dataclasses import dataclass

MOST_HOSTS = 8
"""That are there; a job uses some of them."""
HOSTS = 4
SLOTS = 2
"""Of each host, but where hosts are counted for a forecast."""
INITIAL_BATCH, MAX_BATCH = 64, 1024


@dataclass(frozen=True)
class Workload:
    """A job with an emulated device.

    Attributes:
        pass_s, example_s: a pass over m examples sleeps ``pass_s + example_s m`` [s].
        flips: part of the labels that is drawn at random: noise of the gradients.
        ballast_mb: zeros reduced with the gradients in each step [MB].
        rate: of every host's link.
        slow: factor of the emulated device time of the last of its hosts.
    """

    pass_s: float = 0.04
    example_s: float = 0.004
    flips: float = 0.5
    ballast_mb: float = 0.0
    rate: str = "1gbit"
    slow: float = 1.0


@dataclass(frozen=True)
class Change:
    """What happens to a job that has settled; by default nothing does.

    Attributes:
        workload: that the job trains.
        hosts: of the hostfile at the start.
        rate: of every host's link from then on.
        slow: factor of the emulated device time of the last host from then on.
        flips: part of the labels drawn at random that it grows to, little by little.
        appear: hosts that come into the hostfile.
        drain: hosts, from the end of the hostfile, that are drained.
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
        """Hosts that can be used from then on."""
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
"""Looked at once nothing moves any more; the noise of one grows tenfold before that."""

FORECASTS = {
    "compute-bound": _COMPUTE,
    "slow-device": Workload(pass_s=0.06, example_s=0.018),
    "communication-bound": _COMMUNICATION,
}
"""With a slow device it matters least what all the processes cost the cores that they share."""

CHANGES = {
    "link": Change(Workload(ballast_mb=4.0), rate="100mbit"),
    "slow": Change(_COMPUTE, slow=3.0),
    "appear": Change(_COMPUTE, appear=2),
    "drain": Change(_COMPUTE, hosts=HOSTS + 2, drain=2),
}
"""The link of every host falls from 1 Gbit/s to 100 Mbit/s; one host computes three times slower;
two hosts appear; two are drained."""
