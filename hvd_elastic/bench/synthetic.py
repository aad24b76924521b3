"""Measures how training on synthetic data scales, by rescaling one elastic run.

The run begins at the largest size, so that all workers start at once, and shrinks from size to
size. Rank 0 times its steps (:mod:`hvd_elastic.bench.step_timer`) and reports them as metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_elastic.bench.scaling import Scaling, Settings, check_prices, scaling_of
from hvd_elastic.bench.step_timer import PREFIX
from hvd_elastic.bench.worker_run import PATIENCE_S, Say, WorkerRun
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count
from hvd_elastic.hosts.hostfile import Host


def measure_synthetic(
    hostfile: Path,
    hosts: Sequence[Host],
    sizes: Sequence[int],
    settings: Settings,
    seconds: float,
    options: Sequence[str],
    say: Say,
) -> Scaling:
    """Train on synthetic data at each size, and return the figures.

    Args:
        hostfile, hosts: path of the hostfile, and its hosts.
        sizes: numbers of slots.
        settings: what to train.
        seconds: time to measure each size for [s].
        options: further options of ``hvd-elastic run``.
        say: called with a line of progress.

    Raises:
        UsageError: a size is above the slots of the hostfile, or some hosts only have a price.
        RunError: training failed; names the cause.
    """
    slots = sum(host.slots for host in hosts)
    order = sorted(set(sizes), reverse=True)
    if order[0] > slots:
        raise UsageError(f"--np {order[0]}: {hostfile} has {count(slots, 'slot')} in all")
    check_prices(hosts)
    say(f"starting {count(order[0], 'process')}")
    found: dict[int, tuple[int, Mapping[str, Any]]] = {}
    with WorkerRun(hostfile, settings.command(seconds), order[0], options) as run:
        for size in order:
            if size != order[0]:
                run.scale(size)
            say(f"{count(size, 'slot')}: measuring for {seconds:g} s")
            found[size] = _figures(run, size, PATIENCE_S + 10 * seconds)
            rate = size * settings.batch_size / found[size][1]["step_s"]
            say(f"{count(size, 'slot')}: {rate:.1f} examples/s")
    return scaling_of(settings, hosts, found)


def _figures(run: WorkerRun, size: int, patience_s: float) -> tuple[int, Mapping[str, Any]]:
    """Wait for the figures of a size; return the number of hosts, and the figures."""
    hosts = 1

    def look(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
        nonlocal hosts
        if event["kind"] == "rescale_started":
            hosts = len(event["hosts"])
        if event["kind"] != "metrics" or event.get(PREFIX + "size") != size:
            return None
        return {
            name.removeprefix(PREFIX): value
            for name, value in event.items()
            if name.startswith(PREFIX)
        }

    figures = run.wait(look, f"figures of {count(size, 'slot')}", patience_s)
    return hosts, figures
