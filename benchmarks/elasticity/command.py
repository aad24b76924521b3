"""The command line of ``benchmarks/elasticity.py``: rows by launchers by repetitions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.elasticity.breakdown import Breakdown, measure_breakdown
from benchmarks.elasticity.ratio import TrainingRatio, measure_ratio
from benchmarks.elasticity.results import Observation, elasticity_result
from benchmarks.elasticity.rows import ROWS, Row, parse_rows
from benchmarks.elasticity.stage import STEP_TIME_S, Stage
from benchmarks.testbed.command import Say, at_least_one, names, run_benchmark
from benchmarks.testbed.environments import PeerMissingError
from benchmarks.testbed.figures import Result, conditions
from benchmarks.testbed.launchers import OURS, PEERS, TORCHFT, FailedPlayError, Launcher
from hvd_elastic.errors import RunError, UsageError

_ABOUT = """What joins, leaves and failures cost: ours, with PyTorch and Keras, beside its peers.

The same workload on the same virtual hosts, seen by one clock. Needs root. Peers that are not
installed are put into an environment in your cache folder; one that cannot be is left out.

Example: python benchmarks/elasticity.py --rows 1,3,4 --repetitions 5 --out elasticity.json
"""
_NOTE = (
    f"All ranks on this one machine; steps are padded with a sleep of {STEP_TIME_S * 1000:.0f} ms "
    "(rows 13 and 14: 50 ms instead of computing, row 12: none). Launchers take turns."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with its command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="elasticity.py",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    told = "rows of the table, as in 1,3,6-8 (default: all)"
    parser.add_argument("--rows", metavar="LIST", help=told)
    known = ",".join(PEERS)
    parser.add_argument("--peers", metavar="LIST", default=known, help=f"of {known} (default: all)")
    told = "measured rounds (3)"
    parser.add_argument("--repetitions", "-n", type=at_least_one, default=3, help=told)
    told = "patience with a job that does not go on (90)"
    parser.add_argument("--limit", type=float, default=90.0, metavar="SECONDS", help=told)
    told = "training with a random kill every 10 s, 0 for none"
    parser.add_argument("--etr", type=float, default=0.0, metavar="MINUTES", help=told)
    parser.add_argument("--seed", type=int, default=0, help="of the random kills")
    told = "look into our own stall in rows 1, 3 and 4 as well"
    parser.add_argument("--breakdown", action="store_true", help=told)
    return run_benchmark(parser, measure_elasticity, arguments)


def parse_peers(text: str) -> list[Launcher]:
    """Return the launchers that ``--peers`` names, in the order of the table.

    >>> [launcher.key for launcher in parse_peers("torchrun,ours")]
    ['ours', 'torchrun']

    Raises:
        UsageError: a name is unknown.
    """
    wanted = names(text)
    unknown = [key for key in wanted if key not in PEERS]
    if unknown or not wanted:
        raise UsageError(
            f"--peers {text}: {', '.join(unknown) or 'nothing'} is not known. "
            f"Valid: {', '.join(PEERS)}"
        )
    return [launcher for key, launcher in PEERS.items() if key in wanted]


def measure_elasticity(options: argparse.Namespace, say: Say) -> Result:
    """Measure what the command line asks for; ``say`` is called with progress messages.

    Raises:
        UsageError: an option is invalid, or this process is not root.
    """
    if not 0 < options.limit < float("inf"):
        raise UsageError(f"--limit takes a number above 0, not '{options.limit}'")
    if not 0 <= options.etr < float("inf"):
        raise UsageError(f"--etr takes a number of 0 or more, not '{options.etr}'")
    rows = ROWS if options.rows is None else parse_rows(options.rows)
    launchers = parse_peers(options.peers)
    if os.geteuid() != 0:
        raise UsageError(
            "this benchmark cuts cables and limits links, which needs root (network namespaces). "
            "Run it as root; python benchmarks/startup.py works without"
        )
    load_before = os.getloadavg()
    missing: dict[str, str] = {}
    shares: list[Path] = []
    for launcher in launchers:
        try:
            say(f"{launcher.name}: looking for what it needs")
            shares += launcher.prepare()
        except PeerMissingError as error:
            missing[launcher.key] = str(error)
            say(f"{launcher.name}: not measured: {error}")
    present = [launcher for launcher in launchers if launcher.key not in missing]
    observations: list[Observation] = []
    ratios: list[TrainingRatio] = []
    parts: list[Breakdown] = []
    with Stage(options.limit, shares) as stage:
        for number in range(1, options.repetitions + 1):
            for row in rows:
                for launcher in present:
                    if launcher.key not in row.without:
                        where = f"round {number} of {options.repetitions}, row {row.number}"
                        say(f"{where}: {launcher.name}: {row.title}")
                        for seen in _observe(stage, row, launcher):
                            observations.append(seen)
                            told = seen.why_none or f"{seen.value:.3f}"
                            say(f"{where}: {launcher.name}: {seen.case}: {told}")
        if options.breakdown and OURS in present:
            parts = measure_breakdown(stage, options.repetitions, say)
        if options.etr:
            ratios = [
                measure_ratio(stage, launcher, options.etr * 60.0, options.seed, say)
                for launcher in (OURS, TORCHFT)
                if launcher in present
            ]
        hosts = stage.description
    versions = {name: text for each in present for name, text in each.versions().items()}
    return elasticity_result(
        conditions(hosts, _NOTE, load_before, versions),
        options.repetitions,
        rows,
        observations,
        {launcher.key: launcher.name for launcher in launchers},
        missing,
        ratios,
        parts,
    )


def _observe(stage: Stage, row: Row, launcher: Launcher) -> Iterator[Observation]:
    """Play a row once; yield its figures, or the reason for each figure that is missing."""
    left = [case.name for case in row.cases]
    short = detail = ""
    try:
        for case, value in row.play(stage, launcher):
            left.remove(case)
            yield Observation(row.number, launcher.key, case, round(value, 4))
    except FailedPlayError as error:
        short, detail = error.short, error.detail
    except RunError as error:
        short, detail = str(error).splitlines()[0], str(error)
    for case in left:
        yield Observation(row.number, launcher.key, case, None, short, detail)
