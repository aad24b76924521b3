"""Runs a training briefly at a few sizes, so that its step time can be predicted for others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvd_elastic.bench.background_run import PATIENCE_S, BackgroundRun, Say
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import ReadEvent, RescaleFinished

_ADVICE = ". Give it a longer training (more epochs), or a shorter --probe-for"


def sizes_to_probe(hosts: Sequence[Host]) -> list[int]:
    """Return the numbers of processes that are most informative to measure.

    On one host these are one, two and all slots; on two hosts, the fewest processes that use both
    and all slots.

    >>> sizes_to_probe([Host("a", slots=8), Host("b", slots=4), Host("c", slots=8)])
    [1, 2, 8, 9, 12]
    """
    first = hosts[0].slots
    both = first + (hosts[1].slots if len(hosts) > 1 else 0)
    return sorted({size for size in (1, 2, first, first + 1, both) if size <= both})


def probe(
    hostfile: Path,
    hosts: Sequence[Host],
    command: Sequence[str],
    for_s: float,
    options: Sequence[str],
    say: Say,
) -> RunFolder:
    """Train for a while at each of :func:`sizes_to_probe`, then end the run.

    Args:
        hostfile, hosts: path of the hostfile, and its hosts.
        command: training command.
        for_s: training time over all sizes together [s].
        options: further options of ``hvd-elastic run``.
        say: called with a line of text for each size.

    Returns:
        The run folder, with the events that were measured.

    Raises:
        UsageError: ``hvd-elastic run`` rejected its options.
        RunError: the run could not be started, or ended before it was measured at every size.
    """
    sizes = sizes_to_probe(hosts)
    with BackgroundRun(hostfile, command, sizes[0], options, "the probe", _ADVICE) as run:
        for size in sizes:
            say(f"probing: {size} of {sizes[-1]} processes")
            if size != sizes[0]:
                run.scale(size)

            def look(event: ReadEvent, size: int = size) -> bool | None:
                return (isinstance(event, RescaleFinished) and event.size == size) or None

            run.wait(look, f"training on {size} processes", PATIENCE_S)
            run.train(for_s / len(sizes))
    return run.folder
