"""What is trained on the virtual hosts, and what happens to it: data alone."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHANGES", "FORECASTS", "HOSTS", "INITIAL_BATCH", "MAX_BATCH", "SLOTS", "WORKLOADS"]
__all__ += ["Change", "Workload"]

HOSTS = 4
SLOTS = 2
"""Of each host."""
INITIAL_BATCH, MAX_BATCH = 64, 1024


@dataclass(frozen=True)
class Workload:
    """A job with an emulated device.

    Attributes:
        pass_s, example_s: a pass over m examples sleeps ``pass_s + example_s m`` [s].
        flips: part of the labels that is drawn at random: noise of the gradients.
        ballast_mb: zeros reduced with the gradients in each step [MB].
        rate: of every host's link.
    """

    pass_s: float = 0.04
    example_s: float = 0.004
    flips: float = 0.5
    ballast_mb: float = 0.0
    rate: str = "1gbit"


WORKLOADS = {
    "compute-bound": Workload(pass_s=0.02, example_s=0.006),
    "communication-bound": Workload(ballast_mb=4.0, rate="100mbit"),
    "low-noise": Workload(flips=0.0),
    "high-noise": Workload(flips=0.9),
}

FORECASTS = {
    "compute-bound": WORKLOADS["compute-bound"],
    "slow-device": Workload(pass_s=0.06, example_s=0.018),
    "communication-bound": WORKLOADS["communication-bound"],
}
"""With a slow device it matters least what all the processes cost the cores that they share."""


@dataclass(frozen=True)
class Change:
    """What happens to a job that has settled; by default nothing does.

    Attributes:
        workload: that the job trains.
        hosts: of the hostfile at the start.
        rate: of every host's link from then on.
        slow: factor of the emulated device time of the last host from then on.
        appear: whether the other hosts come into the hostfile.
        drain: hosts, from the end of the hostfile, that are drained.
    """

    workload: Workload
    hosts: int = HOSTS
    rate: str | None = None
    slow: float = 1.0
    appear: bool = False
    drain: int = 0


CHANGES = {
    "link": Change(Workload(ballast_mb=4.0), rate="100mbit"),
    "slow": Change(WORKLOADS["compute-bound"], slow=3.0),
    "appear": Change(WORKLOADS["compute-bound"], hosts=2, appear=True),
    "drain": Change(WORKLOADS["compute-bound"], drain=2),
}
"""The link of every host falls from 1 Gbit/s to 100 Mbit/s; one host computes three times slower;
two hosts appear; two are drained."""
