"""Checks the figures of ``hvd-elastic bench synthetic``; see README.md here.

Eight virtual hosts with an emulated device, beside plain TCP transfers of the bytes that a ring
sends, with links of the highest rate at which this machine lets plain TCP use them fully.

Run it: ``python benchmarks/scaling.py --out benchmarks/results/scaling.json``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.testbed.command import Say, numbers, run_benchmark
from benchmarks.testbed.figures import Result, conditions
from benchmarks.testbed.hosts import Testbed, make_testbed
from benchmarks.testbed.raw_tcp import time_raw_tcp
from hvd_elastic.bench.scaling import Scaling, Settings
from hvd_elastic.bench.synthetic import measure_synthetic
from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import Host

SIZES = (1, 2, 4, 8)
PARAMETERS = 25_557_032
"""Of ResNet-50."""
RING_SHARE = 0.55
"""Time of the ring relative to that of the emulated device: most of it can be hidden behind the
backward pass, which takes two thirds of the device's time."""
RATES = (1000, 800, 600, 500, 400, 300, 200, 100)
"""Rates of links to try [Mbit/s]."""
SUSTAINED = 0.9
"""Least share of a link that plain TCP has to use, headers included."""
WIRE = 1514 / 1448
"""Bytes of a full packet for each byte of its content."""


class Lines:
    """Shows progress as lines; see :class:`hvd_elastic.bench.synthetic.Progress`."""

    def __init__(self, say: Say) -> None:
        self.say = say

    def measured(self, slots: int, per_s: float, noise: float | None) -> None:
        """Show the throughput of a size."""
        if noise is not None:
            self.say(f"{slots} slots: {per_s:.1f} examples/s")


def _measured(bed: Testbed, settings: Settings, seconds: float, say: Say) -> Scaling:
    hostfile = bed.scratch / "scaling-hosts"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in bed.hosts))
    hosts = [Host(name) for name in bed.hosts]
    options = ["--ssh-config", str(bed.cluster.ssh_config)]
    return measure_synthetic(hostfile, hosts, SIZES, settings, seconds, options, Lines(say))


def _time_ring(bed: Testbed, sent: int) -> float:
    """Return the time in which every host sends so many bytes to the next by plain TCP [s]."""
    around = [*bed.hosts, bed.hosts[0]]
    return median(time_raw_tcp(bed.cluster, around, sent) for _ in range(3))


def measure_ring(say: Say, rates: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Return the row of eight hosts with an emulated device, at the first rate that is sustained.

    Raises:
        RunError: none is.
    """
    ranks = SIZES[-1]
    sent = round(4 * PARAMETERS * 2 * (ranks - 1) / ranks)
    for mbit in rates:
        with make_testbed(ranks, rate=f"{mbit}mbit") as bed:
            ring_s = _time_ring(bed, sent)
            used = 8e-6 * WIRE * sent / mbit / ring_s
            say(f"{mbit} Mbit/s: plain TCP uses {100 * used:.0f} % of the links")
            if used < SUSTAINED:
                continue
            device = Settings(emulated=(round(ring_s / RING_SHARE, 1), 0.0))
            found = _measured(bed, device, seconds, say)
            ring_s = max(ring_s, _time_ring(bed, sent))
            return [_ring_row(found, mbit, sent, ring_s, say)]
    raise RunError(f"plain TCP uses less than {SUSTAINED:.0%} of the links at all of {rates}")


def _ring_row(found: Scaling, mbit: int, sent: int, ring_s: float, say: Say) -> dict[str, Any]:
    last = found.sizes[-1]
    # As if the whole ring could be hidden, though its last bytes are known when the passes end.
    alone_s = found.sizes[0].step_s
    allowed = alone_s / max(alone_s, ring_s)
    assert found.check is not None
    row = {
        "hosts": last.slots,
        "link_mbit": mbit,
        "sent_mb": sent / 1e6,
        "ring_s": ring_s,
        "link_used": 8e-6 * WIRE * sent / mbit / ring_s,
        "alone_s": alone_s,
        "step_s": last.step_s,
        "efficiency": last.efficiency,
        "allowed": allowed,
        "of_allowed": last.efficiency / allowed,
        "compute_s": last.compute_s,
        "exposed_s": last.exposed_s,
        "rest_s": last.rest_s,
        "predicted_off": found.check[1] - 1,
        "words": found.words,
    }
    say(f"{last.slots} hosts: {row['of_allowed']:.3f} of what plain TCP allows; {found.words}")
    return row


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure the ring."""
    load_before = os.getloadavg()
    os.environ["OMP_NUM_THREADS"] = "1"
    tables = {"ring": measure_ring(say, options.rates, options.seconds)}
    note = "A device is emulated whose passes take as long as alone_s."
    return Result("scaling", conditions(f"{SIZES[-1]} virtual hosts", note, load_before), tables)


def main() -> int:
    """Run the benchmark with its command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="scaling.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=numbers, default=list(RATES), help="of links [Mbit/s]")
    parser.add_argument("--seconds", type=float, default=6.0, help="time for each size")
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
