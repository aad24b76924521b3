"""Measures how training on synthetic data scales, by rescaling one elastic run.

The run begins at the largest size, so that all workers start at once, and shrinks from size to
size. Rank 0 times its steps (:mod:`hvd_elastic.bench.step_timer`) and reports them as metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hvd_elastic.bench.background_run import PATIENCE_S, BackgroundRun
from hvd_elastic.bench.scaling import Scaling, Settings, check_prices, scaling_of
from hvd_elastic.bench.step_timer import PREFIX
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.policy.evidence import replay
from hvd_elastic.run_events import Metrics, ReadEvent, RescaleStarted


class ProgressView(Protocol):
    """Is told how the measurement continues."""

    def say(self, text: str) -> None:
        """Note what is being done."""

    def measured(self, slots: int, per_s: float, noise: float | None) -> None:
        """Note the throughput of a size [examples/s], and half of its 95 % interval, relative.

        Without ``noise`` the size is still being measured.
        """


def measure_synthetic(
    hostfile: Path,
    hosts: Sequence[Host],
    sizes: Sequence[int],
    settings: Settings,
    seconds: float,
    options: Sequence[str],
    progress: ProgressView,
) -> Scaling:
    """Train on synthetic data at each size, and return the figures.

    Args:
        sizes: numbers of slots.
        seconds: time to measure each size for [s].
        options: further options of ``hvd-elastic run``.

    Raises:
        UsageError: a size is above the slots of the hostfile, or some hosts only have a price.
        RunError: training failed; names the cause.
    """
    slots = sum(host.slots for host in hosts)
    order = sorted(set(sizes), reverse=True)
    if order[0] > slots:
        raise UsageError(f"--np {order[0]}: {hostfile} has {count(slots, 'slot')} in all")
    check_prices(hosts)
    progress.say(f"starting {count(order[0], 'process')}")
    found: dict[int, tuple[int, Mapping[str, Any]]] = {}
    command = settings.command(seconds, max(host.slots for host in hosts))
    with BackgroundRun(hostfile, command, order[0], options, "the benchmark") as run:
        for size in order:
            if size != order[0]:
                run.scale(size)
            progress.say(f"{count(size, 'slot')}: measuring for {seconds:g} s")
            examples = size * settings.batch_size

            def step_took(seconds: float, slots: int = size, examples: int = examples) -> None:
                progress.measured(slots, examples / seconds, None)

            found[size] = _figures(run, size, PATIENCE_S + 10 * seconds, step_took)
            step_s, half_s = (found[size][1][name] for name in ("step_s", "half_s"))
            progress.measured(size, examples / step_s, half_s / step_s)
        cores = replay(run.folder.read_events()).cores
    return scaling_of(settings, hosts, found, cores)


def _figures(
    run: BackgroundRun, size: int, patience_s: float, step_took: Callable[[float], None]
) -> tuple[int, Mapping[str, Any]]:
    """Wait for the figures of a size; return the number of hosts, and the figures.

    ``step_took`` is called now and then with the mean time of a step so far [s].
    """
    hosts = 1
    began: tuple[float, int] | None = None

    def look(event: ReadEvent) -> Mapping[str, Any] | None:
        nonlocal hosts, began
        if isinstance(event, RescaleStarted):
            hosts = len(event.hosts)
        if not isinstance(event, Metrics) or event.size != size:
            return None
        if event.values.get(PREFIX + "size") != size:
            began = began or (event.mono, event.step)
            if steps := event.step - began[1]:
                step_took((event.mono - began[0]) / steps)
            return None
        return {
            name.removeprefix(PREFIX): value
            for name, value in event.values.items()
            if name.startswith(PREFIX)
        }

    figures = run.wait(look, f"figures of {count(size, 'slot')}", patience_s)
    return hosts, figures
